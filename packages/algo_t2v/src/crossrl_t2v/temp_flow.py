"""TempFlow-GRPO (arXiv 2508.04324): one step of a group's common trajectory branches, and earns the whole reward.

All samples of a group start from one initial state and follow the ODE but for one branching step k, drawn anew each
iteration, where each draws its own noise. What tells their rewards apart is that noise alone, so the advantage is the
credit of step k, without any reward model for unfinished samples. A step's loss has the weight of what it can explore,

    loss = w s max(-A rho, -A clip(rho, 1 - c, 1 + c)) + kl D

with s = sigma_t sqrt(delta) the full deviation of the step under Flow-SDE.

In terms of `flow_grpo.py` this is a window of one step with a shared start and a weight. The authors branch at all
steps of a trajectory in one iteration, which costs steps / 2 times the samples; here an iteration has one k.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crossrl_t2v.flow_grpo import FlowOptions, FlowPolicy
from crossrl_t2v.policy_gradient import Objective, Transition, clipped


class TempFlow(FlowPolicy):
    """The algorithm; see the module for the method."""

    class Config(FlowOptions):
        """Defaults are the authors' for SD3.5-M (LoRA, lr 3e-4); `window_range` is where the branch may be."""

        name: Literal["temp_flow"] = "temp_flow"
        std: Literal["group", "global", "max_group"] = "group"
        same_noise: Literal[True] = True
        window: Literal[1] = 1
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4  # c
        weight: Annotated[float, Field(gt=0)] = 2.25  # w, about 1 / (mean s) of the authors' schedule
        kl: Annotated[float, Field(ge=0)] = 0.004
        kl_form: Literal["paper", "code"] = "paper"

    def within(self, steps: int) -> range:
        """Every step that can draw noise, unless `window_range` says otherwise."""
        return range(*(self.options.window_range or (0, steps - 1)))

    def surrogate(self, t: Transition) -> Objective:
        """The clipped surrogate, weighed by the noise of the step."""
        loss, metrics = clipped(t.log_ratio, t.advantage, self.options.clip_range)
        return self.options.weight * t.std * loss, metrics
