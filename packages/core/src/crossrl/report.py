"""What a run tells people: a line a step, a curve, a summary that says whether it learned. Loads no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from crossrl.config import RunConfig
from crossrl.media import FAINT, INK, PAPER, font
from crossrl.registry import versions
from crossrl.types import Metrics

if TYPE_CHECKING:
    from crossrl.evaluate import Evaluation

LEAST_GAIN = 0.05  # of held-out reward that counts as learning
REWARD, HELDOUT = "reward/mean", "heldout/reward"
FIRST_RATIO = "update/first_ratio_deviation_max"
PICTURES = ("reward.png", "before_after.png", "videos/before.gif", "videos/after.gif")
BLUE, ORANGE = (31, 90, 180), (215, 95, 20)


@dataclass(slots=True)
class Summary:
    """`summary.json`. Rewards are means over the held-out prompts; `seconds_per_stage` means over the iterations.

    `learned`: the held-out reward rose by at least `LEAST_GAIN` (0.05, for rewards in [0, 1]) and by more than twice
    `gain_standard_error`, the standard error over prompts of the paired differences after - before. With a single
    held-out prompt there is no standard error (NaN) and nothing counts as learned.
    """

    heldout_reward_before: float
    heldout_reward_after: float
    gain_standard_error: float
    learned: bool
    steps: int
    seconds: float
    seconds_per_stage: Metrics
    max_abs_ratio_deviation_at_first_update: float | None  # over all iterations; None if no ratio was measured
    peak_rss_bytes: float
    dropped_samples: int
    skipped_updates: int
    seed: int
    backend: str
    algorithm: str
    workers: int
    rewards: list[float] = field(default_factory=list)  # training reward by iteration
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def progress_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """One line: step, reward, spread within groups, ratio, clipped fraction, seconds by stage, time to go."""
    clipped = [metrics[key] for key in ("update/clip_high", "update/clip_low") if key in metrics]
    metrics = {**metrics, "clip": sum(clipped)} if clipped else metrics
    shown = (
        ("reward", REWARD, "{:.3f}"),
        ("spread", "reward/within_group_std", "{:.3f}"),
        ("loss", "update/loss", "{:.4f}"),
        ("ratio", "update/ratio", "{:.4f}"),
        ("clip", "clip", "{:.1%}"),
        ("heldout", HELDOUT, "{:.3f}"),
    )
    parts = [f"step {step}/{steps}"]
    parts += [f"{label} {form.format(metrics[key])}" for label, key, form in shown if key in metrics]
    stages = {key[5:-2]: s for key, s in metrics.items() if key.startswith("time/") and key.endswith("_s")}
    total = stages.pop("step", None)
    stages.pop("elapsed", None)
    parts += [f"{name.replace('_', ' ')} {seconds:.1f}s" for name, seconds in stages.items()]
    if total is not None:
        parts.append(f"eta {duration(total * (steps - step))}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """1h02m, 3m07s or 9s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def summarize(
    config: RunConfig,
    history: Sequence[Metrics],
    *,
    before: Evaluation,
    after: Evaluation,
    seconds: float,
    workers: int,
    **extra: Any,
) -> Summary:
    """The summary of a run from its per-iteration metrics and the evaluations around it; `extra` is kept as it is."""
    error = _standard_error(before.by_prompt, after.by_prompt)
    gain = after.mean - before.mean
    ratios = [m[FIRST_RATIO] for m in history if FIRST_RATIO in m]
    memory = [m["rollout/peak_rss_bytes"] for m in history if "rollout/peak_rss_bytes" in m]
    return Summary(
        heldout_reward_before=before.mean,
        heldout_reward_after=after.mean,
        gain_standard_error=error,
        learned=bool(gain >= LEAST_GAIN and gain > 2 * error),
        steps=len(history),
        seconds=seconds,
        seconds_per_stage=_stage_means(history),
        max_abs_ratio_deviation_at_first_update=max(ratios, default=None),
        peak_rss_bytes=max([*memory, extra.get("driver_peak_rss_bytes", 0)]),
        dropped_samples=int(sum(m.get("reward/failed", 0) for m in history)),
        skipped_updates=int(sum(m.get("update/skipped", 0) for m in history)),
        seed=config.seed,
        backend=config.backend,
        algorithm=config.algorithm["name"],
        workers=workers,
        rewards=[m[REWARD] for m in history if REWARD in m],
        versions=dict(versions()),
        extra=extra,
    )


