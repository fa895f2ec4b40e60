"""Borrow an engine without a trace, and record what passes between it and its algorithm. For the start-up gate."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crossrl.cache import ClipCache, HeldSamples, TextCache
from crossrl.engine import DiffusionEngine
from crossrl.protocols import Algorithm, NoiseFn, Predict
from crossrl.types import LossOutput, RolloutRequest, Rows, SampleKey, Sampling, Trajectory


@contextmanager
def undisturbed(engine: DiffusionEngine) -> Iterator[None]:
    """Lend the engine: held samples, caches, counters, config, algorithm and random streams are as before after it.

    Weights and optimizer state are not copied: the borrower must not step.
    """
    kept = dict(vars(engine))
    engine.held, engine._texts = HeldSamples(), TextCache(engine.family)
    engine._clips = ClipCache(engine.family, engine.config.batch.decode_micro)
    engine.seconds, engine.forwards = {}, 0
    try:
        with random_streams_kept(engine.device):
            yield
    finally:
        engine.optimizer.zero_grad()
        vars(engine).update(kept)


@contextmanager
def random_streams_kept(device: str = "cpu") -> Iterator[None]:
    """The global random streams of torch (host and `device`), NumPy and Python go on after it as if it had not been."""
    kind = torch.device(device).type
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    numpy, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


@dataclass(slots=True)
class Draw:
    """One call of `Algorithm.sample`: noise tags with their `shared`, and network calls (x, sigma, velocity)."""

    latents: torch.Tensor
    noise: list[tuple[str, bool]]
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class _SeenNoise:
    """A `NoiseFn` that notes what is asked of it."""

    def __init__(self, noise: NoiseFn) -> None:
        self.noise, self.asked = noise, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.noise, name)

    def __call__(self, tag: str, *, shared: bool = False) -> torch.Tensor:
        self.asked.append((tag, shared))
        return self.noise(tag, shared=shared)


class Spy:
    """An algorithm, and a record of its draws and losses."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.draws: list[Draw] = []
        self.losses: list[dict[str, torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """The algorithm's; all calls of the deterministic sampler are kept, of the stochastic one the first."""
        seen = _SeenNoise(noise)
        calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def noted(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            velocity = predict(x, sigma)
            if not (sampling.stochastic and calls):
                calls.append((x.clone(), sigma.clone(), velocity))
            return velocity

        latents, trajectory = self.algorithm.sample(noted, seen, keys, sampling, keep)
        self.draws.append(Draw(latents, seen.asked, calls))
        return latents, trajectory

    def loss(self, velocity: dict[str, torch.Tensor], rows: Rows) -> LossOutput:
        """The algorithm's; velocity, loss and log_ratio of each row are kept."""
        out = self.algorithm.loss(velocity, rows)
        seen = {"velocity": velocity["policy"].detach().clone(), "loss": out.loss.detach().double()}
        if "log_ratio" in out.metrics:
            seen["log_ratio"] = out.metrics["log_ratio"].double()
        self.losses.append(seen)
        return out

    def taken(self) -> dict[str, torch.Tensor]:
        """The records of losses since the last call, joined."""
        losses, self.losses = self.losses, []
        return {name: torch.cat([part[name] for part in losses]) for name in losses[0]}


class Bench:
    """An engine that was lent, a spy in its algorithm's place, and what can be tried on them."""

    def __init__(self, engine: DiffusionEngine) -> None:
        self.engine, self.config = engine, engine.config
        self.spy = engine.algorithm = Spy(engine.algorithm)

    def draw(self, request: RolloutRequest, micro: int | None = None) -> np.ndarray:
        """The engine's rollout of `request`; the spy's draws are its micro-batches."""
        self.spy.draws = []
        with self.micro(micro):
            return self.engine.rollout(request)

    @contextmanager
    def micro(self, micro: int | None) -> Iterator[None]:
        """All of the engine's micro-batches are `micro`; None: as configured."""
        if micro is not None:
            sizes = {"rollout_micro": micro, "decode_micro": micro, "update_micro": micro}
            batch = self.config.batch.model_copy(update=sizes)
            self.engine.config = self.config.model_copy(update={"batch": batch})
        try:
            yield
        finally:
            self.engine.config = self.config

    def anywhere(self, flags: Sequence[torch.Tensor]) -> list[bool]:
        """Which of the flags is up on any rank."""
        joined = torch.stack([flag.to(self.engine.device) for flag in flags]).int()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(joined, torch.distributed.ReduceOp.MAX)
        return joined.bool().tolist()

    def train(self, rows: Rows, keys: Sequence[SampleKey], micro: int | None = None) -> dict[str, torch.Tensor]:
        """An update on `rows` without its step; gradients are left behind. The records of its losses."""
        weights = torch.full((len(rows),), 1.0 / (len(rows) * self.engine.data_parallel.size))
        with self.micro(micro):
            self.engine.accumulate(rows, keys, weights)
        return self.spy.taken()
