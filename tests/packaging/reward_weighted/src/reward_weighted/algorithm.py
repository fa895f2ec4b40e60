"""Reward-weighted flow matching: imitate the better half of each group.

Samples come from the deterministic sampler. A training row is a sample noised again to a random sigma, and its loss is
max(A, 0) times the flow-matching error: no trajectory, no likelihood, no reference.
"""

from typing import Literal

import torch

from crossrl.advantages import AdvantageOptions, group_advantages
from crossrl.noise import generator
from crossrl.protocols import Needs
from crossrl.types import LossOutput, Rows, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.sampling import denoise


class RewardWeighted:
    """The whole algorithm: no backend, device or Ray in it."""

    class Config(AdvantageOptions):
        """What `algorithm.*` may set, besides the shared options of advantages."""

        name: Literal["reward_weighted"] = "reward_weighted"
        rows_per_sample: int = 4  # noise levels trained of each sample

    needs = Needs()

    def __init__(self, options, reward_weights):
        self.options, self.reward_weights = options, reward_weights

    def check(self, sampling, batch):
        """Refuse, before any worker starts, what cannot work; no advice on what works badly."""
        self.options.check_group(batch.samples)
        return []

    def sample(self, predict, noise, keys, sampling, keep):
        """Deterministic samples; the trajectory holds nothing but the result [n, 1, C, F, H, W]."""
        path = denoise(predict, noise, sampling, kernel.ODE)
        return path.x0, Trajectory(tuple(keys), path.sigmas, path.x0.cpu()[:, None], {}) if keep else None

    def advantages(self, scores, valid):
        """Group-normalised rewards."""
        return group_advantages(scores, valid, self.reward_weights, self.options)

    def rows(self, trajectory, advantages, seed, step):
        """`rows_per_sample` noised copies of each sample; random as a function of (seed, step, sample)."""
        draws = self.options.rows_per_sample
        x0 = trajectory.latents[:, 0].repeat_interleave(draws, 0)
        owner = torch.arange(len(trajectory.keys)).repeat_interleave(draws)
        streams = [generator(seed, step, key.prompt.id, key.index, "rows") for key in trajectory.keys]
        sigma = torch.cat([torch.rand(draws, generator=stream) for stream in streams])
        eps = torch.cat([torch.randn(draws, *x0.shape[1:], generator=stream) for stream in streams])
        level = sigma.view(-1, 1, 1, 1, 1)
        targets = {"velocity": eps - x0, "weight": advantages[owner].clamp(min=0)}
        return Rows((1 - level) * x0 + level * eps, sigma, owner, targets)

    def loss(self, velocity, rows):
        """Weighted squared error of each row."""
        v = velocity["policy"]
        error = (v - rows.targets["velocity"].to(v)).square().flatten(1).mean(1)
        return LossOutput(rows.targets["weight"].to(v) * error, {"error": error.detach()})
