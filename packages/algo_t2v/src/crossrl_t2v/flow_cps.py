"""Flow-CPS (arXiv 2509.05952): Flow-GRPO on a sampler that leaves no noise behind, with a ratio that ignores scale.

The step (`kernel.step`, rule cps) removes as much noise as it adds, so samples are as clean as those of the ODE and the
reward judges content, not grain. The action's log-probability loses its normaliser,

    log p  ->  -mean (x' - mean)^2,     hence  log rho  ->  2 s^2 log rho,

because s shrinks with sigma' and 1 / 2 s^2 would give the last steps nearly all of the gradient. So the ratio moves
less, by a factor that differs from step to step: a clip range that suits it suits no other algorithm.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crossrl.config import Batch, SamplingConfig
from crossrl.types import Advice
from crossrl_t2v.flow_grpo import FlowOptions, FlowPolicy
from crossrl_t2v.policy_gradient import Objective, Transition, clipped


class FlowCPS(FlowPolicy):
    """The algorithm; see the module for the method."""

    rule_name = "cps"

    class Config(FlowOptions):
        """Defaults are the authors' for SD3.5-M without guidance; they add `window: 3` in `window_range: [0, 5]`."""

        name: Literal["flow_cps"] = "flow_cps"
        level: Annotated[float, Field(gt=0, le=1)] = 0.8  # eta
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # of the ratio without normaliser
        kl_form: Literal["paper"] = "paper"  # the authors' code divides by 2 s^2 here

    def surrogate(self, t: Transition) -> Objective:
        """The clipped surrogate of the ratio without normaliser."""
        return clipped(t.log_ratio * 2 * t.std.square(), t.advantage, self.options.clip_range)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Advise against a clip range that was meant for another ratio."""
        advice = super().check(sampling, batch)
        if self.options.clip_range >= 1e-4:
            advice.append(
                Advice(
                    "cps_clip",
                    "algorithm.clip_range",
                    f"clip_range={self.options.clip_range:g} is Flow-GRPO's; this ratio is 2 s^2 times closer to 1",
                    "algorithm.clip_range=1e-5",
                )
            )
        return advice
