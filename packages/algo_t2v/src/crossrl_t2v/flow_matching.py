"""Flow matching (arXiv 2210.02747, rectified flow 2209.03003): the supervised training behind `crossrl sft`.

Clean latents x0 are noised to x = (1 - sigma) x0 + sigma eps and the network learns the velocity eps - x0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator

from crossrl.config import Batch, SamplingConfig, Section
from crossrl.errors import ConfigError
from crossrl.protocols import Needs, NoiseFn, Predict
from crossrl.types import Advantages, Advice, LossOutput, Rows, SampleKey, Sampling, Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.density import Density, noised
from crossrl_t2v.sampling import denoise


class FlowMatching:
    """Not an RL method: it has rows and a loss, and samples with the ODE for evaluation, but no advantages."""

    class Config(Section):
        """Options of supervised training."""

        name: Literal["flow_matching"] = "flow_matching"
        density: Density = Density(name="logit_normal")  # of sigma
        rows_per_sample: Annotated[int, Field(ge=1)] = 1  # noise draws of a video in one optimizer step

        @field_validator("density")
        @classmethod
        def _no_grid(cls, density: Density) -> Density:
            if density.name in ("grid", "last_k"):
                raise ValueError(f"density={density.name}: there is no sampler, hence no grid, in supervised training")
            return density

    needs = Needs(clips=True)

    def __init__(self, options: Config, reward_weights: Sequence[float] = ()) -> None:
        self.options = options

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Nothing to refuse."""
        return []

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
        """Noised rows of the clean latents; `advantages` are not used."""
        return noised(trajectory, self.options.rows_per_sample, self.options.density, seed, step, "flow_matching")

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """Mean squared error of each row's velocity."""
        v = velocity["policy"]
        return LossOutput((v - rows.targets["velocity"].to(v)).square().flatten(1).mean(1), {})
