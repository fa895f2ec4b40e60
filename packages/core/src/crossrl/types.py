"""The data that crosses a boundary: frozen, small, and free of devices.

Shape legend used everywhere: `B` prompts, `G` samples a prompt, `N = B*G`, `T` denoising steps,
`C F H W` latent channels / frames / height / width, `L` text tokens, `R` rewards, `n` rows.
`sigma` is in [0, 1] (1 = pure noise); the network's timestep is `1000 * sigma`, a float, never truncated.
Importing this module loads numpy only; tensors are named by string annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Plain = str | int | float | bool | None
"""What metadata may hold. A tensor in metadata is refused by name (see `crossrl.leaks`)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conditioning text, e.g. `Prompt("toy/17", "a red circle moving up")`; the id alone makes it equal."""

    id: str
    text: str = field(compare=False)
    meta: Mapping[str, Plain] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample for ever: every random number of it is a function of (seed, step, prompt, index)."""

    prompt: Prompt
    index: int  # place in its group, 0 <= index < G


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reward sees. `video` is uint8 [F, H, W, 3], RGB; `fps` in frames a second."""

    prompt: Prompt
    index: int
    video: np.ndarray
    fps: float


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's verdict on one sample; `parts` are its named components, for the logs only."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting that works badly elsewhere: the rule's name, the key, what was seen with it, what to set instead."""

    rule: str
    key: str
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"advice ({self.rule}): {self.key}: {self.seen}\n  -> {self.fix}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw samples.

    `steps` = T network steps from sigma 1 to 0, `shift` the flow shift s of sigma = s u / (1 + (s-1) u),
    `guidance` the classifier-free weight (1 = off), `stochastic` False asks for the deterministic (ODE) sampler.
    """

    steps: int
    shift: float = 1.0
    guidance: float = 1.0
    stochastic: bool = True


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One call to a worker: draw these samples. All ranks of a data-parallel group get equally many keys."""

    keys: tuple[SampleKey, ...]
    sampling: Sampling
    seed: int
    step: int
    keep_trajectory: bool = True  # False for evaluation
    weights: str = "policy"  # weight slot: "policy", "ema", "old", "reference"


@dataclass(slots=True)
class Trajectory:
    """What an algorithm needs later about samples drawn on this worker; fp32 tensors on CPU.

    keys: n sample keys. `latents` [n, K, C, F, H, W] the states worth keeping (K is the algorithm's choice),
    `data` further per-sample tensors [n, ...] (log-probs, step indices), `sigmas` [T+1] shared by the batch.
    """

    keys: tuple[SampleKey, ...]
    sigmas: torch.Tensor
    latents: torch.Tensor
    data: dict[str, torch.Tensor]


@dataclass(slots=True)
class Rows:
    """The common currency of all diffusion losses: one row = one network evaluation with a target.

    x [n, C, F, H, W] fp32, sigma [n] fp32, `owner` [n] int64: which of the trajectory's samples the row belongs to
    (its text embedding is looked up by it), `targets` per-row tensors [n, ...] that only the algorithm understands.
    """

    x: torch.Tensor
    sigma: torch.Tensor
    owner: torch.Tensor
    targets: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return self.x.shape[0]

    def take(self, index: slice | torch.Tensor) -> Rows:
        """The rows at `index`."""
        targets = {k: t[index] for k, t in self.targets.items()}
        return Rows(self.x[index], self.sigma[index], self.owner[index], targets)


@dataclass(slots=True)
class LossOutput:
    """Per-row loss [n] with its graph, and detached per-row metrics [n] to be averaged over all rows of the step."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Advantages:
    """values fp64 (0 where not kept); keep [B, G] bool: which samples train; metrics: scalars for the log.

    values are [B, G], or [B, G, R] where each reward has a loss term of its own.
    """

    values: np.ndarray
    keep: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """One optimizer step, the same for every rank: the samples of all ranks that take part, with their advantages.

    A rank trains the samples that it holds and pads to `samples_per_rank`, the largest share of any rank, with rows
    of zero weight, so that all ranks run the same collectives. The loss is a mean over the rows of `keys`.
    """

    step: int
    seed: int
    keys: tuple[SampleKey, ...]
    advantages: tuple[float | tuple[float, ...], ...]
    samples_per_rank: int
    last: bool = True  # of its iteration: the old policy follows after it
    lr_scale: float = 1.0
    skip_above: float | None = None  # a larger gradient norm skips the step, on all ranks


@dataclass(slots=True)
class Media:
    """What a rollout hands to the reward runtime: `videos` uint8 [n, F, H, W, 3] of `keys`, and the worker's stats."""

    keys: tuple[SampleKey, ...]
    videos: np.ndarray
    fps: float
    stats: Metrics


@dataclass(slots=True)
class RankStats:
    """One rank's share of an optimizer step's metrics: weighted sums and maxima over its rows, and its own scalars."""

    sums: Metrics = field(default_factory=dict)
    maxima: Metrics = field(default_factory=dict)
    scalars: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the start-up gate: what was measured, its limit, and what makes it fail with the setting to change."""

    name: str
    value: float | str
    limit: float | str
    status: str  # "ok", "warn", "fail" or "skip"
    cause: str = ""  # empty if ok


@dataclass(slots=True)
class RankReport:
    """What one rank found at the start-up gate; `by_sigma`: the ratio at each noise level, `media`: for rewards."""

    checks: list[Check]
    by_sigma: list[Metrics]
    media: Any  # None on the further ranks of a sequence-parallel group
    forwards: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows: a PNG screenshot and the instruction."""

    screenshot_png: bytes
    instruction: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one action; `stop_reason` is None while the episode goes on."""

    observation: Observation
    reward: float
    stop_reason: str | None


Metrics = dict[str, float]
