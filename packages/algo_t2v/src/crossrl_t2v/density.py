"""Where in time the forward-process algorithms train: densities of sigma, and clean samples noised to them.

The grid of a sampler with flow shift s has density s / (s - (s - 1) sigma)^2: at s = 5, 62 % of it lies above sigma =
0.75 and 6 % below 0.25. Training on it starves the last denoising steps; the other densities move the weight.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from crossrl.config import Section
from crossrl.noise import generator
from crossrl.types import Rows, Trajectory


class Density(Section):
    """Density of the trained sigma; `density: uniform` is short for `density: {name: uniform}`."""

    name: Literal["grid", "uniform", "logit_normal", "beta", "last_k", "range"] = "grid"
    mean: float = 0.0  # logit_normal: sigmoid of N(mean, std^2)
    std: Annotated[float, Field(gt=0)] = 1.0
    a: Annotated[float, Field(gt=0)] = 1.0  # beta: Beta(a, b); a < b is late, near sigma = 0
    b: Annotated[float, Field(gt=0)] = 1.0
    k: Annotated[int, Field(ge=1)] = 1  # last_k: the k last steps of the sampler's grid
    low: Annotated[float, Field(ge=0, le=1)] = 0.0  # range: uniform in [low, high]
    high: Annotated[float, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _range(self) -> Density:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self

    def highest(self, steps: int, shift: float) -> float:
        """The largest sigma that is drawn, for a sampler of `steps` steps with flow `shift`."""
        u = self.k / steps if self.name == "last_k" else self.high if self.name == "range" else 1.0
        return shift * u / (1 + (shift - 1) * u) if self.name == "last_k" else u

    def draw(self, count: int, schedule: torch.Tensor, stream: torch.Generator) -> torch.Tensor:
        """`count` sigmas [count] in (0, 1]; those of the grid `schedule` [T + 1] without repetition while they last."""
        if self.name in ("grid", "last_k"):
            grid = schedule[:-1] if self.name == "grid" else schedule[:-1][-self.k :]
            rounds = -(-count // len(grid))
            orders = [torch.randperm(len(grid), generator=stream) for _ in range(rounds)]
            return grid[torch.cat(orders)[:count]]
        if self.name == "logit_normal":
            sigma = (self.mean + self.std * torch.randn(count, generator=stream)).sigmoid()
        elif self.name == "beta":
            # the inverse of the distribution function of Beta(a, b), on a fine grid: torch's sampler takes no generator
            x = torch.linspace(0, 1, 4097, dtype=torch.float64)
            middle = (x[1:] + x[:-1]) / 2
            mass = (middle.log() * (self.a - 1) + (1 - middle).log() * (self.b - 1)).exp().cumsum(0)
            u = torch.rand(count, generator=stream, dtype=torch.float64)
            sigma = x[1:][torch.searchsorted(mass / mass[-1], u).clamp(max=4095)].float()
        else:
            low, high = (self.low, self.high) if self.name == "range" else (0.0, 1.0)
            sigma = low + (high - low) * torch.rand(count, generator=stream)
        return sigma.clamp(min=1e-4)


def noised(trajectory: Trajectory, draws: int, density: Density, seed: int, step: int, tag: str) -> Rows:
    """Rows x = (1 - sigma) x0 + sigma eps, `draws` of each clean sample `trajectory.latents` [n, 1, C, F, H, W].

    Targets: "x0" and "velocity" = eps - x0. sigma and eps are a function of (seed, step, prompt, index, tag) alone.
    """
    x0 = trajectory.latents.repeat_interleave(draws, 0).squeeze(1)
    sigma, eps = torch.empty(len(x0)), torch.empty_like(x0)
    for i, key in enumerate(trajectory.keys):
        stream = generator(seed, step, key.prompt.id, key.index, tag)
        part = slice(i * draws, (i + 1) * draws)
        sigma[part] = density.draw(draws, trajectory.sigmas, stream)
        eps[part].normal_(generator=stream)
    level = sigma.view(-1, *[1] * (x0.dim() - 1))
    owner = torch.arange(len(trajectory.keys)).repeat_interleave(draws)
    return Rows((1 - level) * x0 + level * eps, sigma, owner, {"x0": x0, "velocity": eps - x0})
