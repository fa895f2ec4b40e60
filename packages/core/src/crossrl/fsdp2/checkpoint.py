"""Weights on disk: sharded checkpoints (torch DCP, any world size), loaded weights checked, full weights gathered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from crossrl.errors import CheckpointError
from crossrl.fsdp2.slots import WeightSlots


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Name -> shape of every tensor in the safetensors of `folder`; raises `CheckpointError` if there are none."""
    found: dict[str, torch.Size] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise CheckpointError("no safetensors weights", where=str(folder))
    return found


def check_shapes(
    found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size], where: str, partial: bool = False
) -> None:
    """Raise `CheckpointError`, naming each, for missing, unexpected and wrong-shaped tensors.

    `partial` allows further blocks (a model cut to its first layers).
    """
    problems = [f"missing {n}" for n in expected if n not in found]
    problems += [f"{n} is {tuple(found[n])}, not {tuple(s)}" for n, s in expected.items() if found.get(n, s) != s]
    problems += [f"unexpected {n}" for n in found if n not in expected and not (partial and n.startswith("blocks."))]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("; ".join(problems[:5]) + more, where=where, fix="convert or download it again")


def check_weights(folder: Path, expected: Mapping[str, torch.Size], partial: bool) -> None:
    """`check_shapes` of the safetensors in `folder`: loaders draw what is missing at random and drop the unknown."""
    check_shapes(shapes(folder), expected, str(folder), partial)


class TrainedWeights:
    """The trainable weights of `module` for DCP, under their plain names (frozen ones are read from the model)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors."""
        return get_model_state_dict(self.module, options=StateDictOptions(ignore_frozen_params=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`; DCP has checked that it is complete."""
        set_model_state_dict(self.module, state, options=StateDictOptions(strict=False))


class Moments:
    """The state of `optimizer` for DCP, under the weights' names."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors; an optimizer that has not stepped gets a state of zeros."""
        return get_optimizer_state_dict(self.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`."""
        set_optimizer_state_dict(self.module, self.optimizer, state)


States = Callable[[bool], dict[str, Any]]
"""with_optimizer -> what DCP saves or loads: "model" and, if asked, "optimizer"."""


class Checkpointer:
    """Sharded state of one engine: `states`, the slots, and the optimizer once it has stepped."""

    def __init__(self, states: States, optimizer: torch.optim.Optimizer, slots: WeightSlots) -> None:
        self.states, self.optimizer, self.slots = states, optimizer, slots

    def _contents(self, with_optimizer: bool) -> dict[str, Any]:
        return self.states(with_optimizer) | {f"slot_{name}": t for name, t in self.slots.state().items()}

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


def on_rank_zero(action: Callable[[], object]) -> None:
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
