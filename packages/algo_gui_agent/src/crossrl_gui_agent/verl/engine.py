"""verl's own language engines with CrossRL's log-prob head, and where verl registers none: without an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from crossrl.head import MIB, linear_logprob
from crossrl_gui_agent.generate import banned_ids
from crossrl_gui_agent.patches import multiply_patches

_ROLLOUT_REGISTRY["transformers", "async"] = "crossrl_gui_agent.verl.rollout.TransformersAdapter"

DEFAULT_HEAD_BYTES = 256 * MIB


class TiledHead:
    """Mixin of a verl engine with `prepare_model_inputs` and `prepare_model_outputs`: no logits in any pass.

    Log-probs and entropies are those of the answer's tokens, 0 elsewhere; tokens that only an image may have get no
    probability, as in the rollout, so that both speak of one distribution. `model.fused_kernel_options.max_head_bytes`
    bounds the buffers. One temperature a sample; no sequence parallelism.
    """

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        banned = torch.tensor(banned_ids(self.model_config.tokenizer))
        options = self.model_config.fused_kernel_options
        limit = int(options.get("max_head_bytes", DEFAULT_HEAD_BYTES))
        head = module.get_output_embeddings()

        def forward(hidden: Tensor) -> Tensor:
            labels, mask, temperature, entropy = self._wanted
            pair = linear_logprob(
                hidden,
                head.weight,
                labels,
                mask=mask,
                temperature=temperature,
                entropy=entropy,
                forbidden=banned.to(hidden.device),
                max_bytes=limit,
            )
            return torch.stack([pair[0], pair[0] if pair[1] is None else pair[1]], dim=-1)

        head.forward = forward
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """See verl; also notes which rows the head shall compute."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        ids = inputs["input_ids"]
        labels = arguments["input_ids_rmpad_rolled"]
        mask = _predicts_answer(micro_batch, labels)
        temperature = arguments.get("temperature_rmpad")
        if temperature is None:  # padded: verl rolls the packed tokens
            packed = torch.arange(1, len(labels) + 1, device=labels.device)
            packed = torch.nested.nested_tensor_from_jagged(packed, micro_batch["input_ids"].offsets())
            place = torch.nested.to_padded_tensor(packed, 0, ids.shape)
            shown = place > 0
            labels = torch.where(shown, labels[(place - 1).clamp(min=0)], 0)
            mask = mask[(place - 1).clamp(min=0)] & shown
            temperature = arguments["temperature"][:, None].expand(ids.shape)
        entropy = tensordict_utils.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        self._wanted = (labels.view(ids.shape), mask.view(ids.shape), temperature.view(ids.shape), entropy)
        return inputs, arguments

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any):
        """See verl; what the head returned stands where a fused kernel's results would."""
        output.log_probs, output.entropy = output.logits.unbind(-1)
        tensordict_utils.assign_non_tensor(micro_batch, use_fused_kernels=True)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)


def _predicts_answer(micro_batch: TensorDict, labels: Tensor) -> Tensor:
    """[packed tokens] bool: whether the token after it is part of the answer, whose lengths `responses` has."""
    ends = micro_batch["input_ids"].offsets()[1:]
    answers = micro_batch["responses"].offsets().diff()
    mask = torch.zeros_like(labels, dtype=torch.bool)
    for end, length in zip(ends.tolist(), answers.tolist(), strict=True):
        mask[end - length - 1 : end - 1] = True
    return mask


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFsdp2(TiledHead, FSDPEngineWithLMHead):
    """verl's FSDP2 engine on CPUs."""

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        multiply_patches(module)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl keeps a forward-only model in pinned memory, which needs an accelerator: build it as a trainable one
        forward_only = self.engine_config.forward_only
        object.__setattr__(self.engine_config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(self.engine_config, "forward_only", forward_only)
