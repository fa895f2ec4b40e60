"""What a GUI-agent run tells people: a line a step, success by task, and a page of episodes."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossrl.report import HELDOUT, REWARD, draw_curve, duration
from crossrl_gui_agent.episodes import page

log = logging.getLogger("crossrl.gui")

METRICS = "history.jsonl"  # verl's own file logger begins its file anew when a run goes on
_TASK = re.compile(r"val-(?:core|aux)/(?P<task>.+)/success/mean@1")
_SHOWN = (
    ("success", "gui/success", "{:.2f}"),
    ("live groups", "gui/groups_with_signal", "{:.0%}"),
    ("malformed", "gui/stop/malformed", "{:.0%}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("clip", "actor/pg_clipfrac", "{:.1%}"),
    ("rollout", "timing_s/gen", "{:.1f}s"),
    ("update", "timing_s/update_actor", "{:.1f}s"),
)


class Report:
    """Writes `history.jsonl`, `success.png` and `episodes.html` in the run's folder, and log lines.

    A resumed run goes on with what is there; a new one moves it, and the checkpoints, into a folder `aside-*`.
    """

    def __init__(self, folder: Path, resumed: bool) -> None:
        self.folder = folder
        self.history: dict[int, dict[str, float]] = {}
        self.curves: dict[str, list[tuple[int, float]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / METRICS).exists():
            self._read() if resumed else self._clear()

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """After a training step."""
        self._write(step, metrics)
        self.history[step] = {REWARD: metrics["gui/success"]}
        parts = [f"step {step}/{steps}"]
        parts += [f"{label} {form.format(metrics[key])}" for label, key, form in _SHOWN if key in metrics]
        parts.append(f"eta {duration(metrics['timing_s/step'] * (steps - step))}")
        log.info(" | ".join(parts))

    def evaluation(self, step: int, metrics: Mapping[str, float], swapped: bool) -> None:
        """After an evaluation with the weights of `step`; the page is written anew.

        `swapped`: the policy was shown screens of other episodes; that is no point of the curve.
        """
        found = {match["task"]: float(v) for k, v in metrics.items() if (match := _TASK.fullmatch(k))}
        if swapped:
            log.info("shown other screens: %s", " | ".join(f"{t} {v:.2f}" for t, v in sorted(found.items())))
            return
        self._write(step, metrics)
        for task, success in found.items():
            self._point(task, step, success)
        log.info("held out, step %d: %s", step, " | ".join(f"{t} {v:.2f}" for t, v in sorted(found.items())))
        path = page(self.folder, self.curves, self._draw())
        log.info("  %s", path)

    def _point(self, task: str, step: int, success: float) -> None:
        points = self.curves.setdefault(task, [])
        points[:] = [*(p for p in points if p[0] < step), (step, success)]

    def _read(self) -> None:
        for line in (self.folder / METRICS).read_text().splitlines():
            row = json.loads(line)
            if "gui/success" in row:
                self.history[row["step"]] = {REWARD: row["gui/success"]}
            for key, value in row.items():
                if match := _TASK.fullmatch(key):
                    self._point(match["task"], row["step"], value)

    def _clear(self) -> None:
        aside = self.folder / time.strftime("aside-%Y%m%d-%H%M%S")
        aside.mkdir()
        for name in (METRICS, "success.png", "episodes.html", "episodes", "checkpoints"):
            if (self.folder / name).exists():
                (self.folder / name).rename(aside / name)
        log.info("%s holds an earlier run: it moves to %s; resume=auto would go on", self.folder, aside.name)

    def _draw(self) -> str | None:
        evaluated = sorted({step for points in self.curves.values() for step, _ in points})
        mean = {s: np.mean([v for points in self.curves.values() for at, v in points if at == s]) for s in evaluated}
        if len(evaluated) < 2:
            return None
        rows = [dict(self.history.get(s, {})) for s in range(1, max(evaluated) + 1)]
        for s, value in mean.items():
            if s > 0:
                rows[s - 1][HELDOUT] = float(value)
        before = float(mean.get(0, math.nan))
        draw_curve(self.folder / "success.png", rows, before, float(mean[evaluated[-1]]))
        return "success.png"

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {k: float(v) for k, v in metrics.items() if np.isscalar(v) and math.isfinite(v)}
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({"step": step} | row) + "\n")
