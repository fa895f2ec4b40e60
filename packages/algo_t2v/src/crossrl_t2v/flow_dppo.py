"""Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a trust region of divergence instead of a clipped ratio.

The ratio of a step is one noisy draw; the divergence of its two Gaussians is known exactly. With d = mean - mean_old
and s the full deviation of the step (eq. 14, 18),

    D    = mean(d^2) / 2 s^2
    loss = 0 if D >= tau and the update leads away (rho > 1 and A > 0, or rho < 1 and A < 0), else -A rho

so what leads back to the old policy always trains.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from crossrl_t2v.flow_grpo import FlowOptions, FlowPolicy
from crossrl_t2v.policy_gradient import Objective, Transition, mean_square


class FlowDPPO(FlowPolicy):
    """The algorithm; see the module for the method."""

    uses_drift = True

    class Config(FlowOptions):
        """Defaults are the published ones; `tau` refers to a divergence that is a mean over a latent."""

        name: Literal["flow_dppo"] = "flow_dppo"
        tau: Annotated[float, Field(gt=0)] = 1e-5

    def surrogate(self, t: Transition) -> Objective:
        """-A rho where it is not masked, summed over the terms of an advantage [n, R].

        Metrics: divergence = D; masked_high and masked_low, the part of a row's terms masked at rho > 1 and rho < 1.
        """
        n = len(t.log_ratio)
        advantage = t.advantage.view(n, -1)
        ratio = t.log_ratio.exp().view(n, 1)
        divergence = (mean_square(t.drift) / (2 * t.std.square())).detach()
        outside = (divergence >= self.options.tau).view(n, 1)
        high, low = outside & (ratio > 1) & (advantage > 0), outside & (ratio < 1) & (advantage < 0)
        loss = torch.where(high | low, 0.0, -advantage * ratio).sum(1)
        metrics = {"masked_high": high.float().mean(1), "masked_low": low.float().mean(1)}
        return loss, {**metrics, "divergence": divergence}
