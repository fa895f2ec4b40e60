"""MixGRPO (arXiv 2507.21802): noise and training in a window of w steps that moves over the schedule; ODE elsewhere.

Only the window's steps cost a forward and backward in training, and only they must explore at a time. The window moves
from the first steps, which shape the sample most, to the last, and starts over at the end:

    progressive   tau iterations at each place, then on by `stride`
    decay         from tau down to `least_tau` iterations at a place, in proportion to how late it is
    exp_decay     ceil(tau exp(-k max(start - from, 0))) iterations at a place
    random        any place, drawn anew each iteration

Sampler and objective are Flow-SDE and the clipped surrogate, without KL; of several rewards each is normalised first.
The window of an iteration is a function of its number, so a resumed run goes on with the same one. The Flash variant's
second-order solver for the steps after the window is left out.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field

from crossrl.config import Batch, SamplingConfig
from crossrl.types import Advice
from crossrl_t2v import kernel
from crossrl_t2v.policy_gradient import Objective, PolicyGradient, PolicyGradientOptions, Transition, clipped
from crossrl_t2v.sampling import check_window, random_window


class MixGRPO(PolicyGradient):
    """The algorithm; see the module for the method."""

    class Config(PolicyGradientOptions):
        """Defaults are the authors' for FLUX and 25 steps (full fine-tuning, lr 1e-5)."""

        name: Literal["mix_grpo"] = "mix_grpo"
        aggregate: Literal["sum", "per_reward", "gdpo", "per_reward_loss"] = "per_reward"
        level: Annotated[float, Field(gt=0)] = 0.7  # a of Flow-SDE
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
        window: Annotated[int, Field(ge=1)] = 4  # w
        schedule: Literal["progressive", "random", "decay", "exp_decay"] = "progressive"
        tau: Annotated[int, Field(ge=1)] = 25  # iterations at a place
        stride: Annotated[int, Field(ge=0)] = 1  # steps from place to place; 0 leaves the window at the start
        least_tau: Annotated[int, Field(ge=1)] | None = None  # decay: of the last step; None: a quarter of tau
        decay_from: Annotated[int, Field(ge=0)] = 13  # exp_decay: from
        decay_rate: Annotated[float, Field(ge=0)] = 0.1  # exp_decay: k

    def __init__(self, options: Config, reward_weights: Sequence[float]) -> None:
        super().__init__(options, reward_weights)
        self.rule = kernel.NoiseRule("flow_sde", options.level)

    def noisy(self, steps: int, seed: int, iteration: int) -> range:
        """This iteration's window."""
        options = self.options
        if options.schedule == "random":
            return random_window(options.window, range(steps - 1), seed, iteration)
        starts = range(0, steps - options.window, options.stride) if options.stride else range(1)
        ends = list(accumulate(self.iterations_at(start, steps) for start in starts))
        start = starts[bisect(ends, iteration % ends[-1])]
        return range(start, start + options.window)

    def iterations_at(self, start: int, steps: int) -> int:
        """How many iterations the window stays where it begins with step `start`; for all schedules but random."""
        options = self.options
        if options.schedule == "decay":
            least = options.least_tau or max(1, options.tau // 4)
            late = start / max(1, steps - 2)
            return max(least, int(options.tau * (1 - late) + least * late))
        if options.schedule == "exp_decay":
            return math.ceil(options.tau * math.exp(-options.decay_rate * max(start - options.decay_from, 0)))
        return options.tau

    def objective(self, t: Transition) -> Objective:
        """The clipped surrogate."""
        return clipped(t.log_ratio, t.advantage, self.options.clip_range)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Refuse a window that the schedule cannot hold; advise against guidance."""
        check_window(self.options.window, range(sampling.steps - 1), sampling.steps)
        advice = super().check(sampling, batch)
        if sampling.guidance > 1:
            advice.append(
                Advice(
                    "window_guidance",
                    "sampling.guidance",
                    "training a window under classifier-free guidance was seen to collapse",
                    "sampling.guidance=1; eval.guidance is separate",
                )
            )
        return advice
