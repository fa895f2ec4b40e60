"""The few places where MindSpeed-MM or its torch need care: process-wide state, meshes, mean gradients on gloo."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from crossrl import env
from crossrl.config import Model, Parallel
from crossrl.errors import ConfigError, WorkerError
from crossrl.fsdp2.shards import local_shard, world_size
from crossrl_mindspeed.attention import device_type
from crossrl_mindspeed.source import Components

State = Any
"""MindSpeed-MM's `ParallelState`."""

_states: dict[int, State] = {}
_states_of: torch.distributed.ProcessGroup | None = None


def check_device(parts: Components, device: str) -> None:
    """Raise `ConfigError` if MindSpeed-MM, which decides by what is importable, uses another device."""
    theirs = parts.device.get_device_type()
    if device_type(device) != theirs:
        raise ConfigError(
            f"MindSpeed-MM uses {theirs!r} on this machine, the engine was given {device!r}", where="device"
        )


def fsdp_plan(model: Model, parallel: Parallel, device: str, pattern: str) -> dict[str, Any]:
    """MindSpeed-MM's `fsdp_plan`: fp32 masters, compute in `model.dtype`, reduction in fp32, prefetch off the CPU.

    Inputs are not cast: that would round timesteps to bf16.
    """
    ahead = 0 if device_type(device) == "cpu" else 1
    return {
        "apply_modules": [pattern],
        "param_dtype": "bf16" if model.dtype == "bfloat16" else None,
        "reduce_dtype": "fp32",
        "cast_forward_inputs": False,
        "reshard_after_forward": parallel.reshard_after_forward,
        "num_to_forward_prefetch": ahead,
        "num_to_backward_prefetch": ahead,
    }


@contextmanager
def rank_variables() -> Iterator[None]:
    """Within it, RANK, LOCAL_RANK and WORLD_SIZE are set: MindSpeed-MM's arguments can be made only then."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    local = rank % max(env.local_world_size(), 1)
    with env.variables(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world)):
        yield


def parallel_arguments(parts: Components, model: Model, parallel: Parallel, device: str, pattern: str) -> Any:
    """MindSpeed-MM's `parallel` section: every rank shards, `parallel.ulysses` of them share their samples."""
    with rank_variables():
        return parts.ParallelArguments(
            fully_shard_parallel_size="auto",
            ulysses_parallel_size=parallel.ulysses,
            fsdp_plan=fsdp_plan(model, parallel, device, pattern),
        )


def parallel_state(parts: Components, arguments: Any) -> State:
    """MindSpeed-MM's meshes over all ranks of the process group that exists, one for each Ulysses size."""
    global _states_of
    world_size("MindSpeed-MM")
    if _states_of is not torch.distributed.group.WORLD:  # meshes of a destroyed world fail or hang
        _states.clear()
        _states_of = torch.distributed.group.WORLD
    ulysses = arguments.ulysses_parallel_size
    if ulysses not in _states:
        with in_use(parts, None):
            fields = inspect.signature(parts.states.init_parallel_state).parameters
            sizes = {name: getattr(arguments, name) for name in fields if hasattr(arguments, name)}
            _states[ulysses] = parts.states.init_parallel_state(**sizes)
    return _states[ulysses]


@contextmanager
def in_use(parts: Components, state: State | None) -> Iterator[None]:
    """Within it, MindSpeed-MM's process-wide parallel state is `state`; None: there is none yet.

    It keeps one a process, in two places; an engine with another layout, or of another world, would get the wrong one.
    """
    cls, instances = parts.states.ParallelState, parts.decorators.Singleton._instances
    kept, kept_instance = parts.states._PARALLEL_STATE, instances.pop(cls, None)
    parts.states._PARALLEL_STATE = state
    if state is not None:
        instances[cls] = state
    try:
        yield
    finally:
        parts.states._PARALLEL_STATE = kept
        instances.pop(cls, None)
        if kept_instance is not None:
            instances[cls] = kept_instance


def recompute(parts: Components, module: torch.nn.Module, pattern: str) -> None:
    """Gradient checkpointing of the modules that `pattern` names, by MindSpeed-MM's feature."""
    for block in module.blocks:
        if "past_key_values" not in inspect.signature(block.forward).parameters:
            block.forward = _without_cache(block.forward)
    features = parts.FeatureArguments(recompute=True, recompute_plan={"apply_modules": [pattern]})
    parts.FeaturesApplier(features).pre_fully_shard_apply(module)


def _without_cache(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def call(*args: Any, past_key_values: None = None, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs)  # recompute adds past_key_values=None to any call, which Wan's blocks refuse

    return call


def shard(parts: Components, module: torch.nn.Module, arguments: Any, state: State, device: str) -> torch.nn.Module:
    """FSDP2 over `module` (on meta) by MindSpeed-MM's `ParallelApplier`, with mean gradients made sure of."""
    by_sum = reduces_to_a_sum(state.get_hsdp_device_mesh(), device)
    with rank_variables(), in_use(parts, state):
        # without init_model_with_meta_device, one rank would get DDP instead of FSDP
        training = parts.TrainingArguments(init_model_with_meta_device=True)
        module = parts.ParallelApplier(arguments, training)(module)
    if by_sum:
        divide_sums(module)
    return module


def reduces_to_a_sum(mesh: DeviceMesh, device: str) -> bool:
    """Whether FSDP2's mean over the ranks of `mesh` is a sum, as with gloo of torch 2.7 (pytorch#162338).

    Found by taking a gradient that must be 1. Raises `WorkerError` if it is neither 1 nor the number of ranks.
    """
    ranks = mesh.size()
    found = _probe_gradient(mesh, device, by_sum=False)
    if found == 1.0:
        return False
    if found == ranks and _probe_gradient(mesh, device, by_sum=True) == 1.0:
        return True
    raise WorkerError(
        f"gradients that are 1 on each of {ranks} ranks are reduced to {found}, not to their mean",
        where="process group",
        fix="use another torch or communication backend: training would be wrong",
    )


def divide_sums(module: torch.nn.Module) -> None:
    """Have FSDP2 ask for sums only, and divide them itself."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def _probe_gradient(mesh: DeviceMesh, device: str, by_sum: bool) -> float:
    probe = torch.nn.Linear(1, mesh.size(), bias=False, device=device)
    fully_shard(probe, mesh=mesh)
    if by_sum:
        divide_sums(probe)
    probe(torch.ones(1, 1, device=device)).sum().backward()
    return float(local_shard(probe.weight.grad).flatten()[0])
