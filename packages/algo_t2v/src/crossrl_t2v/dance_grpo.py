"""DanceGRPO (arXiv 2505.07818): a clipped policy gradient over the steps of an SDE sampler.

1. Each group of G samples of a prompt is drawn with the SDE of constant noise eta, by default from one initial state.
   Every step but the last is a Gaussian policy: state x_k, action x_{k+1}, log-probability from `kernel.log_prob`.
2. The reward of the decoded sample, normalised in its group, is the advantage A of all its steps.
3. A random part of the steps is trained, once: with the ratio rho = exp(log p_new - log p_rollout),
   loss = mean over (sample, step) of max(-A rho, -A clip(rho, 1 - c, 1 + c)). No KL term.

Sampling, rows and the ratio are those of `policy_gradient.py`. Before the first update the loss is -mean(A) = 0 over a
whole group, and its gradient is that of -A log p: a loss near zero is healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from crossrl_t2v import kernel
from crossrl_t2v.policy_gradient import Objective, PolicyGradient, PolicyGradientOptions, Transition, clipped


class DanceGRPO(PolicyGradient):
    """The algorithm; see the module for the method."""

    class Config(PolicyGradientOptions):
        """Defaults are those of the published Wan, HunyuanVideo and FLUX runs (full fine-tuning, lr 5e-6 to 2e-5)."""

        name: Literal["dance_grpo"] = "dance_grpo"
        eta: float = 0.3  # noise of the SDE sampler
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4  # c; for log-probabilities that are means over a latent
        timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6  # part of the steps with noise that trains

        @field_validator("eta")
        @classmethod
        def _stochastic(cls, eta: float) -> float:
            if eta <= 0:
                raise ValueError(f"eta={eta} samples without noise: there is no probability, hence no ratio to train")
            return eta

    def __init__(self, options: Config, reward_weights: Sequence[float]) -> None:
        super().__init__(options, reward_weights)
        self.rule = kernel.NoiseRule("dance", options.eta)

    def objective(self, t: Transition) -> Objective:
        """The clipped surrogate."""
        return clipped(t.log_ratio, t.advantage, self.options.clip_range)
