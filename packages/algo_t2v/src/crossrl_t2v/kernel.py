"""One step of every sampler of a rectified flow, and its log-probability. Nothing else computes a step.

Conventions: x_sigma = (1 - sigma) x0 + sigma eps with eps ~ N(0, I), the network's velocity is v = eps - x0, and a step
goes from sigma to sigma' < sigma with delta = sigma - sigma'. For a noise coefficient sigma_t the step is

    mean = x (1 - sigma_t^2 delta / 2 sigma) - delta v (1 + sigma_t^2 (1 - sigma) / 2 sigma)
    std  = sigma_t sqrt(delta)

which is the reverse SDE with the score -(x + (1 - sigma) v) / sigma; the samplers differ in sigma_t alone:

    ODE        0                                     Euler
    dance      eta                                   DanceGRPO, arXiv 2505.07818
    flow_sde   a sqrt(sigma / (1 - sigma))           Flow-GRPO, arXiv 2505.05470
    cps        see `step`; not of this form          Flow-CPS, arXiv 2509.05952
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """How much noise a step adds: `name` picks the row of the table above, `level` is its eta or a (0 = no noise)."""

    name: Literal["dance", "flow_sde", "cps"]
    level: float

    def coefficient(self, sigma: torch.Tensor, sigma_next: torch.Tensor) -> torch.Tensor:
        """sigma_t of an SDE step, in the shape of `sigma`.

        At sigma = 1 Flow-SDE's root diverges; like its authors' code, the denominator then takes the next sigma.
        """
        if self.name == "dance":
            return torch.full_like(sigma, self.level)
        return self.level * (sigma / (1 - torch.where(sigma == 1, sigma_next, sigma))).sqrt()


ODE = NoiseRule("dance", 0.0)


@dataclass(frozen=True, slots=True)
class Step:
    """The Gaussian N(mean, std^2) of the next state, and the estimate `x0` of the clean latents at this one.

    `mean`, `x0` [n, C, F, H, W]; `std` [n, 1, 1, 1, 1] is the full deviation of the step, sqrt(delta) included.
    """

    mean: torch.Tensor
    std: torch.Tensor
    x0: torch.Tensor


def sigmas(steps: int, shift: float) -> torch.Tensor:
    """The schedule sigma = s u / (1 + (s - 1) u), u = 1 ... 0 in equal parts: [steps + 1] fp32, from 1 to exactly 0."""
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * u / (1 + (shift - 1) * u)).float()


def step(
    x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor, rule: NoiseRule
) -> Step:
    """One denoising step of each row, differentiable in `velocity`.

    x, velocity [n, C, F, H, W]; sigma > sigma_next >= 0, both [n]: rows of different steps share a call. The result is
    on the velocity's device, in fp64 if that is the dtype of `x` or `velocity`, else in fp32.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    x, velocity = x.to(velocity.device, dtype), velocity.to(dtype)
    sigma, after = (t.to(velocity.device, dtype).view(-1, *[1] * (x.dim() - 1)) for t in (sigma, sigma_next))
    delta = sigma - after
    x0 = x - sigma * velocity
    if rule.name == "cps":
        std = after * math.sin(rule.level * math.pi / 2)
        mean = (1 - after) * x0 + (after**2 - std**2).sqrt() * (x + (1 - sigma) * velocity)
        return Step(mean, std, x0)
    coefficient = rule.coefficient(sigma, after)
    drift = coefficient**2 * delta / (2 * sigma)
    mean = x * (1 - drift) - velocity * (delta + drift * (1 - sigma))
    return Step(mean, coefficient * delta.sqrt(), x0)


def log_prob(x_next: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """log N(x_next; mean, std^2) of each row [n], as the MEAN over the row's elements.

    The mean, not the sum, is what the published clip ranges (1e-4) refer to. fp64 if `mean` is fp64, else fp32.
    """
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    x_next, std = x_next.to(mean), std.to(mean)
    squares = ((x_next - mean) / std).square().flatten(1).mean(1)
    return -0.5 * squares - std.flatten().log() - 0.5 * math.log(2 * math.pi)
