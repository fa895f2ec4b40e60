"""What the rules of the guard measure: each from the metrics of one iteration and what it remembers of earlier ones.

A measure returns a number, to compare with its rule's limit, and what it says in words; None where this iteration has
nothing for it to measure. What is not finite is the business of `not_finite` alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from crossrl.types import Metrics

NORMS, SURPRISES = 50, 100  # iterations that say what is normal for a gradient norm, and for the noise of the reward
FAST, SLOW = 0.3, 0.1  # weight of the newest value in an exponential average: a level now, a level held for a while
LEAK_QUARTER = 20  # iterations: memory must grow in four such periods in a row

Seen = tuple[float, str]
"""A rule's measure and its words."""


def _finite(metrics: Metrics, name: str) -> float | None:
    """The metric, or None if it is absent or not finite."""
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Median, and standard deviation by way of the median absolute deviation."""
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(v - median) for v in values)


def not_finite(metrics: Metrics) -> Seen:
    """How many metrics are NaN or infinite. A standard error is NaN where there is a single held-out prompt."""
    watched = ("reward/", "update/", "heldout/", "video/")
    bad = [
        name
        for name, value in metrics.items()
        if name.startswith(watched) and not name.endswith("standard_error") and not math.isfinite(value)
    ]
    shown = ", ".join(f"{name} = {metrics[name]}" for name in sorted(bad)[:3])
    return float(len(bad)), f"{len(bad)} metrics are not finite, steps with such gradients were skipped: {shown}"


def kl(metrics: Metrics) -> Seen | None:
    """`update/kl`: the distance from the reference, as the algorithm measures it."""
    value = _finite(metrics, "update/kl")
    return None if value is None else (value, f"update/kl is {value:.3g}")


def first_ratio(metrics: Metrics) -> Seen | None:
    """Before the first update of an iteration every ratio is 1, if rollout and training compute the same."""
    deviation = _finite(metrics, "update/first_ratio_deviation_max")
    return None if deviation is None else (deviation, f"update/first_ratio_deviation_max is {deviation:.2g}, not 0")


def log_ratio_bias(metrics: Metrics) -> Seen | None:
    """|mean log rho| over its root mean square: 0 if it scatters around 0, 1 if all of it leans to one side."""
    mean, kl = _finite(metrics, "update/log_ratio"), _finite(metrics, "update/approx_kl")
    if mean is None or not kl:
        return None
    bias = abs(mean) / math.sqrt(2 * kl)
    return bias, f"update/log_ratio {mean:.2g} is a bias of {bias:.2f} of its root mean square"


def clip_asymmetry(metrics: Metrics) -> Seen | None:
    """How many times as often ratios are clipped below as above, if that is more than 5 % of them."""
    low, high = _finite(metrics, "update/clip_low"), _finite(metrics, "update/clip_high")
    if low is None or high is None:
        return None
    times = low / max(high, 1e-3) if low > 0.05 else 0.0
    return times, f"ratios are clipped below {low:.1%}, above {high:.1%}: {times:.0f} times as often"


def zero_std(metrics: Metrics) -> Seen | None:
    """The fraction of groups in which all rewards are equal."""
    part = _finite(metrics, "reward/zero_std")
    return None if part is None else (part, f"{part:.0%} of the groups have no spread and teach nothing")


class GradNorm:
    """Robust z of the logarithm of an iteration's largest norm, against the last ones that were within the limit.

    A standard deviation below 0.2 counts as 0.2: at a limit of 6, nothing below 3.3 times the median is an outlier.
    `patience` outliers in a row are taken for the new normal, so that no shift can lock the run up in skipped steps.
    """

    def __init__(self, limit: float | None, patience: int, warmup: int) -> None:
        self.limit, self.patience, self.warmup = limit, patience, warmup
        self.normal: deque[float] = deque(maxlen=NORMS)
        self.outliers: list[float] = []

    @property
    def largest(self) -> float | None:
        """The largest norm within the limit; None while too few are known."""
        if len(self.normal) < self.warmup or self.limit is None:
            return None
        median, sd = self._spread()
        return math.exp(median + self.limit * sd)

    def _spread(self) -> tuple[float, float]:
        median, sd = _robust(self.normal)
        return median, max(sd, 0.2)

    def __call__(self, metrics: Metrics) -> Seen | None:
        norm = _finite(metrics, "update/grad_norm_max")
        if not norm:
            return None
        known, z, median = len(self.normal) >= self.warmup, 0.0, 0.0
        if known:
            median, sd = self._spread()
            z = (math.log(norm) - median) / sd
        if self.limit is None or z <= self.limit:
            self.normal.append(math.log(norm))
            self.outliers.clear()
        else:
            self.outliers.append(math.log(norm))
            if len(self.outliers) == self.patience:
                self.normal = deque(self.outliers, maxlen=NORMS)
                self.outliers = []
        return z, f"update/grad_norm_max {norm:.3g} is {z:.1f} robust deviations over the median {math.exp(median):.3g}"


class RewardDrop:
    """How far the training reward is below the best it held for a while, in robust deviations of a single iteration's.

    The noise is that of rewards about the level held before them; the newest, which may be the trouble, are left out.
    It counts as a twentieth of all that was gained at least: at a limit of 4, losing less than a fifth is no collapse.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup, self.count = warmup, 0
        self.surprises: deque[float] = deque(maxlen=SURPRISES)
        self.smooth = self.held = self.first = self.best = 0.0

    def __call__(self, metrics: Metrics) -> Seen | None:
        if (reward := _finite(metrics, "reward/mean")) is None:
            return None
        self.count += 1
        if self.count > 1:
            self.surprises.append(reward - self.held)
        self.smooth += (reward - self.smooth) * max(FAST, 1 / self.count)
        self.held += (reward - self.held) * max(SLOW, 1 / self.count)
        if self.count <= 1 / FAST:  # a mean of too few to be anyone's best
            self.first = self.best = self.held
        self.best = max(self.best, self.held)
        if self.count < self.warmup:
            return None
        sd = max(
            _robust(list(self.surprises)[: -(self.warmup // 2)])[1],
            0.05 * (self.best - self.first),
            1e-3 * abs(self.best),
            1e-9,
        )
        fall = (self.best - self.smooth) / sd
        return (
            fall,
            f"reward/mean, smoothed, is {self.smooth:.3g}: {fall:.1f} deviations below its best {self.best:.3g}",
        )


class HeldoutDrop:
    """How far the held-out reward is below the best of two evaluations in a row, in standard errors over prompts."""

    def __init__(self) -> None:
        self.best, self.last = -math.inf, -math.inf

    def __call__(self, metrics: Metrics) -> Seen | None:
        reward, error = _finite(metrics, "heldout/reward"), _finite(metrics, "heldout/standard_error")
        if reward is None or error is None:
            return None
        self.best, self.last = max(self.best, min(reward, self.last)), reward
        if math.isinf(self.best):
            return None
        fall = (self.best - reward) / max(error, 1e-3 * abs(self.best), 1e-9)
        return fall, f"heldout/reward {reward:.3g} is {fall:.1f} standard errors below its best {self.best:.3g}"


class Hacking:
    """How far a gold reward is below its best, in standard errors, while the trained one is above what it was then.

    Both are measured on the same held-out videos; the best is that of two evaluations in a row.
    """

    def __init__(self, gold: Sequence[str]) -> None:
        self.gold = gold
        self.best: dict[str, tuple[float, float]] = {}  # by name: the gold reward, and the trained one with it
        self.last: dict[str, float] = {}

    def __call__(self, metrics: Metrics) -> Seen | None:
        trained = _finite(metrics, "heldout/reward")
        seen: list[Seen] = []
        for name in self.gold:
            value = _finite(metrics, f"heldout/{name}")
            error = _finite(metrics, f"heldout/{name}_standard_error")
            if trained is None or value is None or error is None:
                continue
            held, self.last[name] = min(value, self.last.get(name, value)), value
            if name not in self.best or held > self.best[name][0]:
                self.best[name] = (held, trained)
            best, then = self.best[name]
            fall = (best - value) / max(error, 1e-3 * abs(best), 1e-9) if trained > then else 0.0
            words = f"heldout/{name} fell from {best:.3g} to {value:.3g}, {fall:.1f} standard errors"
            seen.append((fall, f"{words}, while heldout/reward rose from {then:.3g} to {trained:.3g}"))
        return max(seen, default=None)


class Diversity:
    """What part of its starting value the smoothed spread of rewards within groups has lost."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.start, self.smooth = warmup, [], 0.0

    def __call__(self, metrics: Metrics) -> Seen | None:
        if (spread := _finite(metrics, "reward/within_group_std")) is None:
            return None
        if len(self.start) < self.warmup:
            self.start.append(spread)
            self.smooth = statistics.median(self.start)
            return None
        self.smooth += (spread - self.smooth) * FAST
        start = statistics.median(self.start)
        lost = 1 - self.smooth / start if start > 0 else 0.0
        return lost, f"reward/within_group_std fell from {start:.3g} to {self.smooth:.3g}, {lost:.0%} of it"


class Drift:
    """The largest robust z of what the videos look like, against the first iterations.

    A standard deviation counts as 5 % of the median at least: at a limit of 8, a change by less than 40 % is no drift.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.start: dict[str, list[float]] = {}
        self.usual: dict[str, tuple[float, float]] = {}

    def __call__(self, metrics: Metrics) -> Seen | None:
        seen: list[Seen] = []
        for name in (name for name in metrics if name.startswith("video/")):
            start = self.start.setdefault(name, [])
            if (value := _finite(metrics, name)) is None:
                continue
            if len(start) < self.warmup:
                start.append(value)
                self.usual[name] = _robust(start)
                continue
            median, sd = self.usual[name]
            z = abs(value - median) / max(sd, 0.05 * abs(median), 1e-9)
            seen.append((z, f"{name} is {value:.3g}: {z:.1f} robust deviations from {median:.3g} at the start"))
        return max(seen, default=None)


class Leak:
    """What part of the workers' peak memory comes on top in 1000 iterations, by the slowest quarter of a window.

    A single step up fills one quarter only; a leak fills all. A new process starts the window anew.
    """

    def __init__(self) -> None:
        self.peaks: deque[float] = deque(maxlen=4 * LEAK_QUARTER + 1)

    def __call__(self, metrics: Metrics) -> Seen | None:
        if (peak := _finite(metrics, "rollout/peak_rss_bytes")) is None:
            return None
        if self.peaks and peak < self.peaks[-1]:
            self.peaks.clear()
        self.peaks.append(peak)
        if len(self.peaks) < 4 * LEAK_QUARTER + 1:
            return None
        quarters = pairwise(list(self.peaks)[::LEAK_QUARTER])
        growth = min(after - before for before, after in quarters) / LEAK_QUARTER * 1000 / peak
        return growth, f"rollout/peak_rss_bytes {peak / 2**30:.2f} GiB grows by {growth:.0%} in 1000 iterations"
