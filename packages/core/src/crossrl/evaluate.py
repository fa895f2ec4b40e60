"""Held-out evaluation: the deterministic sampler, fixed noise, its own guidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crossrl.config import RunConfig
from crossrl.errors import RewardError
from crossrl.loop import waves
from crossrl.protocols import RewardRuntime, WorkerGroup
from crossrl.rewards import labels
from crossrl.types import Media, Metrics, Prompt, SampleKey, Sampling

EVAL_STEP = -1  # the "step" of evaluation noise: the same at every evaluation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean weighted reward over all held-out samples, its standard error over prompts, the mean by prompt id.

    `by_reward` has each reward's own mean by name, and its standard error as `<name>_standard_error`.
    """

    mean: float
    standard_error: float
    by_prompt: dict[str, float]
    parts: Metrics
    by_reward: Metrics = field(default_factory=dict)

    @property
    def metrics(self) -> Metrics:
        """What the logs and the guard get."""
        each = {f"heldout/{name}": value for name, value in self.by_reward.items()}
        return each | {"heldout/reward": self.mean, "heldout/standard_error": self.standard_error}


def evaluate(
    config: RunConfig, workers: WorkerGroup, rewards: RewardRuntime, prompts: Sequence[Prompt], weights: str = "policy"
) -> Evaluation:
    """Draw `eval.samples` videos of every prompt and score them."""
    keys = [SampleKey(prompt, g) for prompt in prompts for g in range(config.eval.samples)]
    futures = []
    for requests in waves(keys, eval_sampling(config), config, EVAL_STEP, workers.dp_size, weights):
        futures += [rewards.submit(handle) for handle in workers.rollout(requests)]
    found = {key: row for scored in rewards.collect(futures) for key, row in scored.scores.items()}
    coefficients = [r.weight for r in config.rewards]
    by_prompt: dict[str, list[float]] = {}
    of_rewards: dict[str, dict[str, list[float]]] = {name: {} for name in labels(config.rewards)}
    parts: dict[str, list[float]] = {}
    for key in keys:
        if (row := found[key]) is None:
            continue
        value = sum(c * s.value for c, s in zip(coefficients, row, strict=True))
        by_prompt.setdefault(key.prompt.id, []).append(value)
        for by_id, score in zip(of_rewards.values(), row, strict=True):
            by_id.setdefault(key.prompt.id, []).append(score.value)
        for name, part in ((n, v) for score in row for n, v in score.parts.items()):
            parts.setdefault(name, []).append(part)
    if not by_prompt:
        raise RewardError("no held-out sample could be scored", where="data.heldout")
    by_reward: Metrics = {}
    for name, values in of_rewards.items():
        by_reward[name], by_reward[f"{name}_standard_error"] = _mean(values)
    mean, error = _mean(by_prompt)
    return Evaluation(
        mean=mean,
        standard_error=error,
        by_prompt={name: float(np.mean(values)) for name, values in by_prompt.items()},
        parts={name: float(np.mean(values)) for name, values in parts.items()},
        by_reward=by_reward,
    )


def _mean(by_prompt: dict[str, list[float]]) -> tuple[float, float]:
    """The mean over prompts of their means, and its standard error."""
    means = np.array([np.mean(values) for values in by_prompt.values()])
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
    return float(means.mean()), error


def showcase(
    config: RunConfig, workers: WorkerGroup, prompts: Sequence[Prompt], weights: str = "policy", most: int = 8
) -> list[Media]:
    """One video of each of the first prompts, brought here for people to look at."""
    keys = [SampleKey(prompt, 0) for prompt in prompts[:most]]
    batches = waves(keys, eval_sampling(config), config, EVAL_STEP, workers.dp_size, weights)
    return [workers.fetch(handle) for requests in batches for handle in workers.rollout(requests)]


def eval_sampling(config: RunConfig) -> Sampling:
    """Deterministic, with `eval.guidance` and `eval.steps`."""
    steps = config.eval.steps or config.sampling.steps
    return Sampling(steps, config.sampling.shift, config.eval.guidance, stochastic=False)
