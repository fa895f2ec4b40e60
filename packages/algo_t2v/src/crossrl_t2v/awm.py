"""Advantage-weighted matching, AWM (arXiv 2509.25050): policy gradient with the flow-matching loss as log-likelihood.

A sample x0 of the old policy is noised to x = (1 - t) x0 + t eps. With l = mean |v - (eps - x0)|^2 the proxy

    log p = -w(t, l),    w = l, t l, t^2 l (uniform, t, t2),  t sqrt(l) (huber)  or  t (l^p - e^p) / p (ghuber)

gives, from the same x, t and eps under the policy and under the old one, a ratio rho = exp(log p - log p_old), and

    loss = max(-A rho, -A clip(rho, 1 - c, 1 + c)) + kl_old |v - v_old|^2 + kl |v - v_ref|^2

In training and pretraining the objective is then the same: at rho = 1 the gradient is A times that of w. The old policy
follows the policy slowly and draws the samples; without the pull to it and without a clip, training collapses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from crossrl.config import Batch, SamplingConfig
from crossrl.protocols import Needs
from crossrl.types import Advice, LossOutput, Rows, Trajectory
from crossrl_t2v.density import noised
from crossrl_t2v.forward_process import ForwardOptions, ForwardProcess
from crossrl_t2v.policy_gradient import clipped, mean_square, ratio_metrics

LEAST_ERROR = 1e-10  # e


class AWM(ForwardProcess):
    """The algorithm; see the module for the method."""

    class Config(ForwardOptions):
        """Defaults are the authors' for SD3.5-M (LoRA, lr 3e-4, 14 steps at shift 3)."""

        name: Literal["awm"] = "awm"
        std: Literal["group", "global", "max_group"] = "global"
        rows_per_sample: Annotated[int, Field(ge=1)] = 6
        weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
        power: Annotated[float, Field(gt=0, le=1)] = 0.25  # p of ghuber
        clip_range: Annotated[float, Field(gt=0, le=1)] = 1.0  # c; at 1 the pull to the old policy holds back alone
        adv_max: Annotated[float, Field(gt=0)] = 1.0  # advantages of +-adv_clip become +- this
        kl_old: Annotated[float, Field(ge=0)] = 1.0
        kl: Annotated[float, Field(ge=0)] = 1e-3  # against the base model; 0 needs no reference
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.3  # what the old policy keeps: min(0.001 k, this)

    def __init__(self, options: Config, reward_weights: Sequence[float]) -> None:
        super().__init__(options, reward_weights)
        self.needs = Needs(old=self._decay, reference=options.kl > 0)

    def _decay(self, iteration: int) -> float:
        """What the old policy keeps of itself after iteration k."""
        return min(0.001 * iteration, self.options.decay)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Advise against an update that nothing holds back."""
        advice = super().check(sampling, batch)
        if self.options.clip_range == 1 and self.options.kl_old == 0:
            advice.append(
                Advice(
                    "awm_unbounded",
                    "algorithm.kl_old",
                    "without a clip and without the pull to the old policy training was seen to collapse",
                    "algorithm.kl_old=1 or algorithm.clip_range=1e-4",
                )
            )
        return advice

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """Each sample noised again to `rows_per_sample` levels."""
        rows = noised(trajectory, self.options.rows_per_sample, self.options.density, seed, step, "awm")
        rows.targets["advantage"] = (advantages * (self.options.adv_max / self.options.adv_clip))[rows.owner]
        return rows

    def log_prob(self, velocity: torch.Tensor, target: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """-w(t, l) of each row [n], in fp64: ratios are differences of it."""
        t = t.double()
        error = (velocity - target).flatten(1).double().square().mean(1)
        power = self.options.power
        return -{
            "uniform": lambda: error,
            "t": lambda: t * error,
            "t2": lambda: t * t * error,
            "huber": lambda: t * ((error + LEAST_ERROR).sqrt() - LEAST_ERROR**0.5),
            "ghuber": lambda: t * ((error + LEAST_ERROR) ** power - LEAST_ERROR**power) / power,
        }[self.options.weighting]()

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """The loss of each row.

        Metrics: those of the ratio and of clipping; kl_old = |v - v_old|^2, 0 only while the old policy is the policy;
        kl = |v - v_ref|^2.
        """
        v, old = velocity["policy"], velocity["old"]
        target, advantage = rows.targets["velocity"].to(v), rows.targets["advantage"].to(v.device)
        t = rows.sigma.to(v.device)
        log_ratio = (self.log_prob(v, target, t) - self.log_prob(old, target, t)).to(v.dtype)
        loss, metrics = clipped(log_ratio, advantage, self.options.clip_range)
        for name, other, weight in (("kl_old", "old", self.options.kl_old), ("kl", "reference", self.options.kl)):
            if other in velocity:
                kl = mean_square(v - velocity[other])
                loss, metrics[name] = loss + weight * kl, kl.detach()
        return LossOutput(loss, ratio_metrics(log_ratio) | metrics)
