"""The diffusion engine on VeOmni: FSDP2 sharding, Ulysses, LoRA or full fine-tuning, sharded checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm
from veomni.distributed.parallel_state import use_parallel_state
from veomni.models import build_foundation_model
from veomni.optim import build_optimizer

from crossrl.cache import Condition
from crossrl.engine import DataParallel, DiffusionEngine
from crossrl.errors import ConfigError
from crossrl.types import RankStats, Rows, SampleKey
from crossrl_veomni import attention, compat, lora
from crossrl_veomni.checkpoint import Checkpointer, check_weights, copy_components, gather, on_rank_zero
from crossrl_veomni.models import family_module
from crossrl_veomni.slots import WeightSlots

log = logging.getLogger(__name__)


class VeOmniEngine(DiffusionEngine):
    """One rank's part of a model that VeOmni shards. A process group must exist, also in a single process."""

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
            self.config.check_world_size(compat.world_size())
            self.state = compat.parallel_state(parallel.ulysses, self.device)
            with use_parallel_state(self.state):
                self.module = self._sharded(self._on_meta(folder), folder)
        self.module.train()
        settings = self.config.optimizer
        self.optimizer = build_optimizer(self.module, settings.lr, settings.betas, settings.eps, settings.weight_decay)
        self._slots = WeightSlots(self.module, self.slots, "cpu" if parallel.offload != "none" else self.device)
        trainable_only = model.lora is not None
        self._files = Checkpointer(self.module, self.optimizer, self._slots, self.state, trainable_only)
        if parallel.offload != "none":
            self.move("cpu", optimizer=parallel.offload == "all")
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
            module = lora.wrap(module, model.lora)
        module = compat.parallelize(module, folder, model, self.config.parallel, self.state)
        if model.lora is not None:
            lora.initialise(module, self.config.seed)
        return module

    @property
    def data_parallel(self) -> DataParallel:
        """Place among the ranks that see different samples; those of a Ulysses group see the same ones."""
        state = self.state
        return DataParallel(state.dp_rank, state.dp_size, state.dp_group, primary=state.sp_rank <= 0)

    # ---- compute -----------------------------------------------------------------------------------------------

    def predict(self, x: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Velocity [n, C, F, H, W] fp32; `condition` is named as the network's arguments (`encoder_hidden_states`)."""
        with use_parallel_state(self.state):
            return self.module(hidden_states=x, timestep=1000.0 * sigma.float(), **condition)

    def accumulate(
        self, rows: Rows, keys: Sequence[SampleKey], weights: torch.Tensor, backward: bool = True
    ) -> RankStats:
        """As the base class; after an error FSDP is at rest again, without the gradients under way."""
        try:
            return super().accumulate(rows, keys, weights, backward)
        except BaseException:
            compat.reset(self.module)
            raise

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate full gradients on this rank; reduce and shard them at the `last` micro-batch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        with use_parallel_state(self.state):
            loss.backward()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip by the global norm of all shards; returns it as it was."""
        with use_parallel_state(self.state):
            return veomni_clip_grad_norm(self.module, max_norm)

    def slot(self, name: str) -> AbstractContextManager[None]:
        """See `WeightSlots.use`."""
        return self._slots.use(name)

    def blend_slot(self, name: str, decay: float) -> None:
        """See `WeightSlots.blend`."""
        self._slots.blend(name, decay)

    def move(self, device: str, optimizer: bool) -> None:
        """Move weights, and moments if `optimizer`; slots wait on the host in any run that offloads."""
        self.module.to(device)
        if optimizer:
            for state in self.optimizer.state.values():
                state |= {k: v.to(device) for k, v in state.items() if k != "step"}
        if torch.device(device).type == "cpu" and torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    # ---- files -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write sharded weights, slots and optimizer to `folder/veomni`."""
        with self._on_device(optimizer=True):
            self._files.save(folder / "veomni")

    def load(self, folder: Path) -> None:
        """Read `folder/veomni`, written at any world size; raises `CheckpointError` if it does not fit."""
        with self._on_device(optimizer=True):
            self._files.load(folder / "veomni")

    def export(self, folder: Path, slot: str = "policy") -> None:
        """Write a diffusers pipeline to `folder`: `transformer/` in fp32 and copies of all other components.

        With LoRA the adapter is merged into `transformer/` and also written alone, for PEFT, to `transformer_lora/`.
        """
        with self._on_device(optimizer=False), self.slot(slot):
            weights = gather(self.module)
            on_rank_zero(lambda: self._write(folder, weights))  # in here: on a host `weights` may be the live ones

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        copy_components(self.family.folder, folder, without="transformer")
        if self.config.model.lora is not None:
            lora.save_adapter(self.module, weights, folder / "transformer_lora")
            weights = lora.merged(self.module, weights)
        self.models.to_diffusers(self._network, weights).save_pretrained(folder / "transformer")
