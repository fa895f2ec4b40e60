"""What all algorithms share that train the steps of a stochastic sampler by their likelihood ratio (DanceGRPO's kin).

A step that draws noise is a Gaussian policy: state x_k, action x_{k+1}. Its ratio is rho = exp(log p_new - log p_old),
with log-probabilities that are means over a latent. A subclass chooses the noise rule, which steps draw noise, and
the objective; nothing else. Rollout and training run the same module, so before the first update rho is exactly 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from crossrl.advantages import AdvantageOptions, group_advantages
from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.protocols import Needs, NoiseFn, Predict
from crossrl.types import Advantages, Advice, LossOutput, Metrics, Rows, SampleKey, Sampling, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.sampling import denoise, select_steps, trained_steps


class PolicyGradientOptions(AdvantageOptions):
    """Options of every algorithm of this kind, besides those of advantages."""

    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # part of the steps with noise that trains
    same_noise: bool = True  # one initial state for all samples of a group


@dataclass(frozen=True, slots=True)
class Transition:
    """Rows of steps as an objective sees them; tensors [n], or [n, C, F, H, W] and [n, 1, 1, 1, 1] where marked."""

    log_ratio: torch.Tensor  # with the graph
    advantage: torch.Tensor  # [n], or [n, R] if each reward has its own loss term
    std: torch.Tensor  # full deviation of the step
    delta: torch.Tensor  # sigma - sigma'
    sigma: torch.Tensor
    drift: torch.Tensor | None  # mean - old mean [n, C, F, H, W], with the graph; None unless `uses_drift`
    from_reference: torch.Tensor | None  # mean - reference mean, likewise; None without a reference


Objective = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss [n] and detached metrics [n] of each row."""


class PolicyGradient:
    """See the module; `crossrl.protocols.Algorithm` has the methods' contract."""

    Config: type[PolicyGradientOptions]
    needs = Needs()
    uses_drift = False

    def __init__(self, options: PolicyGradientOptions, reward_weights: Sequence[float]) -> None:
        self.options, self.reward_weights = options, tuple(reward_weights)

    # ---- what an algorithm supplies ----------------------------------------------------------------------------

    rule: kernel.NoiseRule

    def noisy(self, steps: int, seed: int, iteration: int) -> range:
        """The steps of this iteration that draw noise; by default all but the last, whose noise no reward sees."""
        return range(steps - 1)

    def objective(self, t: Transition) -> Objective:
        """Loss and metrics of each row."""
        raise NotImplementedError

    # ---- the Algorithm contract --------------------------------------------------------------------------------

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Raise `ConfigError` if no step would train or best-of-n wants more samples than a group has."""
        trained_steps(len(self.noisy(sampling.steps, 0, 0)), self.options.timestep_fraction)
        self.options.check_group(batch.samples)
        return []

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Draw the samples; the trajectory keeps the states around the noisy steps and their log-probabilities [n, W].

        Raises `ConfigError` if a trajectory is asked of the deterministic sampler.
        """
        if keep and not sampling.stochastic:
            raise ConfigError(f"{type(self).__name__} cannot train on samples of the deterministic sampler")
        # evaluation may take fewer steps than a window needs
        noisy = self.noisy(sampling.steps, noise.seed, noise.step) if sampling.stochastic else range(0)
        same = self.options.same_noise
        path = denoise(predict, noise, sampling, self.rule, noisy=noisy, same_noise=same, keep=keep)
        if not keep:
            return path.x0, None
        return path.x0, Trajectory(tuple(keys), path.sigmas, path.states, {"log_prob": path.log_probs})

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """Group-normalised rewards; see `crossrl.advantages`."""
        return group_advantages(scores, valid, self.reward_weights, self.options)

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """A row for each sample and trained step: the state, the action taken, its log-probability, the advantage.

        The old mean needs no memory of its own: it is the action less the noise, which is drawn again.
        """
        states, schedule = trajectory.latents, trajectory.sigmas
        noisy = self.noisy(len(schedule) - 1, seed, step)
        places = select_steps(trajectory.keys, len(noisy), self.options.timestep_fraction, seed, step)
        owner = torch.arange(len(places)).repeat_interleave(places.shape[1])
        w = places.flatten()
        k = w + noisy.start
        targets = {
            "x_next": states[owner, w + 1],
            "sigma_next": schedule[k + 1],
            "log_prob": trajectory.data["log_prob"][owner, w],
            "advantage": advantages[owner],
        }
        if self.uses_drift:
            noise = Noise(seed, step, trajectory.keys, states.shape[2:])
            drawn = torch.stack([noise(f"step/{i}") for i in noisy], 1)
            targets["noise"] = drawn[owner, w]
        return Rows(states[owner, w], schedule[k], owner, targets)

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """The objective of each row.

        Metrics besides the objective's are `ratio_metrics` of the likelihood ratio, whatever ratio the objective clips:
        the mean of log rho is the bias that a mismatch of rollout and training causes.
        """
        v = velocity["policy"]
        target = {name: t.to(v.device) for name, t in rows.targets.items()}
        out = kernel.step(rows.x, v, rows.sigma, target["sigma_next"], self.rule)
        log_ratio = kernel.log_prob(target["x_next"], out.mean, out.std) - target["log_prob"]
        drift = out.mean - (target["x_next"] - out.std * target["noise"]) if self.uses_drift else None
        from_reference = None
        if self.needs.reference:
            base = kernel.step(rows.x, velocity["reference"], rows.sigma, target["sigma_next"], self.rule)
            from_reference = out.mean - base.mean
        sigma = rows.sigma.to(v.device)
        delta = sigma - target["sigma_next"]
        std = out.std.flatten()
        loss, metrics = self.objective(
            Transition(log_ratio, target["advantage"], std, delta, sigma, drift, from_reference)
        )
        return LossOutput(loss, ratio_metrics(log_ratio) | dict(metrics))


def ratio_metrics(log_ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is logged of every ratio, of each row: rho and |rho - 1|, log rho, approx_kl = (log rho)^2 / 2."""
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {
        "ratio": ratio,
        "ratio_deviation_max": (ratio - 1).abs(),
        "log_ratio": log_ratio,
        "approx_kl": 0.5 * log_ratio.square(),
    }


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The mean square of each row [n] of x [n, ...]."""
    return x.square().flatten(1).mean(1)


def clipped(log_ratio: torch.Tensor, advantage: torch.Tensor, clip: float) -> Objective:
    """max(-A rho, -A clip(rho, 1 - c, 1 + c)) of each row, summed over the terms of an advantage [n, R].

    Metrics clip_high and clip_low: 1 where clipping removes a term's gradient, which is at rho > 1 + c with A > 0 and
    at rho < 1 - c with A < 0.
    """
    ratio = log_ratio.exp().view(-1, *[1] * (advantage.dim() - 1))
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    ratio = ratio.detach()
    high, low = (ratio > 1 + clip) & (advantage > 0), (ratio < 1 - clip) & (advantage < 0)
    n = len(log_ratio)
    metrics: Metrics = {"clip_high": high.float().view(n, -1).mean(1), "clip_low": low.float().view(n, -1).mean(1)}
    return loss.view(n, -1).sum(1), metrics
