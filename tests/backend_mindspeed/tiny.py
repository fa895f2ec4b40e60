"""Engines of this backend on the tiny Wan of the VeOmni tests, compared by diffusers' parameter names."""

from __future__ import annotations

from pathlib import Path

import torch

from crossrl_mindspeed.convert import to_diffusers
from crossrl_mindspeed.source import obstacle
from tests.backend_veomni import tiny
from tests.backend_veomni.tiny import (  # noqa: F401  what the tests need of it
    exported,
    free_port,
    inputs,
    plain_model,
    relative,
    same,
    train,
    training_rows,
    velocity,
    worst,
    write_pipeline,
)

ABSENT = obstacle()


def build(folder: Path, *, needs: dict | None = None, shape: tuple = (8, 3, 4, 4), **sections: dict):
    """A built engine on the pipeline at `folder`."""
    from crossrl_mindspeed.backend import backend

    family, algorithm = tiny.TinyFamily(folder, shape), tiny.TinyAlgorithm(**(needs or {}))
    engine = backend.engine("diffusion")(tiny.run_config(backend="mindspeed", **sections), family, algorithm, "cpu")
    engine.build()
    return engine


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under diffusers' names."""
    return {to_diffusers(name): value for name, value in tensors.items()}


def gradients(engine) -> dict[str, torch.Tensor]:
    """Full gradients."""
    return named({n: tiny.full(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None})


def weights(engine) -> dict[str, torch.Tensor]:
    """Full trainable weights of the policy."""
    return named(tiny.weights(engine))


def everything(engine) -> dict[str, torch.Tensor]:
    """All that a checkpoint must restore (MindSpeed-MM's names)."""
    return tiny.everything(engine)


def frozen(engine) -> dict[str, torch.Tensor]:
    """Full weights that do not train."""
    return tiny.frozen(engine)
