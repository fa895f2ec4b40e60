"""Further sets of weights beside the policy's ("ema", "old", "reference"), swapped into the one module in place.

A slot is a copy of this rank's shards of the trainable parameters: all of them, or the adapters alone with LoRA,
where the frozen base is shared and a fresh adapter is zero, so that "reference" is the base model exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from crossrl.errors import WorkerError
from crossrl.fsdp2.shards import like_sharded, local_shard, reset, reshard


class WeightSlots:
    """The slots of `module`, each a copy of the policy at the start; kept on `device` (fp32 shards)."""

    def __init__(self, module: torch.nn.Module, names: Iterable[str], device: str) -> None:
        self.module = module
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._copies = {slot: {name: local.to(device, copy=True) for name, local in self._shards()} for slot in names}
        self._active: str | None = None

    def _shards(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, local_shard(p)) for name, p in self.parameters.items()]

    def _copy(self, slot: str) -> dict[str, torch.Tensor]:
        if slot not in self._copies:
            raise WorkerError(f"no weight slot {slot!r}; this run has {['policy', *self._copies]}")
        return self._copies[slot]

    @contextmanager
    def use(self, slot: str) -> Iterator[None]:
        """Within it, the module's weights are the slot's; the policy's exact bits are back after it, come what may."""
        if slot == "policy" and self._active is None:
            yield
            return
        if self._active is not None:
            raise WorkerError(f"weight slot {slot!r} inside of {self._active!r}")
        self._swap(slot)
        self._active = slot
        try:
            yield
        except BaseException:
            reset(self.module)
            raise
        finally:
            self._active = None
            self._swap(slot)

    @torch.no_grad()
    def _swap(self, slot: str) -> None:
        copies = self._copy(slot)
        reshard(self.module)
        for name, shard in self._shards():
            kept = shard.clone()
            shard.copy_(copies[name])
            copies[name].copy_(kept)

    @torch.no_grad()
    def blend(self, slot: str, decay: float) -> None:
        """slot <- decay * slot + (1 - decay) * policy, fp32."""
        copies = self._copy(slot)
        if self._active is not None:
            raise WorkerError(f"cannot blend {slot!r} while {self._active!r} is in use")
        reshard(self.module)
        for name, shard in self._shards():
            copies[name].mul_(decay).add_(shard.to(copies[name].device), alpha=1.0 - decay)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The slots as sharded tensors that share memory with them: save them, or load into them."""
        return {
            slot: {name: like_sharded(local, self.parameters[name]) for name, local in copies.items()}
            for slot, copies in self._copies.items()
        }

    @torch.no_grad()
    def restore(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over `state`, where it does not share memory already (slots that wait on the host)."""
        for slot, copies in self._copies.items():
            for name, local in copies.items():
                local.copy_(local_shard(state[slot][name]))
