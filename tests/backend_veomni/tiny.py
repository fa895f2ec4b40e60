"""Engines of VeOmni on the kit's tiny Wan, and what the tests see of their insides."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from crossrl.fsdp2.shards import reshard
from crossrl.testing.tiny import (  # noqa: F401  what the tests need of it
    TinyAlgorithm,
    TinyFamily,
    exported,
    inputs,
    plain_model,
    relative,
    run_config,
    same,
    train,
    training_rows,
    velocity,
    worst,
    write_pipeline,
)


def build(folder: Path, *, needs: dict | None = None, shape: tuple = (8, 3, 4, 4), **sections: dict):
    """A built engine on the pipeline at `folder`."""
    from crossrl_veomni.backend import backend

    family, algorithm = TinyFamily(folder, shape), TinyAlgorithm(**(needs or {}))
    engine = backend.engine("diffusion")(run_config(backend="veomni", **sections), family, algorithm, "cpu")
    engine.build()
    return engine


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor in full, a copy."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients by diffusers' parameter names."""
    named = {n.removeprefix("base_model.model."): p for n, p in module.named_parameters()}
    return {n: full(p.grad) for n, p in named.items() if p.grad is not None}


def weights(engine) -> dict[str, torch.Tensor]:
    """Full trainable weights of the policy."""
    return {n: full(p) for n, p in engine._slots.parameters.items()}


def everything(engine) -> dict[str, torch.Tensor]:
    """All that a checkpoint must restore: trainable weights, slots and optimizer state, in full."""
    found = {f"policy.{n}": t for n, t in weights(engine).items()}
    for slot, tensors in engine._slots.state().items():
        found |= {f"{slot}.{n}": full(t) for n, t in tensors.items()}
    for name, parameter in engine._slots.parameters.items():
        state = engine.optimizer.state.get(parameter, {})
        found |= {f"adam.{name}.{k}": full(torch.as_tensor(v)) for k, v in state.items()}
    return found


def frozen(engine) -> dict[str, torch.Tensor]:
    """Full weights that do not train."""
    reshard(engine.module)
    return {n: full(p) for n, p in engine.module.named_parameters() if not p.requires_grad}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