def _standard_error(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    gains = [after[name] - before[name] for name in before if name in after]
    return float(np.std(gains, ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else math.nan


def _stage_means(history: Sequence[Metrics]) -> Metrics:
    """Seconds by stage. `time/` is the clock on the wall; the others are sums over the workers, which run at once."""
    found: dict[str, list[float]] = {}
    for name, value in ((n, v) for metrics in history for n, v in metrics.items()):
        if (name.endswith("_s") or name == "reward/seconds") and name != "time/elapsed_s":
            found.setdefault(name.removesuffix("_s"), []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def write_summary(run_dir: str | Path, summary: Summary) -> Path:
    """Write `summary.json`, replacing an older one at once; what is not a finite number becomes null."""
    path = Path(run_dir) / "summary.json"
    tmp = path.with_suffix(".json.tmp")
    tmp.write_text(json.dumps(_plain(dataclasses.asdict(summary)), indent=2, allow_nan=False) + "\n")
    tmp.replace(path)
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def closing_text(summary: Summary, run_dir: str | Path) -> str:
    """For a person: whether it learned and why that is said, how the reward went, where to look."""
    gain = summary.heldout_reward_after - summary.heldout_reward_before
    lines = [
        f"held-out reward {summary.heldout_reward_before:.3f} -> {summary.heldout_reward_after:.3f} ({gain:+.3f}, "
        f"standard error {summary.gain_standard_error:.3f}) in {summary.steps} steps, {duration(summary.seconds)}",
        _verdict(summary, gain),
    ]
    finite = [r for r in summary.rewards if math.isfinite(r)]
    if finite:
        lines.append(f"training reward {min(finite):.3f} [{sparkline(summary.rewards)}] {max(finite):.3f}")
    if summary.dropped_samples or summary.skipped_updates:
        lines.append(f"{summary.dropped_samples} samples dropped, {summary.skipped_updates} updates skipped (see log)")
    lines += [f"  {Path(run_dir) / name}" for name in ("summary.json", *PICTURES) if (Path(run_dir) / name).exists()]
    return "\n".join(lines)


def _verdict(summary: Summary, gain: float) -> str:
    if summary.learned:
        return f"It learned: the gain is at least {LEAST_GAIN} and more than twice its standard error."
    if math.isnan(summary.gain_standard_error):
        return "Whether it learned cannot be told: that takes at least two held-out prompts."
    if gain < LEAST_GAIN:
        return f"It did not learn: the gain is below {LEAST_GAIN}."
    return "It did not learn for certain: the gain is within twice its standard error; use more held-out prompts."


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The course of `values` in at most `width` ASCII characters, low "_" to high "#", "?" where not finite."""
    ramp = "_.-=+*%#"
    if not values:
        return ""
    parts = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    finite = means[np.isfinite(means)]
    low, spread = (finite.min(), np.ptp(finite) or 1.0) if len(finite) else (0.0, 1.0)
    return "".join(ramp[int((m - low) / spread * (len(ramp) - 1) + 0.5)] if np.isfinite(m) else "?" for m in means)


def draw_curve(path: str | Path, history: Sequence[Metrics], before: float, after: float) -> None:
    """PNG of reward against step: the training reward as a line, held-out evaluations as points joined by a line."""
    train = [(i, m[REWARD]) for i, m in enumerate(history, start=1) if REWARD in m]
    middle = [(i, m[HELDOUT]) for i, m in enumerate(history, start=1) if HELDOUT in m]
    heldout = [(0, before), *middle, (len(history), after)]
    _Plot(train, heldout, max(1, len(history))).save(path)


class _Plot:
    """Reward against step, drawn at twice the size and reduced, for smooth lines."""

    WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, SCALE = 720, 400, 64, 20, 40, 52, 2

    def __init__(self, train: list[tuple[int, float]], heldout: list[tuple[int, float]], steps: int) -> None:
        values = [v for _, v in train + heldout if math.isfinite(v)] or [0.0]
        self.ticks = _ticks(min(values), max(values))
        self.steps = steps
        self.image = Image.new("RGB", (self.WIDTH * self.SCALE, self.HEIGHT * self.SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self._axes()
        self._line(train, BLUE)
        self._line(heldout, ORANGE)
        for point in heldout:
            if math.isfinite(point[1]):
                self.draw.circle(self._at(*point), 5 * self.SCALE, fill=ORANGE)
        legend = (("training", BLUE, train), ("held out", ORANGE, heldout))
        for i, (label, colour, points) in enumerate(legend):
            if points:
                x = self.LEFT + 110 * i
                self.draw.rectangle(self._pixels(x, 17, x + 18, 21), fill=colour)
                self._text(x + 24, 19, label, "lm")

    def save(self, path: str | Path) -> None:
        """Write the PNG."""
        self.image.reduce(self.SCALE).save(path)

    def _pixels(self, *numbers: float) -> tuple[float, ...]:
        return tuple(n * self.SCALE for n in numbers)

    def _at(self, step: float, value: float) -> tuple[float, ...]:
        low, high = self.ticks[0], self.ticks[-1]
        x = self.LEFT + step / self.steps * (self.WIDTH - self.LEFT - self.RIGHT)
        y = self.HEIGHT - self.BOTTOM - (value - low) / (high - low) * (self.HEIGHT - self.TOP - self.BOTTOM)
        return self._pixels(x, y)

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.draw.text(self._pixels(x, y), text, fill=INK, font=font(13 * self.SCALE), anchor=anchor)

    def _axes(self) -> None:
        digits = max(0, -math.floor(math.log10(self.ticks[1] - self.ticks[0])))
        for value in self.ticks:
            x, y = self._at(0, value)
            self.draw.line([(x, y), self._at(self.steps, value)], fill=(225, 225, 225), width=self.SCALE)
            self._text(x / self.SCALE - 6, y / self.SCALE, f"{value:.{digits}f}", "rm")
        for step in _ticks(0, self.steps, whole=True):
            if step <= self.steps:
                x, y = self._at(step, self.ticks[0])
                self.draw.line([(x, y), (x, y + 4 * self.SCALE)], fill=FAINT, width=self.SCALE)
                self._text(x / self.SCALE, y / self.SCALE + 6, f"{step:.0f}", "ma")
        low, high = self.ticks[0], self.ticks[-1]
        self.draw.line([self._at(0, high), self._at(0, low), self._at(self.steps, low)], fill=FAINT, width=self.SCALE)
        self._text(self.WIDTH / 2, self.HEIGHT - 8, "step", "ms")
        self._text(6, 19, "reward", "lm")

    def _line(self, points: list[tuple[int, float]], colour: tuple[int, int, int]) -> None:
        places = [self._at(*point) for point in points if math.isfinite(point[1])]
        if len(places) > 1:
            self.draw.line(places, fill=colour, width=2 * self.SCALE, joint="curve")


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to nine round numbers that span [low, high]."""
    span = max(high - low, 0.02 * max(abs(high), 1.0))  # a flat curve shall look flat
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 7)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]
