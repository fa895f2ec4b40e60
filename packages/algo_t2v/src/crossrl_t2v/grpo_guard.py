"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio that is centred at 1 and alike at every step.

With d = mean - mean_old, s the full deviation of the step and xi the noise drawn, log rho = mean(xi d) / s -
mean(d^2) / 2 s^2. It is biased below 0, the more the smaller s, so that A > 0 is hardly ever clipped. Instead

    log rho_guard = (log rho + mean(d^2) / 2 s^2) s = mean(xi d)      mean 0, deviation rms(d) / sqrt(D) at every s
    loss          = max(-A rho_guard, -A clip(rho_guard, 1 - c, 1 + c)) / delta

where D counts a latent's elements and 1 / delta evens out the gradients of the steps. The bias is each row's own; the
reference code takes one number for a whole batch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crossrl.config import Batch, SamplingConfig
from crossrl.types import Advice
from crossrl_t2v.flow_grpo import FlowOptions, FlowPolicy
from crossrl_t2v.policy_gradient import Objective, Transition, clipped, mean_square


class GRPOGuard(FlowPolicy):
    """The algorithm; see the module for the method."""

    uses_drift = True

    class Config(FlowOptions):
        """Defaults are the authors' for SD3.5-M and OCR (lr 1e-4, no KL)."""

        name: Literal["grpo_guard"] = "grpo_guard"
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 2e-6  # c, of rho_guard

    def surrogate(self, t: Transition) -> Objective:
        """The clipped surrogate of rho_guard over delta; its log is the metric guard_log_ratio."""
        log_ratio = t.log_ratio * t.std + mean_square(t.drift) / (2 * t.std)
        loss, metrics = clipped(log_ratio, t.advantage, self.options.clip_range)
        return loss / t.delta, {**metrics, "guard_log_ratio": log_ratio.detach()}

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Advise against a clip range that was meant for another ratio."""
        advice = super().check(sampling, batch)
        if self.options.clip_range >= 1e-4:
            advice.append(
                Advice(
                    "guard_clip",
                    "algorithm.clip_range",
                    f"clip_range={self.options.clip_range:g} is Flow-GRPO's; the guarded ratio is s times closer to 1",
                    "algorithm.clip_range=2e-6",
                )
            )
        return advice
