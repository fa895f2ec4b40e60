"""DanceGRPO (arXiv 2505.07818): a clipped policy gradient over the steps of an SDE sampler.

1. Each group of G samples of a prompt is drawn with the SDE of constant noise eta, by default from one initial state.
   Every step is a Gaussian policy: state x_k, action x_{k+1}, log-probability from `kernel.log_prob`.
2. The reward of the decoded sample, normalised in its group, is the advantage A of all its steps.
3. A random part of the steps is trained, once: with the ratio rho = exp(log p_new - log p_rollout),
   loss = mean over (sample, step) of max(-A rho, -A clip(rho, 1 - c, 1 + c)). No KL term.

Rollout and training run the same module, so before the first update rho is exactly 1, the loss is -mean(A) = 0 over a
whole group, and its gradient is that of -A log p: a loss near zero is healthy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator

from crossrl.advantages import AdvantageOptions, group_advantages
from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.protocols import Needs, NoiseFn, Predict
from crossrl.types import Advantages, LossOutput, Rows, SampleKey, Sampling, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.sampling import denoise, select_steps, trained_steps


class DanceGRPO:
    """The algorithm; see the module for the method and `crossrl.protocols.Algorithm` for the methods' contract."""

    class Config(AdvantageOptions):
        """Defaults are those of the published Wan, HunyuanVideo and FLUX runs (full fine-tuning, lr 5e-6 to 2e-5)."""

        name: Literal["dance_grpo"] = "dance_grpo"
        eta: float = 0.3  # noise of the SDE sampler
        clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4  # c; for log-probabilities that are means over a latent
        timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6  # part of the steps that trains
        same_noise: bool = True  # one initial state for all samples of a group

        @field_validator("eta")
        @classmethod
        def _stochastic(cls, eta: float) -> float:
            if eta <= 0:
                raise ValueError(f"eta={eta} samples without noise: there is no probability, hence no ratio to train")
            return eta

    needs = Needs()

    def __init__(self, options: Config, reward_weights: Sequence[float]) -> None:
        self.options, self.reward_weights = options, tuple(reward_weights)
        self.rule = kernel.NoiseRule("dance", options.eta)

    def check(self, sampling: SamplingConfig, batch: Batch) -> None:
        """Raise `ConfigError` if no step would train or best-of-n wants more samples than a group has."""
        trained_steps(sampling.steps, self.options.timestep_fraction)
        self.options.check_group(batch.samples)

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Draw the samples; the trajectory keeps the states x_0 ... x_{T-1} and the log-probabilities [n, T - 1].

        Raises `ConfigError` if a trajectory is asked of the deterministic sampler.
        """
        if keep and not sampling.stochastic:
            raise ConfigError("DanceGRPO cannot train on samples of the deterministic sampler")
        path = denoise(predict, noise, sampling, self.rule, same_noise=self.options.same_noise, keep=keep)
        if not keep:
            return path.x0, None
        return path.x0, Trajectory(tuple(keys), path.sigmas, path.states, {"log_prob": path.log_probs})

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """Group-normalised rewards; see `crossrl.advantages`."""
        return group_advantages(scores, valid, self.reward_weights, self.options)

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """A row for each sample and trained step: the state, the action taken, its log-probability, the advantage."""
        states, sigmas = trajectory.latents, trajectory.sigmas
        steps = select_steps(trajectory.keys, states.shape[1], self.options.timestep_fraction, seed, step)
        owner = torch.arange(len(steps)).repeat_interleave(steps.shape[1])
        k = steps.flatten()
        targets = {
            "x_next": states[owner, k + 1],
            "sigma_next": sigmas[k + 1],
            "log_prob": trajectory.data["log_prob"][owner, k],
            "advantage": advantages[owner],
        }
        return Rows(states[owner, k], sigmas[k], owner, targets)

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """The clipped surrogate of each row.

        Metrics of a row: rho and |rho - 1|; log rho, whose mean is the bias that a mismatch of rollout and training
        causes; approx_kl = (log rho)^2 / 2; clip_high and clip_low, 1 where clipping removes the row's gradient, which
        is at rho > 1 + c with A > 0 and at rho < 1 - c with A < 0.
        """
        v, clip = velocity["policy"], self.options.clip_range
        target = {name: t.to(v.device) for name, t in rows.targets.items()}
        advantage = target["advantage"]
        out = kernel.step(rows.x, v, rows.sigma, target["sigma_next"], self.rule)
        log_ratio = kernel.log_prob(target["x_next"], out.mean, out.std) - target["log_prob"]
        ratio = log_ratio.exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        metrics = {
            "ratio": ratio,
            "ratio_deviation_max": (ratio - 1).abs(),
            "log_ratio": log_ratio,
            "approx_kl": 0.5 * log_ratio.square(),
            "clip_high": ((ratio > 1 + clip) & (advantage > 0)).float(),
            "clip_low": ((ratio < 1 - clip) & (advantage < 0)).float(),
        }
        return LossOutput(loss, metrics)
