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
from crossrl.protocols import Algorithm, RewardRuntime, WorkerGroup
from crossrl.rewards import Scored, labels
from crossrl.seeds import stream_seed
from crossrl.types import Advantages, Metrics, Prompt, RankStats, RolloutRequest, SampleKey, Sampling, UpdatePlan


@dataclass(slots=True)
class Run:
    """What an iteration works with."""

    config: RunConfig
    data: PromptCursor | None  # None for supervised training
    workers: WorkerGroup
    rewards: RewardRuntime
    algorithm: Algorithm
    lr_scale: float = 1.0  # what the guard has made of the learning rate
    skip_above: float | None = None  # and the gradient norm at which it wants a step skipped


def run_iteration(run: Run, step: int) -> Metrics:
    """Draw B x G samples, score them, and make `batch.updates` optimizer steps on them."""
    config, start = run.config, time.monotonic()

    drawn = draw(run, step, run.data.batch_at(step))
    advantages = run.algorithm.advantages(drawn.scores, drawn.valid)
    refilled = 0
    for _ in range(config.batch.refill):  # replace the groups that teach nothing
        live = advantages.keep.any(axis=1)
        fresh = run.data.further(step, [g[0].prompt for g in drawn.groups], int((~live).sum()), run.workers.dp_size)
        if not fresh:
            break
        drawn = drawn.replaced(live, draw(run, step, fresh))
        advantages = run.algorithm.advantages(drawn.scores, drawn.valid)
        refilled += len(fresh)
    seen = time.monotonic()

    plans = update_plans(drawn, advantages, run, step)
    stats = [run.workers.update(plan) for plan in plans]

    seconds = {"time/rollout_and_reward_s": seen - start, "time/update_s": time.monotonic() - seen}
    groups_metrics = {f"reward/{name}": value for name, value in advantages.metrics.items()}
    groups_metrics["reward/refilled"] = float(refilled)
    rollout = rollout_metrics(drawn.scored, config, seen - start, run.workers.dp_size)
    return rollout | groups_metrics | update_metrics(stats) | seconds


@dataclass(slots=True)
class Drawn:
    """Groups of samples (all of a prompt's), the data-parallel rank that holds each, and what the rewards say."""

    groups: list[list[SampleKey]]
    owners: list[int]
    scored: list[Scored]
    scores: np.ndarray  # [B, G, R], NaN where a reward failed
    valid: np.ndarray  # [B, G]

    def replaced(self, live: np.ndarray, fresh: Drawn) -> Drawn:
        """The live groups and then as many fresh ones as there is room for; dead ones only if those run out."""
        order = [*np.flatnonzero(live), *range(len(live), len(live) + len(fresh.groups)), *np.flatnonzero(~live)]
        order = order[: len(live)]
        groups, owners = self.groups + fresh.groups, self.owners + fresh.owners
        return Drawn(
            groups=[groups[b] for b in order],
            owners=[owners[b] for b in order],
            scored=self.scored + fresh.scored,
            scores=np.concatenate([self.scores, fresh.scores])[order],
            valid=np.concatenate([self.valid, fresh.valid])[order],
        )


