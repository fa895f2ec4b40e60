"""Scoring: checked at the edge, so that no invented or broken value ever becomes a gradient."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from crossrl.config import RewardConfig, RunConfig
from crossrl.errors import ConfigError, RewardError
from crossrl.media import statistics
from crossrl.protocols import Reward
from crossrl.registry import select
from crossrl.types import Media, Metrics, Sample, SampleKey, Score

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Scored:
    """Scores of some media: one `Score` a reward for each sample, None where a reward failed, and why."""

    scores: dict[SampleKey, tuple[Score, ...] | None]
    problems: list[str] = field(default_factory=list)
    stats: Metrics = field(default_factory=dict)  # the worker's, passed along
    video: Metrics = field(default_factory=dict)  # what the videos look like: `media.statistics`
    seconds: float = 0.0


class RewardSet:
    """The rewards of a run, called in micro-batches."""

    def __init__(self, rewards: Sequence[Reward], micro: int) -> None:
        self.rewards, self.micro = rewards, micro

    @classmethod
    def from_config(cls, config: RunConfig) -> RewardSet:
        """Construct every reward named in the config; `PluginError` / `ConfigError` for an unknown name or option."""
        return cls([_construct(r) for r in config.rewards], config.batch.reward_micro)

    def score(self, media: Media) -> Scored:
        """Score all samples. A sample that any reward cannot score is None, with the reason in `problems`."""
        began = time.monotonic()
        out = Scored(scores={}, stats=media.stats, video=statistics(media.videos))
        for start in range(0, len(media.keys), self.micro):
            keys = media.keys[start : start + self.micro]
            videos = media.videos[start : start + self.micro]
            samples = [Sample(k.prompt, k.index, v, media.fps) for k, v in zip(keys, videos, strict=True)]
            columns = [_checked(reward, samples, out.problems) for reward in self.rewards]
            for key, row in zip(keys, zip(*columns, strict=True), strict=True):
                out.scores[key] = None if any(s is None for s in row) else row
        out.seconds = time.monotonic() - began
        return out


def labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """The name of each reward in logs: its own, with a number from the second of that name on."""
    names = [r.name for r in rewards]
    return [n if i == names.index(n) else f"{n}_{names[: i + 1].count(n)}" for i, n in enumerate(names)]


def _construct(settings: RewardConfig) -> Reward:
    reward = select("crossrl.rewards", settings.name)
    try:
        return reward(**settings.options)
    except TypeError as error:
        raise ConfigError(f"reward {settings.name!r}: {error}", where="rewards.options") from error


def _checked(reward: Reward, samples: list[Sample], problems: list[str]) -> list[Score | None]:
    """The reward's scores; after an exception the samples are tried one by one to find the bad ones."""
    try:
        scores = reward.score(samples)
    except Exception as error:  # a plug-in may raise anything; the cause is kept, the sample is dropped and counted
        if len(samples) > 1:
            return [s for sample in samples for s in _checked(reward, [sample], problems)]
        log.warning("reward %s cannot score %s", reward.name, samples[0].prompt.id, exc_info=True)
        problems.append(f"{reward.name} on {samples[0].prompt.id}#{samples[0].index}: {type(error).__name__}: {error}")
        return [None]
    if not isinstance(scores, list) or len(scores) != len(samples):
        got = f"{len(scores)} scores" if isinstance(scores, list) else type(scores).__name__
        raise RewardError(f"reward {reward.name!r} returned {got} for {len(samples)} samples")
    return [_valid(reward, sample, score, problems) for sample, score in zip(samples, scores, strict=True)]


def _valid(reward: Reward, sample: Sample, score: Score, problems: list[str]) -> Score | None:
    value = score.value if isinstance(score, Score) else score
    low, high = reward.range
    if isinstance(score, Score) and isinstance(value, int | float) and math.isfinite(value) and low <= value <= high:
        return score
    problems.append(f"{reward.name} on {sample.prompt.id}#{sample.index}: {value!r} is not a score in [{low}, {high}]")
    return None


class InlineRewards:
    """The `RewardRuntime` of a single process: scores at once."""

    def __init__(self, rewards: RewardSet) -> None:
        self.rewards = rewards

    def submit(self, handle: Media) -> Scored:
        """Score now."""
        return self.rewards.score(handle)

    def collect(self, futures: Sequence[Scored]) -> list[Scored]:
        """They are here already."""
        return list(futures)
