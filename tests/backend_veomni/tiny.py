"""A tiny random Wan pipeline folder, and the least family and algorithm that an engine can be built with."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import diffusers
import numpy as np
import torch

from crossrl.config import RunConfig
from crossrl.fsdp2.shards import reshard
from crossrl.protocols import Needs
from crossrl.types import LossOutput, Prompt, Rows, SampleKey

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 3,
    "attention_head_dim": 32,
    "in_channels": 8,
    "out_channels": 8,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 288,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}


def write_pipeline(folder: Path, **changes: object) -> Path:
    """A diffusers pipeline folder with a random transformer and a stand-in for the other components."""
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


def plain_model(folder: Path) -> diffusers.WanTransformer3DModel:
    """The same weights in diffusers' own class."""
    return diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer").train()


class TinyFamily:
    """Text is hashed to a random embedding [8, 64]; latents are what they are."""

    def __init__(self, folder: Path, shape: tuple[int, int, int, int] = (8, 3, 4, 4)) -> None:
        self.folder, self.shape = folder, shape

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return self.shape

    def encode_text(self, texts: list[str]) -> dict[str, torch.Tensor]:
        rows = [torch.randn(8, 64, generator=torch.Generator().manual_seed(len(t))) for t in texts]
        return {"encoder_hidden_states": torch.stack(rows)}

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        return np.zeros((len(latents), 1, 2, 2, 3), np.uint8)


class TinyAlgorithm:
    """Mean squared distance of the policy's velocity to a target, and to those of the other slots."""

    def __init__(self, old: bool = False, reference: bool = False) -> None:
        self.needs = Needs(old=(lambda iteration: 0.9) if old else None, reference=reference)

    def loss(self, velocity: dict[str, torch.Tensor], rows: Rows) -> LossOutput:
        goals = [rows.targets["target"], *(v for name, v in velocity.items() if name != "policy")]
        if bool(torch.isnan(goals[0]).any()):
            raise ArithmeticError("a target is nan")
        policy = velocity["policy"]
        loss = sum((policy - goal.to(policy.device)).square().flatten(1).mean(1) for goal in goals)
        return LossOutput(loss, {})


def run_config(**sections: dict) -> RunConfig:
    """A config with `sections` over the least that validates."""
    base = {"algorithm": "none", "backend": "veomni", "data": {"train": "none"}, "rewards": [{"name": "none"}]}
    return RunConfig.model_validate({**base, **sections, "model": {"path": "tiny", **sections.get("model", {})}})


def build(folder: Path, *, needs: dict | None = None, shape: tuple = (8, 3, 4, 4), **sections: dict):
    """A built engine on the pipeline at `folder`."""
    from crossrl_veomni.backend import backend

    family, algorithm = TinyFamily(folder, shape), TinyAlgorithm(**(needs or {}))
    engine = backend.engine("diffusion")(run_config(**sections), family, algorithm, "cpu")
    engine.build()
    return engine


def inputs(rows: int = 4, seed: int = 0, shape: tuple = (8, 3, 4, 4)) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """x, sigma and condition of `rows` random rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=g)
    sigma = torch.rand(rows, generator=g)
    return x, sigma, {"encoder_hidden_states": torch.randn(rows, 8, 64, generator=g)}


def training_rows(rows: int = 8, seed: int = 1) -> tuple[Rows, tuple[SampleKey, ...]]:
    """`rows` random rows of two samples, and the samples' keys."""
    x, sigma, _ = inputs(rows, seed)
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    keys = (SampleKey(Prompt("a", "a red circle"), 0), SampleKey(Prompt("b", "a blue square moving"), 0))
    return Rows(x, sigma, torch.arange(rows) % 2, {"target": target}), keys


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


def exported(folder: Path) -> diffusers.WanTransformer3DModel:
    """The transformer of an exported pipeline, as diffusers loads it."""
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return diffusers.WanPipeline.from_pretrained(folder, **absent).transformer


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest error of any tensor relative to its own largest value; inf if the names differ."""
    if got.keys() != wanted.keys():
        return float("inf")
    return max(relative(got[n], wanted[n]) for n in wanted)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute error over the largest absolute value."""
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Equal names and equal bits."""
    return got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in wanted)


def train(engine, steps: int = 2, seed: int = 10) -> None:
    """A few optimizer steps on random rows, the same on every rank, and different blends of the slots."""
    for step in range(steps):
        rows, keys = training_rows(seed=seed + step)
        engine.accumulate(rows, keys, torch.full((len(rows),), 1 / len(rows) / engine.data_parallel.size))
        engine.optimizer_step()
    for i, name in enumerate(n for n in engine.slots if n != "reference"):
        engine.blend_slot(name, 0.5 + 0.1 * i)


def velocity(engine, slot: str = "policy", rows: int = 4) -> torch.Tensor:
    """Velocity of fixed rows under a slot, without gradients."""
    with torch.no_grad(), engine.slot(slot):
        return engine.predict(*inputs(rows))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
