"""The contracts between CrossRL's parts. Everything here is a `Protocol` or a frozen description; nothing runs.

    config --registry--> Backend (engine) + Algorithm + ModelFamily + Reward --> loop.run_iteration

An algorithm never sees a backend, a device or Ray; a backend never sees an algorithm's options; a model family never
sees either. They meet at `crossrl.types`. Diffusion backends subclass `crossrl.engine.DiffusionEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from crossrl.types import (
    Advantages,
    Advice,
    LossOutput,
    Media,
    Observation,
    Prompt,
    RankReport,
    RankStats,
    RolloutRequest,
    Rows,
    Sample,
    SampleKey,
    Sampling,
    Score,
    StepResult,
    Trajectory,
    UpdatePlan,
)

if TYPE_CHECKING:
    import torch

    from crossrl.config import Batch, Model, SamplingConfig, Video
    from crossrl.rewards import Scored

API_VERSION = 1
"""Version of these contracts; a plug-in states the one it was written for."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data: read by `crossrl list`, the docs table, config checks and conformance tests."""

    families: tuple[str, ...] = ()  # model families, e.g. ("wan",)
    kinds: tuple[str, ...] = ("diffusion",)  # "diffusion", "language"
    devices: tuple[str, ...] = ("cpu",)
    parallelism: tuple[str, ...] = ()  # "fsdp2", "ulysses", ...
    lora: bool = False
    export: tuple[str, ...] = ()  # folder layouts it can write


@dataclass(frozen=True, slots=True)
class Plugin:
    """A light description that an entry point names; listing plug-ins imports nothing heavy.

    `target` ("module:attribute") is imported on selection only. `requires` are requirement strings of other
    distributions; `available` may add a check of its own and returns None or the reason why not.
    """

    name: str
    summary: str
    target: str
    requires: tuple[str, ...] = ()
    api: int = API_VERSION
    capabilities: Capabilities | None = None
    available: Callable[[], str | None] | None = None


class Backend(Protocol):
    """A training backend: what a `crossrl.backends` plug-in's target is."""

    def engine(self, kind: str) -> type:
        """A `DiffusionEngine` class for "diffusion", a verl `BaseEngine` for "language"; `ConfigError` if none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm needs besides the policy: further weights (the engine keeps a slot for each), or data.

    With `old`, samples are drawn with the old policy, which after iteration k becomes old(k) old + (1 - old(k)) policy.
    """

    old: Callable[[int], float] | None = None
    reference: bool = False
    clips: bool = False  # trains on captioned clips instead of its own samples


Predict = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""(x [n, C, F, H, W], sigma [n]) -> velocity [n, C, F, H, W]; the condition and guidance are bound already."""


class NoiseFn(Protocol):
    """Standard normal noise [n, C, F, H, W], fp32 on CPU, for the samples of one micro-batch."""

    seed: int
    step: int  # the iteration

    def __call__(self, tag: str, *, shared: bool = False) -> torch.Tensor:
        """A function of (seed, step, prompt, index, tag) alone, whatever the world size and micro-batch.

        `shared` leaves the index out: all samples of a group get the same noise.
        """


class Algorithm(Protocol):
    """An RL method for diffusion models; one file, no backend, Ray or device in it.

    `Config` is a pydantic model with `extra="forbid"`: the options that `algorithm.*` in a config may set.
    """

    Config: type
    needs: Needs

    def check(self, sampling: SamplingConfig, batch: Batch) -> Sequence[Advice]:
        """Raise `ConfigError`, before any worker starts, for options that cannot go with these; advise on bad ones."""

    def sample(
        self, predict: Predict, noise: NoiseFn, keys: Sequence[SampleKey], sampling: Sampling, keep: bool
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Draw one sample for each key: (latents to decode [n, C, F, H, W], trajectory if `keep`)."""

    def advantages(self, scores: np.ndarray, valid: np.ndarray) -> Advantages:
        """scores [B, G, R], valid [B, G] (False: the reward failed, the score is NaN) -> advantages and selection."""

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """Training rows of the samples (advantages [n] or [n, R]); the same number of rows for every sample."""

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """Per-row loss from the velocities, keyed "policy" and, as `needs` says, "old" and "reference"."""


class ModelFamily(Protocol):
    """How a family of models encodes prompts, shapes latents and decodes: all but the trained network itself."""

    def to(self, device: str) -> None:
        """Move the text encoder and the VAE."""

    @classmethod
    def check(cls, model: Model, video: Video) -> None:
        """Raise, before any worker starts and without loading a weight, for a folder or a size that cannot be."""

    @classmethod
    def open(cls, path: str, dtype: str) -> ModelFamily:
        """Load text encoder and VAE of the model at `path` (a folder, or a name that the family ships)."""

    folder: Path  # the resolved diffusers folder; a backend loads the trained network from it

    def encode_text(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors [n, ...] on CPU, named as the network's arguments; `DataError` for a prompt that is too long."""

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video of `frames` x `height` x `width` pixels."""

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [n, C, F, H, W] -> uint8 videos [n, frames, height, width, 3]."""

    def encode_video(self, videos: np.ndarray) -> torch.Tensor:
        """uint8 videos [n, frames, height, width, 3] -> latents [n, C, F, H, W] fp32 on CPU (for SFT)."""


@runtime_checkable
class Reward(Protocol):
    """Scores samples. Never returns NaN for a good sample, never invents a value: raises for what it cannot score."""

    name: str
    range: tuple[float, float]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order."""


class Env(Protocol):
    """An interactive environment (GUI agents)."""

    async def reset(self, seed: int) -> Observation:
        """Start the episode that `seed` names."""

    async def step(self, action: Any) -> StepResult:
        """Carry out one action."""

    async def close(self) -> None:
        """Give everything back."""


class WorkerGroup(Protocol):
    """The workers as the loop sees them: Ray actors in a job, or one engine in this process."""

    dp_size: int  # data-parallel ranks; the samples are shared out among them

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[Any]:
        """Start one request a data-parallel rank; at once a handle each, which resolves to a `Media`."""

    def update(self, plan: UpdatePlan) -> list[RankStats]:
        """One optimizer step on all ranks; the stats of each data-parallel rank."""

    def fetch(self, handle: Any) -> Media:
        """Wait for media and bring them here (pictures for people)."""

    def gate(self, requests: Sequence[RolloutRequest]) -> list[RankReport]:
        """One request a data-parallel rank: try all ranks' engines, changing nothing; see `crossrl.probe`."""

    def load_clips(self, step: int, source: str, indices: Sequence[int]) -> None:
        """Hold captioned clips as samples of `step`, for supervised algorithms."""

    def save(self, folder: Path) -> None:
        """All ranks write into `folder`."""

    def load(self, folder: Path) -> None:
        """All ranks read from `folder`."""


class DataSource(Protocol):
    """Built-in or generated data: what a `crossrl.data` plug-in's target is."""

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts of "train" or "heldout"."""

    def clips(self, split: str, indices: Sequence[int]) -> tuple[list[str], np.ndarray]:
        """Captions and uint8 videos [n, F, H, W, 3]; a pure function of the indices."""


class RewardRuntime(Protocol):
    """The rewards as the loop sees them."""

    def submit(self, handle: Any) -> Any:
        """Start scoring the media that `handle` resolves to; at once a future."""

    def collect(self, futures: Sequence[Any]) -> list[Scored]:
        """Wait for all, in order."""
