"""verl's own language engines where verl registers none: without an accelerator.

They subclass what verl has. Each masks the vision tokens out of the policy's distribution, as the rollout does, so
that both speak of the same one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from crossrl_gui_agent.generate import banned_ids

log = logging.getLogger(__name__)

_ROLLOUT_REGISTRY["transformers", "async"] = "crossrl_gui_agent.verl.rollout.TransformersAdapter"


class NoVisionTokens:
    """Mixin of an engine with `prepare_model_outputs`: no probability for tokens that only an image may have."""

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any):
        """See verl; the logits of vision tokens become the least finite number (-inf would make the entropy NaN)."""
        banned = torch.tensor(banned_ids(self.model_config.tokenizer), device=output.logits.device)
        output.logits = output.logits.index_fill(-1, banned, torch.finfo(output.logits.dtype).min)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFsdp2(NoVisionTokens, FSDPEngineWithLMHead):
    """verl's FSDP2 engine on CPUs."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl keeps a forward-only model in pinned memory, which needs an accelerator: build it as a trainable one
        forward_only = self.engine_config.forward_only
        object.__setattr__(self.engine_config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(self.engine_config, "forward_only", forward_only)
