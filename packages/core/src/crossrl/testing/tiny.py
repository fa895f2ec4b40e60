"""A tiny random Wan pipeline folder, and the least family and algorithm that an engine can be built with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crossrl.config import RunConfig
from crossrl.engine import DiffusionEngine
from crossrl.protocols import Needs
from crossrl.types import LossOutput, Prompt, Rows, SampleKey

SHAPE = (8, 3, 4, 4)
"""(C, F, H, W) of the latents."""

TEXT = (8, 64)
"""Tokens and width of a text's embedding."""

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 3,
    "attention_head_dim": 32,
    "in_channels": SHAPE[0],
    "out_channels": SHAPE[0],
    "text_dim": TEXT[1],
    "freq_dim": 64,
    "ffn_dim": 288,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}


def write_pipeline(folder: Path, **changes: Any) -> Path:
    """Write a diffusers pipeline folder with a random Wan and stand-ins for the other components."""
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(**{**TINY, **changes})
        with torch.no_grad():
            for parameter in model.parameters():  # diffusers starts biases and norms at trivial values
                parameter.add_(0.02 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        **{name: [None, None] for name in ("text_encoder", "tokenizer", "transformer_2", "vae")},
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def plain_model(folder: Path) -> torch.nn.Module:
    """The same weights in diffusers' own class."""
    import diffusers

    return diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer").train()


def exported(folder: Path) -> torch.nn.Module:
    """The transformer of an exported pipeline, as diffusers loads it."""
    import diffusers

    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return diffusers.WanPipeline.from_pretrained(folder, **absent).transformer


class TinyFamily:
    """Text is hashed to a random embedding `TEXT`; latents are what they are."""

    def __init__(self, folder: Path, shape: tuple[int, int, int, int] = SHAPE) -> None:
        self.folder, self.shape = folder, shape

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Always the same."""
        return self.shape

    def encode_text(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """An embedding that depends on the length of a text."""
        rows = [torch.randn(*TEXT, generator=torch.Generator().manual_seed(len(t))) for t in texts]
        return {"encoder_hidden_states": torch.stack(rows)}

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """Black."""
        return np.zeros((len(latents), 1, 2, 2, 3), np.uint8)


class TinyAlgorithm:
    """Mean squared distance of the policy's velocity to a target, and to those of the other slots."""

    def __init__(self, old: bool = False, reference: bool = False) -> None:
        self.needs = Needs(old=(lambda iteration: 0.9) if old else None, reference=reference)

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """Loss of each row; `ArithmeticError` for a target that is not a number."""
        goals = [rows.targets["target"], *(v for name, v in velocity.items() if name != "policy")]
        if bool(torch.isnan(goals[0]).any()):
            raise ArithmeticError("a target is nan")
        policy = velocity["policy"]
        loss = sum((policy - goal.to(policy.device)).square().flatten(1).mean(1) for goal in goals)
        return LossOutput(loss, {})


def run_config(**sections: Any) -> RunConfig:
    """A config with `sections` over the least that validates."""
    base = {"algorithm": "none", "backend": "none", "data": {"train": "none"}, "rewards": [{"name": "none"}]}
    return RunConfig.model_validate({**base, **sections, "model": {"path": "tiny", **sections.get("model", {})}})


def inputs(rows: int = 4, seed: int = 0, shape: tuple = SHAPE) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """x, sigma and condition of `rows` random rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=g)
    sigma = torch.rand(rows, generator=g)
    return x, sigma, {"encoder_hidden_states": torch.randn(rows, *TEXT, generator=g)}


def training_rows(rows: int = 8, seed: int = 1) -> tuple[Rows, tuple[SampleKey, ...]]:
    """`rows` random rows of two samples, and the samples' keys."""
    x, sigma, _ = inputs(rows, seed)
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    keys = (SampleKey(Prompt("a", "a red circle"), 0), SampleKey(Prompt("b", "a blue square moving"), 0))
    return Rows(x, sigma, torch.arange(rows) % 2, {"target": target}), keys


def even(rows: Rows) -> torch.Tensor:
    """Equal weights that sum to 1."""
    return torch.full((len(rows),), 1 / len(rows))


def diffusers_step(folder: Path, config: RunConfig) -> tuple[torch.nn.Module, float, float]:
    """What one step on `training_rows` must do, by diffusers and torch alone: (model after it, loss, norm)."""
    model, (rows, keys), o = plain_model(folder), training_rows(), config.optimizer
    text = TinyFamily(folder).encode_text([keys[i].prompt.text for i in rows.owner])
    out = model(rows.x, 1000 * rows.sigma, **text, return_dict=False)[0]
    loss = (out - rows.targets["target"]).square().mean()
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, o.betas, o.eps, o.weight_decay)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
    optimizer.step()
    return model, float(loss), float(norm)


def train(engine: DiffusionEngine, steps: int = 2, seed: int = 10) -> None:
    """A few optimizer steps on random rows, the same on every rank, and different blends of the slots."""
    for step in range(steps):
        rows, keys = training_rows(seed=seed + step)
        engine.accumulate(rows, keys, even(rows) / engine.data_parallel.size)
        engine.optimizer_step()
    for i, name in enumerate(n for n in engine.slots if n != "reference"):
        engine.blend_slot(name, 0.5 + 0.1 * i)


def velocity(engine: DiffusionEngine, slot: str = "policy", rows: int = 4) -> torch.Tensor:
    """Velocity of fixed rows under a slot, without gradients."""
    x, sigma, condition = inputs(rows)
    condition = {name: value.to(engine.device) for name, value in condition.items()}
    with torch.no_grad(), engine.slot(slot):
        return engine.predict(x.to(engine.device), sigma.to(engine.device), condition).cpu()


def weights_of(engine: DiffusionEngine, folder: Path, slot: str = "policy") -> dict[str, torch.Tensor]:
    """A slot's weights by diffusers' names, through an export to `folder`."""
    engine.export(folder, slot)
    return dict(exported(folder).state_dict())


def worst(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest error of any tensor relative to its own largest value; inf if the names differ."""
    if got.keys() != wanted.keys():
        return float("inf")
    return max(relative(got[n], wanted[n]) for n in wanted)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute error over the largest absolute value."""
    return float((got - wanted).detach().abs().max() / wanted.detach().abs().max().clamp_min(1e-30))


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Equal names and equal bits."""
    return got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in wanted)
