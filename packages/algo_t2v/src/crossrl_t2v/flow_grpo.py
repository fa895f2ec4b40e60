"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient over the Flow-SDE sampler, held to the base model by a KL.

1. Samples are drawn with the SDE of noise sigma_t = a sqrt(sigma / (1 - sigma)) (eq. 9-12), each from a start of its
   own; a sample's advantage is its reward less the mean of its group, over the standard deviation of the whole batch.
   Groups without spread are left out.
2. Every step but the last trains: loss = max(-A rho, -A clip(rho, 1 - c, 1 + c)) + kl D. With s the full deviation of
   the step, the divergence from the reference of a step is that of two Gaussians of equal deviation,

       D = |mean - mean_ref|^2 / 2 s^2         kl_form: paper
       D = |mean - mean_ref|^2 / 2 sigma_t^2   kl_form: code, delta = (s / sigma_t)^2 times the other

   The authors' code leaves delta out on purpose, so that the last steps are not drowned, with a tenfold weight.
3. Fast variant: only a window of w consecutive steps, drawn anew each iteration within the first half of the schedule,
   draws noise and trains; all others are ODE steps.

`FlowPolicy` is what those share that change the surrogate alone: Flow-CPS, GRPO-Guard, Flow-DPPO, TempFlow-GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from crossrl.config import Batch, SamplingConfig
from crossrl.protocols import Needs
from crossrl.types import Advice
from crossrl_t2v import kernel
from crossrl_t2v.policy_gradient import (
    Objective,
    PolicyGradient,
    PolicyGradientOptions,
    Transition,
    clipped,
    mean_square,
)
from crossrl_t2v.sampling import check_window, random_window


class FlowOptions(PolicyGradientOptions):
    """Options of Flow-GRPO and of those that change its surrogate alone."""

    std: Literal["group", "global", "max_group"] = "global"
    drop_zero_std: bool = True
    same_noise: bool = False
    level: Annotated[float, Field(gt=0)] = 0.7  # a
    kl: Annotated[float, Field(ge=0)] = 0.0  # weight of the divergence from the reference; 0 needs no reference
    kl_form: Literal["paper", "code"] = "code"
    window: Annotated[int, Field(ge=1)] | None = None  # w of the fast variant; None: all steps but the last
    window_range: tuple[int, int] | None = None  # first step, and the one after the last, that windows may hold

    @model_validator(mode="after")
    def _range_of_a_window(self) -> FlowOptions:
        if self.window_range is not None and self.window is None:
            raise ValueError("window_range is the range of a window: set window, the number of its steps")
        return self


class FlowPolicy(PolicyGradient):
    """The Flow-SDE sampler, its windows, and the KL; a subclass supplies `surrogate`."""

    rule_name = "flow_sde"

    def __init__(self, options: FlowOptions, reward_weights: Sequence[float]) -> None:
        super().__init__(options, reward_weights)
        self.rule = kernel.NoiseRule(self.rule_name, options.level)
        self.needs = Needs(reference=options.kl > 0)

    def surrogate(self, t: Transition) -> Objective:
        """Loss and metrics of each row, without the KL."""
        raise NotImplementedError

    def within(self, steps: int) -> range:
        """The steps that a window may hold."""
        return range(*(self.options.window_range or (0, steps // 2)))

    def noisy(self, steps: int, seed: int, iteration: int) -> range:
        """All but the last, or this iteration's window."""
        if self.options.window is None:
            return super().noisy(steps, seed, iteration)
        return random_window(self.options.window, self.within(steps), seed, iteration)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Refuse a window outside of the schedule; advise against guidance with one."""
        if self.options.window is not None:
            check_window(self.options.window, self.within(sampling.steps), sampling.steps)
        advice = super().check(sampling, batch)
        if self.options.window is not None and sampling.guidance > 1:
            advice.append(
                Advice(
                    "window_guidance",
                    "sampling.guidance",
                    "training a window under classifier-free guidance was seen to collapse",
                    "sampling.guidance=1; eval.guidance is separate",
                )
            )
        return advice

    def objective(self, t: Transition) -> Objective:
        """The surrogate plus `kl` times the divergence from the reference (metric kl)."""
        loss, metrics = self.surrogate(t)
        if t.from_reference is None:
            return loss, metrics
        kl = mean_square(t.from_reference) / (2 * t.std.square())
        if self.options.kl_form == "code":
            kl = kl * t.delta
        return loss + self.options.kl * kl, {**metrics, "kl": kl.detach()}


class FlowGRPO(FlowPolicy):
    """The algorithm; see the module for the method."""

    class Config(FlowOptions):
        """Defaults are the authors' for SD3.5-M (LoRA of rank 32, lr 3e-4, two optimizer steps an iteration)."""

        name: Literal["flow_grpo"] = "flow_grpo"
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4  # c
        kl: Annotated[float, Field(ge=0)] = 0.04

    def surrogate(self, t: Transition) -> Objective:
        """The clipped surrogate."""
        return clipped(t.log_ratio, t.advantage, self.options.clip_range)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Advise a narrower clip with a window."""
        advice = super().check(sampling, batch)
        if self.options.window is not None and self.options.clip_range > 1e-5:
            advice.append(
                Advice(
                    "window_clip",
                    "algorithm.clip_range",
                    f"the fast variant was seen to collapse with clip_range={self.options.clip_range:g}",
                    "algorithm.clip_range=1e-5",
                )
            )
        return advice
