"""One iteration of RL for diffusion models, on one screen.

    prompts -> rollout -> rewards -> advantages -> update -> metrics

`workers` are Ray actors in a job and one engine in this process in a test; `rewards` likewise. Trajectories stay on
the worker that drew them, videos go to the rewards by reference, and only what fits in a log line comes back here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crossrl.config import RunConfig
from crossrl.data import PromptCursor
from crossrl.errors import RewardError
from crossrl.noise import stream_seed
from crossrl.protocols import Algorithm, RewardRuntime, WorkerGroup
from crossrl.rewards import Scored
from crossrl.types import Advantages, Metrics, Prompt, RankStats, RolloutRequest, SampleKey, Sampling, UpdatePlan


@dataclass(slots=True)
class Run:
    """What an iteration works with."""

    config: RunConfig
    data: PromptCursor | None  # None for supervised training
    workers: WorkerGroup
    rewards: RewardRuntime
    algorithm: Algorithm


def run_iteration(run: Run, step: int) -> Metrics:
    """Draw B x G samples with the policy, score them, and make `batch.updates` optimizer steps on them."""
    config, start = run.config, time.monotonic()
    batch, sampling = config.batch, config.sampling

    prompts = run.data.batch_at(step)
    groups = [[SampleKey(prompt, g) for g in range(batch.samples)] for prompt in prompts]

    keys = [key for group in groups for key in group]
    how = Sampling(sampling.steps, sampling.shift, sampling.guidance)
    futures = []
    for requests in waves(keys, how, config, step, run.workers.dp_size):
        futures += [run.rewards.submit(handle) for handle in run.workers.rollout(requests)]

    scored = run.rewards.collect(futures)  # scoring overlaps the rollout of later waves
    scores, valid = as_arrays(scored, groups, len(config.rewards))
    if (bad := 1.0 - valid.mean()) > config.reward_runtime.max_bad_fraction:
        reasons = "; ".join([p for s in scored for p in s.problems][:3])
        raise RewardError(
            f"{bad:.0%} of the samples of step {step} could not be scored: {reasons}", where="reward_runtime"
        )
    drawn = time.monotonic()

    advantages = run.algorithm.advantages(scores, valid)
    stats = [run.workers.update(plan) for plan in update_plans(groups, advantages, config, step, run.workers.dp_size)]

    seconds = {"time/rollout_and_reward_s": drawn - start, "time/update_s": time.monotonic() - drawn}
    groups_metrics = {f"reward/{name}": value for name, value in advantages.metrics.items()}
    return rollout_metrics(scored) | groups_metrics | update_metrics(stats) | seconds


def sft_iteration(run: Run, step: int) -> Metrics:
    """One optimizer step of supervised training on `batch.prompts` captioned clips."""
    config, start = run.config, time.monotonic()
    order = np.random.default_rng(stream_seed(config.seed, step, "clips"))
    clips = order.choice(config.data.sft_clips, config.batch.prompts, replace=False)
    run.workers.load_clips(step, config.data.sft, [int(i) for i in clips])
    keys = tuple(SampleKey(Prompt(f"clip/{i}", ""), 0) for i in clips)
    plan = UpdatePlan(step, config.seed, keys, (0.0,) * len(keys), len(keys) // run.workers.dp_size)
    return update_metrics([run.workers.update(plan)]) | {"time/update_s": time.monotonic() - start}


def waves(
    keys: Sequence[SampleKey], how: Sampling, config: RunConfig, step: int, dp_size: int, weights: str = "policy"
) -> Iterator[list[RolloutRequest]]:
    """Requests, one a data-parallel rank, of `batch.rollout_micro` samples each; whole groups stay on one rank.

    Evaluation may bring a number of keys that does not divide: the last ones are drawn twice, to keep ranks in step.
    """
    share = -(-len(keys) // dp_size)
    padded = [*keys, *[keys[-1]] * (share * dp_size - len(keys))]
    for start in range(0, share, config.batch.rollout_micro):
        stop = min(start + config.batch.rollout_micro, share)
        yield [
            RolloutRequest(
                keys=tuple(padded[r * share + start : r * share + stop]),
                sampling=how,
                seed=config.seed,
                step=step,
                keep_trajectory=how.stochastic,
                weights=weights,
            )
            for r in range(dp_size)
        ]


def update_plans(
    groups: Sequence[Sequence[SampleKey]], advantages: Advantages, config: RunConfig, step: int, dp_size: int
) -> Iterator[UpdatePlan]:
    """The optimizer steps of one iteration: each takes an equal, randomly drawn part of every group.

    The parts depend on (seed, step, prompt) alone, so they are the same at any world size.
    """
    updates = config.batch.updates
    parts: list[list[tuple[int, int]]] = [[] for _ in range(updates)]
    for b, group in enumerate(groups):
        kept = np.flatnonzero(advantages.keep[b])
        rng = np.random.default_rng(stream_seed(config.seed, step, group[0].prompt.id, "minibatch"))
        for place, g in enumerate(rng.permutation(kept)):
            parts[(place + b) % updates].append((b, int(g)))
    groups_per_rank = len(groups) // dp_size
    for part in filter(None, parts):
        per_rank = np.bincount([b // groups_per_rank for b, _ in part], minlength=dp_size)
        yield UpdatePlan(
            step=step,
            seed=config.seed,
            keys=tuple(groups[b][g] for b, g in part),
            advantages=tuple(float(advantages.values[b, g]) for b, g in part),
            samples_per_rank=int(per_rank.max()),
        )


def as_arrays(
    scored: Sequence[Scored], groups: Sequence[Sequence[SampleKey]], n_rewards: int
) -> tuple[np.ndarray, np.ndarray]:
    """(scores [B, G, R] with NaN where a reward failed, valid [B, G])."""
    found = {key: row for s in scored for key, row in s.scores.items()}
    nothing = (float("nan"),) * n_rewards
    rows = [[nothing if found[k] is None else tuple(s.value for s in found[k]) for k in group] for group in groups]
    scores = np.array(rows, dtype=np.float64)
    return scores, np.isfinite(scores).all(axis=-1)


def rollout_metrics(scored: Sequence[Scored]) -> Metrics:
    """Means of the rewards' named parts, dropped samples, and the workers' stage seconds (summed over waves)."""
    parts: dict[str, list[float]] = {}
    for row in (row for s in scored for row in s.scores.values() if row is not None):
        for name, value in ((n, v) for score in row for n, v in score.parts.items()):
            parts.setdefault(f"reward/{name}", []).append(value)
    stats: Metrics = {}
    for name in {n for s in scored for n in s.stats}:
        reduce = max if name.endswith("_bytes") else sum
        stats[f"rollout/{name}"] = reduce(s.stats.get(name, 0.0) for s in scored)
    stats |= {"reward/seconds": sum(s.seconds for s in scored), "reward/failed": sum(len(s.problems) for s in scored)}
    return {name: float(np.mean(values)) for name, values in parts.items()} | stats


def update_metrics(stats: Sequence[Sequence[RankStats]]) -> Metrics:
    """Means over the optimizer steps of the sums over ranks; maxima over all, and the first step's on their own."""
    if not stats:
        return {"update/optimizer_steps": 0.0}
    out: Metrics = {"update/optimizer_steps": float(len(stats))}
    for name in stats[0][0].sums:
        out[f"update/{name}"] = float(np.mean([sum(rank.sums[name] for rank in ranks) for ranks in stats]))
    for name in stats[0][0].maxima:
        out[f"update/{name}"] = max(rank.maxima[name] for ranks in stats for rank in ranks)
        out[f"update/first_{name}"] = max(rank.maxima[name] for rank in stats[0])
    for name in stats[0][0].scalars:
        reduce = sum if name.endswith("_s") or name == "skipped" else np.mean
        out[f"update/{name}"] = float(reduce([ranks[0].scalars[name] for ranks in stats]))
    out["update/forwards"] = sum(rank.scalars["forwards"] for ranks in stats for rank in ranks)
    return out
