"""Weights on disk: sharded checkpoints (torch DCP, any world size), loaded weights checked, full weights gathered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from veomni.checkpoint.dcp_checkpointer import ModelState, OptimizerState
from veomni.distributed.parallel_state import ParallelState

from crossrl.errors import CheckpointError
from crossrl_veomni.slots import WeightSlots


def check_weights(folder: Path, expected: Mapping[str, torch.Size], partial: bool) -> None:
    """Raise `CheckpointError` unless the safetensors in `folder` hold exactly the `expected` names and shapes.

    VeOmni draws weights that are missing at random and drops those that it does not know. `partial` allows further
    blocks in the files (a model cut to its first layers).
    """
    found: dict[str, torch.Size] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise CheckpointError("no safetensors weights", where=str(folder))
    problems = [f"missing {n}" for n in expected if n not in found]
    problems += [f"{n} is {tuple(found[n])}, not {tuple(s)}" for n, s in expected.items() if found.get(n, s) != s]
    problems += [f"unexpected {n}" for n in found if n not in expected and not (partial and n.startswith("blocks."))]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("; ".join(problems[:5]) + more, where=str(folder), fix="convert or download it again")


class Checkpointer:
    """Sharded state of one engine: trainable weights or all of them, the slots, the optimizer once it has stepped."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        slots: WeightSlots,
        state: ParallelState,
        trainable_only: bool,
    ) -> None:
        self.module, self.optimizer, self.slots, self.state = module, optimizer, slots, state
        self.trainable_only = trainable_only

    def _contents(self, with_optimizer: bool) -> dict[str, object]:
        contents = {"model": ModelState(self.module, self.trainable_only, self.state)}
        contents |= {f"slot_{name}": tensors for name, tensors in self.slots.state().items()}
        if with_optimizer:
            contents["optimizer"] = OptimizerState(self.module, self.optimizer, self.state)
        return contents

    def save(self, folder: Path) -> None:
        """Write `folder`; all ranks together."""
        # reading the state of an optimizer that has not stepped makes torch step it
        dcp.save(self._contents(with_optimizer=bool(self.optimizer.state)), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read `folder` in place, written at any world size; raises `CheckpointError` if it does not fit."""
        try:
            saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:
            raise CheckpointError(f"no readable checkpoint: {error}", where=str(folder)) from error
        stepped = any(name.startswith("optimizer.") for name in saved)
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        contents = self._contents(with_optimizer=stepped)
        try:
            dcp.load(contents, checkpoint_id=folder)
        except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint does not fit this run: {error}", where=str(folder)) from error
        self.slots.restore({name: contents[f"slot_{name}"] for name in self.slots.state()})
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)  # the config decides, not what the checkpoint was trained with


def gather(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights in full on rank 0's host; an empty dict on the others, which must call it too."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; what it raises is raised on all as `CheckpointError`."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise CheckpointError(f"rank 0 could not write: {problem[0]}")


def copy_components(source: Path, target: Path, without: str) -> None:
    """Copy a diffusers pipeline folder, all but the component `without`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name == without or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copy2(path, target / path.name)
