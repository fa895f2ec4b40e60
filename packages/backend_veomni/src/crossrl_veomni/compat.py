"""The few places where VeOmni needs care: process-wide state and world size 1."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.loss.loss_utils import LOSS_MAPPING
from veomni.arguments import MixedPrecisionConfig, OpsImplementationConfig
from veomni.distributed import parallel_state as veomni_state
from veomni.distributed.torch_parallelize import build_parallelize_model, parallelize_model_fsdp2
from veomni.models import load_model_weights
from veomni.utils.device import get_device_type

from crossrl.config import Model, Parallel
from crossrl.errors import ConfigError
from crossrl.fsdp2.shards import world_size

_KERNELS = ("rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss", "cross_entropy_loss", "moe")

_state_of: torch.distributed.ProcessGroup | None = None


def parallel_state(ulysses: int, device: str) -> veomni_state.ParallelState:
    """VeOmni's mesh over all ranks of the process group that exists: data parallel x `ulysses`.

    Raises `ConfigError` if VeOmni uses another device.
    """
    global _state_of
    kind, world = torch.device(device).type, world_size("VeOmni")
    if kind != get_device_type():
        raise ConfigError(f"VeOmni uses {get_device_type()!r} on this machine, the engine was given {device!r}")
    if _state_of is not torch.distributed.group.WORLD:
        # VeOmni caches meshes by shape and would hand out the groups of a destroyed world
        veomni_state.clear_parallel_state()
        _state_of = torch.distributed.group.WORLD
    return veomni_state.init_parallel_state(
        dp_size=world // ulysses, ulysses_size=ulysses, dp_mode="fsdp2", device_type=kind, name=None
    )


def operators(attention: str) -> OpsImplementationConfig:
    """VeOmni's kernel choice: attention as given, all others eager (diffusion models have none of them)."""
    return OpsImplementationConfig(
        attn_implementation=attention, **{f"{name}_implementation": "eager" for name in _KERNELS}
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Spare the user VeOmni's line a tensor, and its warning that our attention cannot do Ulysses; not in debug."""
    logger = logging.getLogger("veomni")
    kept = logger.level
    logger.setLevel(logging.ERROR if kept >= logging.INFO else kept)
    try:
        yield
    finally:
        logger.setLevel(kept)


@contextmanager
def loss_mapping_kept() -> Iterator[None]:
    """Undo what building a VeOmni model does to transformers' losses.

    VeOmni replaces entries of `LOSS_MAPPING` for the whole process: a transformers reward model called with `labels=`
    would then return a tuple for its loss.
    """
    kept = dict(LOSS_MAPPING)
    try:
        yield
    finally:
        LOSS_MAPPING.clear()
        LOSS_MAPPING.update(kept)


def parallelize(
    module: torch.nn.Module, weights: Path, model: Model, parallel: Parallel, state: veomni_state.ParallelState
) -> torch.nn.Module:
    """Load `weights` into a meta `module`, sharded with FSDP2: fp32 masters, compute in `model.dtype`.

    One worker in fp32 has nothing to shard and no second copy in another precision: it stays a plain module, which
    spares a tiny model a fifth of its step.
    """
    mixed = model.dtype != "float32"
    if model.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not state.fsdp_enabled and not mixed:
        load_model_weights(module, str(weights), get_device_type(), is_peft_model=model.lora is not None)
        return module
    precision = MixedPrecisionConfig(
        enable=mixed,
        param_dtype=model.dtype,
        reduce_dtype="float32",
        cast_forward_inputs=False,  # True rounds timesteps and rotary tables to bf16
    )
    options = {
        "weights_path": str(weights),
        "enable_reshard_after_forward": parallel.reshard_after_forward,
        "mixed_precision": precision,
        "init_device": "meta",
        "broadcast_model_weights_from_rank0": True,
        "is_peft_model": model.lora is not None,
    }
    if state.fsdp_enabled:
        return build_parallelize_model(module, enable_gradient_checkpointing=False, **options)
    return parallelize_model_fsdp2(module, **options)  # build_parallelize_model refuses meta at world size 1
