"""The base of engines on torch's FSDP2: all but building the module, its forward, clipping and its file names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from crossrl.engine import DiffusionEngine
from crossrl.fsdp2.checkpoint import Checkpointer, copy_components, gather, on_rank_zero
from crossrl.fsdp2.shards import reset
from crossrl.fsdp2.slots import WeightSlots
from crossrl.types import RankStats, Rows, SampleKey


class Fsdp2Engine(DiffusionEngine):
    """`build` of a backend makes `module` (sharded, or plain where there is nothing to shard) and calls `_finish`."""

    name: str  # the backend's, and of its folder in a checkpoint

    def in_force(self) -> AbstractContextManager[None]:
        """What the backend needs to be in force around a forward or backward (its process-wide state)."""
        return nullcontext()

    @abstractmethod
    def write_transformer(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """Write full fp32 `weights` of the module for diffusers to `folder/transformer`, adapters merged."""

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        """The rest of `build`, once `module` has its weights: slots, checkpoints, offload."""
        self.module.train()
        self.optimizer, offload = optimizer, self.config.parallel.offload
        self._slots = WeightSlots(self.module, self.slots, "cpu" if offload != "none" else self.device)
        self._files = Checkpointer(self.states, optimizer, self._slots)
        if offload != "none":
            self.move("cpu", optimizer=offload == "all")

    @abstractmethod
    def states(self, with_optimizer: bool) -> dict[str, object]:
        """What DCP saves or loads: "model" and, if asked, "optimizer"."""

    # ---- compute -----------------------------------------------------------------------------------------------

    def accumulate(
        self, rows: Rows, keys: Sequence[SampleKey], weights: torch.Tensor, backward: bool = True
    ) -> RankStats:
        """As the base class; after an error FSDP is at rest again, without the gradients under way."""
        try:
            return super().accumulate(rows, keys, weights, backward)
        except BaseException:
            reset(self.module)
            raise

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate full gradients on this rank; reduce and shard them at the `last` micro-batch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        with self.in_force():
            loss.backward()

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
        """Write sharded weights, slots and optimizer below `folder`, in a folder named after the backend."""
        with self._on_device(optimizer=True):
            self._files.save(self.checkpoint_folder(folder, new=True))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at any world size; raises `CheckpointError` if it does not fit."""
        with self._on_device(optimizer=True):
            self._files.load(self.checkpoint_folder(folder, new=False))

    def checkpoint_folder(self, folder: Path, new: bool) -> Path:
        """Where in `folder` the backend's files are, or shall be if `new`."""
        return folder / self.name

    def export(self, folder: Path, slot: str = "policy") -> None:
        """Write a diffusers pipeline to `folder`: `transformer/` in fp32 and copies of all other components.

        With LoRA the adapter is merged into `transformer/` and also written alone, for PEFT, to `transformer_lora/`.
        """

        def write() -> None:
            copy_components(self.family.folder, folder, without="transformer")
            self.write_transformer(weights, folder)

        with self._on_device(optimizer=False), self.slot(slot):
            weights = gather(self.module)
            on_rank_zero(write)  # in here: on a host `weights` may be the live ones
