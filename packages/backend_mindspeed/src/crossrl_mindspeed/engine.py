"""The diffusion engine on MindSpeed-MM: its Wan, FSDP2, Ulysses and recompute; LoRA or full fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from crossrl.cache import Condition
from crossrl.config import Lora
from crossrl.engine import DataParallel
from crossrl.errors import CheckpointError
from crossrl.fsdp2 import lora
from crossrl.fsdp2.checkpoint import Moments, TrainedWeights, on_rank_zero
from crossrl.fsdp2.engine import Fsdp2Engine
from crossrl.fsdp2.shards import world_size
from crossrl_mindspeed import attention, compat
from crossrl_mindspeed.convert import converted, to_diffusers
from crossrl_mindspeed.models import family_module
from crossrl_mindspeed.source import components

log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""MindSpeed-MM's file that names the newest iteration of a checkpoint folder."""


class MindSpeedEngine(Fsdp2Engine):
    """One rank's part of a model that MindSpeed-MM shards. A process group must exist, also in a single process."""

    name = "mindspeed"

    # ---- build -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Load `transformer/` of the family's folder, shard it, make the optimizer and the weight slots.

        Raises `PluginError` if MindSpeed-MM lacks something, `WorkerError` without a process group, `ConfigError` for
        what cannot be combined, `CheckpointError` for weights that do not fit the model.
        """
        model, parallel, optimizer = self.config.model, self.config.parallel, self.config.optimizer
        self.parts, self.models = components(), family_module(model.family)
        self.config.check_world_size(world_size("MindSpeed-MM"))
        compat.check_device(self.parts, self.device)
        self.module = self._on_meta()
        arguments = compat.parallel_arguments(self.parts, model, parallel, self.device, self.models.BLOCKS)
        self.state = compat.parallel_state(self.parts, arguments)
        if world_size("MindSpeed-MM") > 1 or model.dtype != "float32":  # one rank in fp32 has nothing to shard
            self.module = compat.shard(self.parts, self.module, arguments, self.state, self.device)
        self.module.to_empty(device=self.device)
        self.models.load_weights(self.module, self.family.folder / "transformer")
        if model.lora is not None:
            named = ((lora.PREFIX + to_diffusers(n), p) for n, p in self.module.named_parameters() if "lora_" in n)
            lora.initialise(named, self.config.seed)
        with self.in_force():
            self._finish(
                self.parts.build_optimizer(
                    self.module, optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay
                )
            )
        log.info(
            "%s: %d parameters, %d trained, %s, %d-way data parallel x %d-way Ulysses, slots %s",
            self.family.folder,
            sum(p.numel() for p in self.module.parameters()),
            sum(p.numel() for p in self._slots.parameters.values()),
            model.dtype,
            self.state.get_dp_group_size(),
            parallel.ulysses,
            self.slots,
        )

    def _on_meta(self) -> torch.nn.Module:
        """The network without weights, with its adapters and recompute, checked against config and folder."""
        model, parallel, video = self.config.model, self.config.parallel, self.config.video
        self._network = self.models.load_config(self.family.folder, model.layers)
        function = attention.choose(
            model.attention,
            device=self.device,
            dtype=model.dtype,
            ulysses=parallel.ulysses,
            heads=self._network["num_attention_heads"],
        )
        shape = self.family.latent_shape(video.frames, video.height, video.width)
        self.models.check_latents(self._network, shape[1:], parallel.ulysses)
        if model.dtype == "float32":
            attention.check(self.parts.modeling)
        module = self.models.build(self.parts.modeling, self._network, function)
        self.models.check_folder(module, self.family.folder / "transformer", partial=model.layers is not None)
        if model.lora is not None:
            module = self._adapted(module, model.lora)
        if model.gradient_checkpointing:
            compat.recompute(self.parts, module, self.models.BLOCKS)
        return module

    def _adapted(self, module: torch.nn.Module, settings: Lora) -> torch.nn.Module:
        targets = self.models.adapter_targets(module, settings.targets)
        module.requires_grad_(False)
        return self.parts.add_lora_to_model(module, settings.rank, settings.alpha, targets, lora_dropout=0.0)

    @property
    def data_parallel(self) -> DataParallel:
        """Place among the ranks that see different samples; those of a Ulysses group see the same ones."""
        state = self.state
        return DataParallel(
            state.get_dp_rank(), state.get_dp_group_size(), state.get_dp_group(), state.get_ulysses_rank() == 0
        )

    # ---- compute -----------------------------------------------------------------------------------------------

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """This engine's meshes as MindSpeed-MM's current ones, and attention in the precision of the model."""
        with ExitStack() as stack:
            stack.enter_context(compat.in_use(self.parts, self.state))
            if self.config.model.dtype == "float32":
                stack.enter_context(attention.in_fp32(self.parts.modeling))
            yield

    def predict(self, x: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Velocity [n, C, F, H, W] fp32; `condition` is named as diffusers' arguments (`encoder_hidden_states`)."""
        self.models.check_latents(self._network, x.shape[2:], self.config.parallel.ulysses)
        with self.in_force():
            return self.models.predict(self.module, x, 1000.0 * sigma.float(), condition)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip by the global norm of all shards; returns it as it was."""
        with self.in_force():
            return float(self.parts.clip_grad_norm(self.module, max_norm))

    # ---- files -------------------------------------------------------------------------------------------------

    def states(self, with_optimizer: bool) -> dict[str, object]:
        """Weights and moments under MindSpeed-MM's names, as its own checkpoints have them."""
        contents: dict[str, object] = {"model": TrainedWeights(self.module)}
        if with_optimizer:
            contents["optimizer"] = Moments(self.module, self.optimizer)
        return contents

    def checkpoint_folder(self, folder: Path, new: bool) -> Path:
        """MindSpeed-MM's layout: `mindspeed/iter_0000012`, and the tracker beside it; the iteration counts updates."""
        home = folder / self.name
        if new:
            return home / f"iter_{self._iteration:07d}"
        try:
            return home / f"iter_{int((home / TRACKER).read_text()):07d}"
        except (OSError, ValueError) as error:
            raise CheckpointError(f"no readable checkpoint: {error}", where=str(home)) from error

    @property
    def _iteration(self) -> int:
        return max(self.updates, 1)  # MindSpeed-MM has no iteration 0

    def save(self, folder: Path) -> None:
        """As the base class, and MindSpeed-MM's tracker file."""
        super().save(folder)
        on_rank_zero(lambda: (folder / self.name / TRACKER).write_text(str(self._iteration)))

    def write_transformer(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """See the base class."""
        weights, settings = converted(weights, to_diffusers), self.config.model.lora
        if settings is not None:
            lora.save_adapter(weights, settings, folder / "transformer_lora")
            weights = lora.merged(weights, settings)
        self.models.to_diffusers_model(self._network, weights).save_pretrained(folder / "transformer")
