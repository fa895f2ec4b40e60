"""Flow matching (arXiv 2210.02747, rectified flow 2209.03003): the supervised training behind `crossrl sft`.

Clean latents x0 are noised to x = (1 - sigma) x0 + sigma eps and the network learns the velocity eps - x0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from crossrl.config import Batch, SamplingConfig, Section
from crossrl.errors import ConfigError
from crossrl.noise import generator
from crossrl.protocols import Needs, NoiseFn, Predict
from crossrl.types import Advantages, LossOutput, Rows, SampleKey, Sampling, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.sampling import denoise


class FlowMatching:
    """Not an RL method: it has rows and a loss, and samples with the ODE for evaluation, but no advantages."""

    class Config(Section):
        """Options of supervised training."""

        name: Literal["flow_matching"] = "flow_matching"
        density: Literal["uniform", "logit_normal"] = "logit_normal"  # of sigma; logit_normal: sigmoid of N(0, 1)
        rows_per_sample: Annotated[int, Field(ge=1)] = 1  # noise draws of a video in one optimizer step

    needs = Needs(clips=True)

    def __init__(self, options: Config, reward_weights: Sequence[float] = ()) -> None:
        self.options = options

    def check(self, sampling: SamplingConfig, batch: Batch) -> None:
        """Nothing to refuse."""

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Samples of the deterministic sampler; there is no trajectory to keep."""
        return denoise(predict, noise, sampling, kernel.ODE).x0, None

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """Always raises `ConfigError`."""
        raise ConfigError(
            "flow_matching is supervised training, not an RL method", where="algorithm.name", fix="use `crossrl sft`"
        )

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """Noised rows of the clean latents `trajectory.latents` [n, 1, C, F, H, W]; `advantages` are not used.

        sigma and eps are a function of (seed, step, prompt, index) alone.
        """
        draws = self.options.rows_per_sample
        x0 = trajectory.latents.repeat_interleave(draws, 0).squeeze(1)
        sigma, eps = torch.empty(len(x0)), torch.empty_like(x0)
        for i, key in enumerate(trajectory.keys):
            stream = generator(seed, step, key.prompt.id, key.index, "flow_matching")
            part = slice(i * draws, (i + 1) * draws)
            sigma[part] = self._sigma(stream)
            eps[part].normal_(generator=stream)
        level = sigma.view(-1, 1, 1, 1, 1)
        owner = torch.arange(len(trajectory.keys)).repeat_interleave(draws)
        return Rows((1 - level) * x0 + level * eps, sigma, owner, {"velocity": eps - x0})

    def _sigma(self, stream: torch.Generator) -> torch.Tensor:
        if self.options.density == "uniform":
            return torch.rand(self.options.rows_per_sample, generator=stream)
        return torch.randn(self.options.rows_per_sample, generator=stream).sigmoid()

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """Mean squared error of each row's velocity."""
        v = velocity["policy"]
        return LossOutput((v - rows.targets["velocity"].to(v)).square().flatten(1).mean(1), {})
