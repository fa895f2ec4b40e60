"""The diffusion engine on VeOmni: FSDP2 sharding, Ulysses, LoRA or full fine-tuning, sharded checkpoints."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from veomni.checkpoint.dcp_checkpointer import ModelState, OptimizerState
from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm
from veomni.distributed.parallel_state import use_parallel_state
from veomni.models import build_foundation_model
from veomni.optim import build_optimizer

from crossrl.cache import Condition
from crossrl.config import Lora
from crossrl.engine import DataParallel
from crossrl.errors import ConfigError
from crossrl.fsdp2 import lora
from crossrl.fsdp2.checkpoint import check_weights
from crossrl.fsdp2.engine import Fsdp2Engine
from crossrl.fsdp2.shards import world_size
from crossrl_veomni import attention, compat
from crossrl_veomni.models import family_module

log = logging.getLogger(__name__)


class VeOmniEngine(Fsdp2Engine):
    """One rank's part of a model that VeOmni shards. A process group must exist, also in a single process."""

    name = "veomni"

    # ---- build -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Load `transformer/` of the family's folder, shard it, make the optimizer and the weight slots.

        Raises `WorkerError` without a process group, `ConfigError` for what cannot be combined, `CheckpointError`
        for weights that do not fit the model.
        """
        model, parallel = self.config.model, self.config.parallel
        self.models = family_module(model.family)
        folder = self.family.folder / "transformer"
        if (self.family.folder / "transformer_2").is_dir():
            raise ConfigError(
                "a pipeline with two transformers (Wan 2.2 A14B) is not supported: only the first would be trained",
                where=str(self.family.folder),
            )
        with compat.quiet():
            self.config.check_world_size(world_size("VeOmni"))
            self.state = compat.parallel_state(parallel.ulysses, self.device)
            with use_parallel_state(self.state):
                self.module = self._sharded(self._on_meta(folder), folder)
        settings = self.config.optimizer
        self._finish(build_optimizer(self.module, settings.lr, settings.betas, settings.eps, settings.weight_decay))
        log.info(
            "%s: %d parameters, %d trained, %s, %d-way data parallel x %d-way Ulysses, slots %s",
            folder,
            sum(p.numel() for p in self.module.parameters()),
            sum(p.numel() for p in self._slots.parameters.values()),
            model.dtype,
            self.state.dp_size,
            parallel.ulysses,
            self.slots,
        )

    def _on_meta(self, folder: Path) -> torch.nn.Module:
        """The network without weights, checked against what the config asks and what the folder holds."""
        model, parallel, video = self.config.model, self.config.parallel, self.config.video
        network = self.models.load_config(folder, model.layers)
        function = attention.choose(
            model.attention,
            device=self.device,
            dtype=model.dtype,
            ulysses=parallel.ulysses,
            heads=network.num_attention_heads,
        )
        shape = self.family.latent_shape(video.frames, video.height, video.width)
        self.models.check_tokens(network, shape[1:], parallel.ulysses)
        with compat.loss_mapping_kept():
            module = build_foundation_model(
                network,
                weights_path=str(folder),
                torch_dtype="float32",
                init_device="meta",
                ops_implementation=compat.operators(function),
            )
        expected = {name: p.shape for name, p in module.state_dict().items()}
        check_weights(folder, expected, partial=model.layers is not None)
        self._network = network
        return module

    def _sharded(self, module: torch.nn.Module, folder: Path) -> torch.nn.Module:
        model = self.config.model
        if model.lora is not None:
            module = _adapted(module, model.lora)
        module = compat.parallelize(module, folder, model, self.config.parallel, self.state)
        if model.lora is not None:
            lora.initialise(module.named_parameters(), self.config.seed)
        return module

    @property
    def data_parallel(self) -> DataParallel:
        """Place among the ranks that see different samples; those of a Ulysses group see the same ones."""
        state = self.state
        return DataParallel(state.dp_rank, state.dp_size, state.dp_group, primary=state.sp_rank <= 0)

    # ---- compute -----------------------------------------------------------------------------------------------

    def predict(self, x: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Velocity [n, C, F, H, W] fp32; `condition` is named as the network's arguments (`encoder_hidden_states`)."""
        with self.in_force():
            return self.module(hidden_states=x, timestep=1000.0 * sigma.float(), **condition)

    def in_force(self) -> AbstractContextManager[None]:
        """This engine's meshes as VeOmni's current ones."""
        return use_parallel_state(self.state)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip by the global norm of all shards; returns it as it was."""
        with self.in_force():
            return veomni_clip_grad_norm(self.module, max_norm)

    def states(self, with_optimizer: bool) -> dict[str, object]:
        """VeOmni's own views of weights and moments."""
        contents: dict[str, object] = {"model": ModelState(self.module, self.config.model.lora is not None, self.state)}
        if with_optimizer:
            contents["optimizer"] = OptimizerState(self.module, self.optimizer, self.state)
        return contents

    def write_transformer(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """See the base class."""
        settings = self.config.model.lora
        if settings is not None:
            weights = {name.removeprefix(lora.PREFIX): value for name, value in weights.items()}
            lora.save_adapter(weights, settings, folder / "transformer_lora")
            weights = lora.merged(weights, settings)
        self.models.to_diffusers(self._network, weights).save_pretrained(folder / "transformer")


def _adapted(module: torch.nn.Module, settings: Lora) -> PeftModel:
    """`module` (on meta) with an adapter on every target; only the adapter trains."""
    try:
        return get_peft_model(module, lora.adapter_config(settings))
    except ValueError as error:
        raise ConfigError(str(error), where="model.lora.targets") from error
