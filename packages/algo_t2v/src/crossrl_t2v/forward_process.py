"""What DiffusionNFT, AWM and Diffusion-DPO share: they train clean samples, noised again, however those were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from crossrl.advantages import AdvantageOptions, group_advantages
from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.protocols import NoiseFn, Predict
from crossrl.types import Advantages, Advice, SampleKey, Sampling, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.density import Density
from crossrl_t2v.sampling import denoise


class ForwardOptions(AdvantageOptions):
    """Options of every algorithm of this kind, besides those of advantages."""

    density: Density = Density()
    rows_per_sample: Annotated[int, Field(ge=1)] = 1  # noise levels that each sample is trained at
    eta: Annotated[float, Field(ge=0)] = 0.0  # noise of the SDE sampler; 0 draws with the ODE
    same_noise: bool = False  # one initial state for all samples of a group; only with eta > 0


class ForwardProcess:
    """Sampling and advantages; a subclass supplies rows and loss."""

    def __init__(self, options: ForwardOptions, reward_weights: Sequence[float]) -> None:
        self.options, self.reward_weights = options, tuple(reward_weights)
        self.rule = kernel.NoiseRule("dance", options.eta)

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Refuse what leaves a group without spread."""
        self.options.check_group(batch.samples)
        if self.options.same_noise and self.options.eta == 0:
            raise ConfigError(
                "same_noise with the deterministic sampler draws the same sample G times",
                where="algorithm.same_noise",
                fix="set algorithm.same_noise=false or algorithm.eta > 0",
            )
        return []

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Draw the samples; the trajectory holds nothing but the result [n, 1, C, F, H, W]."""
        path = denoise(predict, noise, sampling, self.rule, same_noise=self.options.same_noise)
        return path.x0, Trajectory(tuple(keys), path.sigmas, path.x0.cpu()[:, None], {}) if keep else None

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """Group-normalised rewards; see `crossrl.advantages`."""
        return group_advantages(scores, valid, self.reward_weights, self.options)