def draw(run: Run, step: int, prompts: Sequence[Prompt]) -> Drawn:
    """`batch.samples` samples of each prompt, scored while later ones are drawn; `RewardError` if too many fail."""
    config, dp = run.config, run.workers.dp_size
    groups = [[SampleKey(prompt, g) for g in range(config.batch.samples)] for prompt in prompts]
    keys = [key for group in groups for key in group]
    how = Sampling(config.sampling.steps, config.sampling.shift, config.sampling.guidance)
    weights = "policy" if run.algorithm.needs.old is None else "old"
    futures = []
    for requests in waves(keys, how, config, step, dp, weights):
        futures += [run.rewards.submit(handle) for handle in run.workers.rollout(requests)]
    scored = run.rewards.collect(futures)
    scores, valid = as_arrays(scored, groups, len(config.rewards))
    if (bad := 1.0 - valid.mean()) > config.reward_runtime.max_bad_fraction:
        reasons = "; ".join([p for s in scored for p in s.problems][:3])
        raise RewardError(
            f"{bad:.0%} of the samples of step {step} could not be scored: {reasons}", where="reward_runtime"
        )
    return Drawn(groups, [b * dp // len(groups) for b in range(len(groups))], scored, scores, valid)


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


def update_plans(drawn: Drawn, advantages: Advantages, run: Run, step: int) -> Iterator[UpdatePlan]:
    """The optimizer steps of one iteration: each takes an equal, randomly drawn part of every group.

    The parts depend on (seed, step, prompt) alone, so they are the same at any world size.
    """
    seed, updates = run.config.seed, run.config.batch.updates
    parts: list[list[tuple[int, int]]] = [[] for _ in range(updates)]
    for b, group in enumerate(drawn.groups):
        kept = np.flatnonzero(advantages.keep[b])
        rng = np.random.default_rng(stream_seed(seed, step, group[0].prompt.id, "minibatch"))
        for place, g in enumerate(rng.permutation(kept)):
            parts[(place + b) % updates].append((b, int(g)))
    parts = [part for part in parts if part]
    for number, part in enumerate(parts, start=1):
        per_rank = np.bincount([drawn.owners[b] for b, _ in part])
        values = [advantages.values[b, g].tolist() for b, g in part]
        yield UpdatePlan(
            step=step,
            seed=seed,
            keys=tuple(drawn.groups[b][g] for b, g in part),
            advantages=tuple(tuple(v) if isinstance(v, list) else v for v in values),
            samples_per_rank=int(per_rank.max()),
            last=number == len(parts),
            lr_scale=run.lr_scale,
            skip_above=run.skip_above,
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


def rollout_metrics(scored: Sequence[Scored], config: RunConfig, seconds: float, dp_size: int) -> Metrics:
    """Means of each reward and its named parts, of what the videos look like; stage seconds, summed over waves.

    Of the time that drawing and scoring would take one after the other, `seconds` is what they took side by side:
    `reward/overlap` is the saving over the most that could be saved, 1 if all of the shorter one was hidden.
    """
    parts: dict[str, list[float]] = {}
    for row in (row for s in scored for row in s.scores.values() if row is not None):
        for label, score in zip(labels(config.rewards), row, strict=True):
            for name, value in {**score.parts, label: score.value}.items():
                parts.setdefault(f"reward/{name}", []).append(value)
    stats: Metrics = {}
    for name in {n for s in scored for n in s.stats}:
        reduce = max if name.endswith("_bytes") else sum
        stats[f"rollout/{name}"] = reduce(s.stats.get(name, 0.0) for s in scored)
    sizes = [len(s.scores) for s in scored]
    for name in scored[0].video:
        stats[f"video/{name}"] = float(np.average([s.video[name] for s in scored], weights=sizes))
    drawing = sum(v for name, v in stats.items() if name.endswith("_s")) / dp_size
    scoring = sum(s.seconds for s in scored) / config.reward_runtime.workers
    stats["reward/overlap"] = float(np.clip((drawing + scoring - seconds) / min(drawing, scoring), 0, 1))
    stats |= {"reward/seconds": sum(s.seconds for s in scored), "reward/failed": sum(len(s.problems) for s in scored)}
    return {name: float(np.mean(values)) for name, values in parts.items()} | stats


def update_metrics(stats: Sequence[Sequence[RankStats]]) -> Metrics:
    """Means over the optimizer steps of the sums over ranks; maxima over all, and the first step's on their own."""
    if not stats:
        return {"update/optimizer_steps": 0.0}
    out: Metrics = {"update/optimizer_steps": float(len(stats))}
    for name in stats[0][0].sums:
        out[f"update/{name}"] = float(np.mean([sum(rank.sums[name] for rank in ranks) for ranks in stats]))
    pulls = [name for name in out if name.startswith("update/pull_")]
    if total := sum(out[name] for name in pulls):
        out |= {name: out[name] / total for name in pulls}  # each bin's share
    for name in stats[0][0].maxima:
        out[f"update/{name}"] = max(rank.maxima[name] for ranks in stats for rank in ranks)
        out[f"update/first_{name}"] = max(rank.maxima[name] for rank in stats[0])
    for name in stats[0][0].scalars:
        reduce = sum if name.endswith("_s") or name == "skipped" else np.mean
        values = [ranks[0].scalars[name] for ranks in stats]
        out[f"update/{name}"] = float(reduce(values))
        if name == "grad_norm":
            out["update/grad_norm_max"] = float(np.max(values))  # NaN if one of them is
    out["update/forwards"] = sum(rank.scalars["forwards"] for ranks in stats for rank in ranks)
    return out
