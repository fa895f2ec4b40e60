"""The start-up gate: before step 1, what would spoil a long run is looked for on the real engine and rewards.

The ranks check themselves on a few samples of the first batch (`crossrl.probe`); here their findings are joined with
those of the rewards and of how samples are shared out, shown, kept in `gate.json`, and judged. docs/checks.md explains
every row. A run with the gate and one without are the same bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from crossrl.config import RunConfig
from crossrl.data import load_prompts
from crossrl.errors import GateError
from crossrl.loop import Run, waves
from crossrl.rewards import Scored
from crossrl.spy import random_streams_kept
from crossrl.types import Check, Metrics, Prompt, RankReport, RolloutRequest, SampleKey, Sampling

log = logging.getLogger(__name__)

PROMPTS, SAMPLES = 2, 2  # a rank's prompts and the samples of each, at most


def pass_gate(run: Run) -> list[Check]:
    """All checks, logged and written to `gate.json` in the run folder. Raises `GateError` if one failed."""
    start = time.monotonic()
    with random_streams_kept():
        prompts = _prompts(run)
        reports = run.workers.gate(_requests(run, prompts))
        media = [report.media for report in reports if report.media is not None]
        scored = [run.rewards.collect([run.rewards.submit(handle) for handle in media]) for _ in range(2)]
    checks = [*_joined([report.checks for report in reports]), *_rewards(*scored, run.config)]
    if run.data is not None:
        checks.insert(0, _groups_are_whole(run.config, run.data.batch_at(0), run.workers.dp_size))
    checks = _causes_first(checks)
    seconds, forwards = time.monotonic() - start, sum(report.forwards for report in reports)
    _write(Path(run.config.run_dir), checks, reports, seconds)
    for line in table(checks):
        log.info(line)
    counts = ", ".join(f"{sum(c.status == s for c in checks)} {s}" for s in ("ok", "warn", "fail", "skip"))
    log.info("start-up gate: %s; %.1f s, %d forwards (gate.json)", counts, seconds, forwards)
    refuse(checks)
    return checks


def refuse(checks: Sequence[Check]) -> None:
    """Raise one `GateError` that names the checks that failed and the cause of each."""
    failed = [c for c in checks if c.status == "fail"]
    if failed:
        raise GateError(
            "; ".join(f"{c.name}: {_number(c.value)} (limit {_number(c.limit)})" for c in failed),
            where="start-up gate",
            fix="\n  -> ".join([*(f"{c.name}: {c.cause}" for c in failed), "gate=false starts all the same"]),
        )


def table(checks: Sequence[Check]) -> list[str]:
    """One aligned line a check; the cause follows where it is not ok."""
    wide = max(len(c.name) for c in checks)
    lines = []
    for c in checks:
        lines.append(f"  {c.status:<4}  {c.name:<{wide}}  {_number(c.value):>10}  (limit {_number(c.limit)})")
        lines += [f"        -> {c.cause}"] if c.cause else []
    return lines


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _prompts(run: Run) -> list[Prompt]:
    """Different prompts of the first batch, and of the next if there are too few; of the held-out ones in SFT."""
    config = run.config
    if run.data is None:
        found = load_prompts(config.data.heldout or config.data.train, config.data.bad_rows)
    else:
        found = [prompt for step in range(PROMPTS) for prompt in run.data.batch_at(step)]
    return list({prompt.id: prompt for prompt in found}.values())


def _requests(run: Run, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    """A request for each data-parallel rank, all of one size. The samples are those of step 0."""
    config, dp, needs = run.config, run.workers.dp_size, run.algorithm.needs
    per_rank = min(PROMPTS, max(1, len(prompts) // dp))
    samples = min(SAMPLES, config.batch.samples)
    how = config.sampling
    return [
        RolloutRequest(
            keys=tuple(
                SampleKey(prompts[(rank * per_rank + p) % len(prompts)], g)
                for p in range(per_rank)
                for g in range(samples)
            ),
            sampling=Sampling(how.steps, how.shift, how.guidance, stochastic=not needs.clips),
            seed=config.seed,
            step=0,
            keep_trajectory=not needs.clips,
            weights="policy" if needs.old is None else "old",
        )
        for rank in range(dp)
    ]


def _joined(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """The worst of each check over the ranks; its cause says which rank."""
    order = ("ok", "skip", "warn", "fail")

    def badness(check: Check) -> tuple[int, float]:
        value = check.value if isinstance(check.value, float) else 0.0
        return order.index(check.status), math.inf if math.isnan(value) else abs(value)

    out = []
    for row in zip(*by_rank, strict=True):
        rank, worst = max(enumerate(row), key=lambda item: badness(item[1]))
        where = f" (rank {rank} of {len(row)})" if worst.cause and len(row) > 1 and worst.status != "skip" else ""
        out.append(Check(worst.name, worst.value, worst.limit, worst.status, worst.cause + where))
    return out


def _causes_first(checks: Sequence[Check]) -> list[Check]:
    """With values that are not finite, the checks that can only say NaN are skipped: the others name the cause."""
    if not any(c.status == "fail" and "finite" in c.name for c in checks):
        return list(checks)
    why = "not judged: values are not finite"
    hidden = [isinstance(c.value, float) and not math.isfinite(c.value) for c in checks]
    return [Check(c.name, c.value, c.limit, "skip", why) if h else c for c, h in zip(checks, hidden, strict=True)]


def _groups_are_whole(config: RunConfig, prompts: Sequence[Prompt], dp_size: int) -> Check:
    """The loop's own sharing of the first batch: every group complete, once, and on one rank."""
    keys = [SampleKey(prompt, g) for prompt in prompts for g in range(config.batch.samples)]
    places: dict[str, list[tuple[int, int]]] = {}
    for requests in waves(keys, Sampling(config.sampling.steps), config, 0, dp_size):
        for rank, request in enumerate(requests):
            for key in request.keys:
                places.setdefault(key.prompt.id, []).append((rank, key.index))
    whole = [
        len({rank for rank, _ in found}) == 1 and sorted(g for _, g in found) == list(range(config.batch.samples))
        for found in (places.get(prompt.id, []) for prompt in prompts)
    ]
    cause = f"a group is split or has samples missing: batch.prompts={len(prompts)} on {dp_size} ranks"
    ok = all(whole)
    return Check(
        "groups are whole", f"{sum(whole)} of {len(whole)}", "all", "ok" if ok else "fail", "" if ok else cause
    )


