"""DiffusionNFT (arXiv 2509.16117): policy optimisation on the forward process; no trajectory, no likelihood.

Samples x0 of the old policy, from any sampler, are noised again to x_t = (1 - t) x0 + t eps. With the network's
velocity v, the old policy's v_old and beta, two implicit policies surround the old one,

    v+ = (1 - beta) v_old + beta v        v- = (1 + beta) v_old - beta v

and each row pulls the one that its reward prefers towards the sample (eq. 5, in the form of the authors' code):

    r    = 1/2 + clip(A, -c, c) / 2c,     A the group advantage
    loss = c / beta [ r |x0+ - x0|^2 / w+  +  (1 - r) |x0- - x0|^2 / w- ]  +  kl |v - v_ref|^2

where x0+- = x_t - t v+-, w+- = mean |x0+- - x0| without gradient, and |.|^2 is a mean. At v = v_old the gradient is
2 A t e / mean|e| with e = v_old - (eps - x0): the same for every beta and c, zero for A = 0, and proportional to t, so
that late steps are pulled little: see `density.py` and the logged pull shares. The loss does not measure progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from crossrl.config import Batch, SamplingConfig
from crossrl.protocols import Needs
from crossrl.types import Advantages, Advice, LossOutput, Rows, Trajectory
from crossrl_t2v.density import noised
from crossrl_t2v.forward_process import ForwardOptions, ForwardProcess
from crossrl_t2v.policy_gradient import mean_square

LEAST_WEIGHT = 1e-5


class DiffusionNFT(ForwardProcess):
    """The algorithm; see the module for the method."""

    class Config(ForwardOptions):
        """Defaults are the authors' (LoRA of rank 32, lr 3e-4); `adv_clip` is c."""

        name: Literal["diffusion_nft"] = "diffusion_nft"
        std: Literal["group", "global", "max_group"] = "global"
        beta: Annotated[float, Field(gt=0)] = 1.0  # distance of the implicit policies; a smaller one holds less back
        adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
        kl: Annotated[float, Field(ge=0)] = 1e-4  # weight of |v - v_ref|^2 against the base model
        decay: Literal["on_policy", "slow", "late"] = "slow"  # of the old policy: 0, min(0.001 k, 0.5), 0 until k = 75
        inverse_t: bool = False  # weigh rows by 1/t: every step is pulled alike
        rows_per_sample: Annotated[int, Field(ge=1)] | None = None  # None: sampling.steps

    def __init__(self, options: Config, reward_weights: Sequence[float]) -> None:
        super().__init__(options, reward_weights)
        self.needs = Needs(old=self._decay, reference=options.kl > 0)

    def _decay(self, iteration: int) -> float:
        """What the old policy keeps of itself after iteration k; the authors' types 0, 1 and 2."""
        schedules = {
            "on_policy": 0.0,
            "slow": min(0.001 * iteration, 0.5),
            "late": min(0.0075 * max(0, iteration - 75), 0.999),
        }
        return schedules[self.options.decay]

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Advise against a density of sigma that leaves the last or the first steps without pull."""
        advice = super().check(sampling, batch)
        highest = self.options.density.highest(sampling.steps, sampling.shift)
        if highest < 0.4:
            advice.append(
                Advice(
                    "nft_density",
                    "algorithm.density",
                    f"no sigma above {highest:.2f} is trained: on the toy world the reward then fell (docs/lessons)",
                    "algorithm.density=grid or uniform, a larger k or high, or a larger sampling.shift",
                )
            )
        if self.options.density.name == "grid" and sampling.shift >= 5 and not self.options.inverse_t:
            advice.append(
                Advice(
                    "nft_density",
                    "algorithm.density",
                    f"the sampler's grid at shift {sampling.shift:g} leaves the last denoising steps almost no pull",
                    "algorithm.density=uniform or a late one, or algorithm.inverse_t=true; see update/pull_*",
                )
            )
        return advice

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """Rewards less their group's mean, over the standard deviation of the whole batch, as `adv_mode` says."""
        out = super().advantages(scores, valid)
        return Advantages(_MODES[self.options.adv_mode](out.values), out.keep, out.metrics)

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """Each sample noised again to `rows_per_sample` levels."""
        draws = self.options.rows_per_sample or len(trajectory.sigmas) - 1
        rows = noised(trajectory, draws, self.options.density, seed, step, "diffusion_nft")
        clip = self.options.adv_clip
        rows.targets["r"] = (0.5 + advantages.clamp(-clip, clip) / (2 * clip))[rows.owner]
        return rows

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """The loss of each row.

        Metrics: old_deviate = mean (v - v_old)^2, 0 only while the old policy is the policy; kl = mean (v - v_ref)^2.
        """
        v, old, options = velocity["policy"], velocity["old"], self.options
        target = {name: t.to(v.device) for name, t in rows.targets.items()}
        x, t, x0, r = rows.x.to(v.device), rows.sigma.to(v.device), target["x0"], target["r"]
        level = t.view(-1, *[1] * (x.dim() - 1))
        plus = _error(x - level * ((1 - options.beta) * old + options.beta * v) - x0)
        minus = _error(x - level * ((1 + options.beta) * old - options.beta * v) - x0)
        loss = options.adv_clip / options.beta * (r * plus + (1 - r) * minus)
        if options.inverse_t:
            loss = loss / t
        metrics = {"old_deviate": mean_square(v.detach() - old)}
        if "reference" in velocity:
            kl = mean_square(v - velocity["reference"])
            loss, metrics["kl"] = loss + options.kl * kl, kl.detach()
        return LossOutput(loss, metrics)


def _error(difference: torch.Tensor) -> torch.Tensor:
    """mean d^2 / mean |d| of each row, the denominator without gradient: mean-square error with adaptive weight."""
    flat = difference.flatten(1)
    return flat.square().mean(1) / flat.detach().double().abs().mean(1).clamp(min=LEAST_WEIGHT).to(flat)


_MODES = {
    "all": lambda a: a,
    "positive_only": lambda a: np.maximum(a, 0.0),
    "negative_only": lambda a: np.minimum(a, 0.0),
    "one_only": lambda a: (a > 0).astype(float),
    "binary": np.sign,
}