def _rewards(first: Sequence[Scored], second: Sequence[Scored], config: RunConfig) -> list[Check]:
    """The rewards score the gate's videos, twice the same, and tell them apart."""
    one, two = ({k: row for scored in part for k, row in scored.scores.items()} for part in (first, second))
    names = ", ".join(r.name for r in config.rewards)
    bad = sum(row is None for row in one.values()) / max(1, len(one))
    reasons = "; ".join([p for scored in first for p in scored.problems][:3])
    limit = config.reward_runtime.max_bad_fraction
    status = "ok" if bad == 0 else "warn" if bad <= limit else "fail"
    cause = f"{reasons}: see rewards and reward_runtime" if bad else ""
    checks = [Check("rewards score", f"{1 - bad:.0%}", f"{1 - limit:.0%}", status, cause)]
    both = [(a, two[k]) for k, a in one.items() if a is not None and two[k] is not None]
    if not both:
        return checks
    apart = max(abs(a.value - b.value) for left, right in both for a, b in zip(left, right, strict=True))
    cause = f"scoring the same video twice differs ({names}): the noise of a reward becomes advantage; seed it"
    checks.append(Check("rewards repeat", apart, 0.0, "ok" if apart == 0 else "warn", cause if apart else ""))
    values = [[score.value for score in column] for column in zip(*[row for row, _ in both], strict=True)]
    flat = [r.name for r, column in zip(config.rewards, values, strict=True) if len(column) > 1 and len({*column}) == 1]
    cause = f"all videos score alike with {', '.join(flat)}: nothing to learn from unless later samples differ"
    value = f"{len(values) - len(flat)} of {len(values)}"
    return [*checks, Check("rewards tell samples apart", value, "all", "warn" if flat else "ok", cause if flat else "")]


def _write(run_dir: Path, checks: Sequence[Check], reports: Sequence[RankReport], seconds: float) -> None:
    by_sigma: dict[float, list[Metrics]] = {}
    for row in (row for report in reports for row in report.by_sigma):
        by_sigma.setdefault(row["sigma"], []).append(row)
    ranks = [{"forwards": report.forwards, "seconds": report.seconds} for report in reports]
    joined = [_over_ranks(rows) for _, rows in sorted(by_sigma.items(), reverse=True)]
    run_dir.mkdir(parents=True, exist_ok=True)
    out = {"seconds": seconds, "checks": [asdict(c) for c in checks], "ratio_by_sigma": joined, "ranks": ranks}
    strict = json.loads(json.dumps(out), parse_constant=str)  # NaN is no JSON: "NaN"
    (run_dir / "gate.json").write_text(json.dumps(strict, indent=2))


def _over_ranks(rows: Sequence[Metrics]) -> Metrics:
    """The ratio at one noise level over all ranks' rows."""
    count = sum(row["rows"] for row in rows)
    bias = sum(row["rows"] * row["bias"] for row in rows) / count
    return {
        "sigma": rows[0]["sigma"],
        "rows": count,
        "ratio_deviation": max(row["ratio_deviation"] for row in rows),
        "bias": bias,
        "kappa": math.sqrt(max(0.0, -2 * bias)),
    }
