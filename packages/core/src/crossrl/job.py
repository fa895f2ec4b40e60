"""A whole run around the loop: resume, evaluate, iterate, log, save, show."""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path

import numpy as np

from crossrl import media, report
from crossrl.checkpoint import Checkpoints, RunLock
from crossrl.config import RunConfig
from crossrl.data import PromptCursor, load_prompts
from crossrl.evaluate import Evaluation, evaluate, showcase
from crossrl.loop import Run, run_iteration, sft_iteration
from crossrl.protocols import Algorithm, RewardRuntime, WorkerGroup
from crossrl.types import Metrics, Prompt

log = logging.getLogger(__name__)

Track = Callable[[Metrics, int], None]
"""(metrics, step) -> TensorBoard, JSONL, ...; verl's `Tracking.log`. Opened under the lock: it truncates."""


def train(
    config: RunConfig,
    workers: WorkerGroup,
    rewards: RewardRuntime,
    algorithm: Algorithm,
    open_track: Callable[[], Track],
) -> report.Summary | None:
    """Run from the first or the resumed step to the last; leaves pictures, checkpoints and `summary.json`.

    A file `STOP` in the run folder ends it after the current step with a checkpoint and no summary (None).
    """
    run_dir = Path(config.run_dir)
    with RunLock(run_dir):
        train_prompts = [] if algorithm.needs.clips else load_prompts(config.data.train, config.data.bad_rows)
        data = PromptCursor(train_prompts, config.batch.prompts, config.seed) if train_prompts else None
        heldout = load_prompts(config.data.heldout or config.data.train, config.data.bad_rows)
        run = Run(config, data, workers, rewards, algorithm)
        return _Job(run, heldout, Checkpoints(run_dir, config.checkpoint.keep), open_track()).train()


class _Job:
    """The state of a run: where it stands and what has been measured, all of it in every checkpoint."""

    def __init__(self, run: Run, heldout: Sequence[Prompt], checkpoints: Checkpoints, track: Track) -> None:
        self.run, self.heldout, self.checkpoints, self.track = run, heldout, checkpoints, track
        self.config, self.run_dir = run.config, Path(run.config.run_dir)
        self.weights = "ema" if self.config.model.ema is not None else "policy"
        self.step = 0
        self.before: Evaluation | None = None
        self.history: list[Metrics] = []  # one entry an iteration, what the logs got
        self.earlier_s = 0.0  # spent before this process took over
        self.start = time.monotonic()

    def train(self) -> report.Summary | None:
        self._resume()
        if self.step == 0:
            (self.run_dir / "config.json").write_text(self.config.model_dump_json(indent=2))
            self.before = self._evaluate()
            self._pictures("before")
            log.info("held-out reward before training: %.3f", self.before.mean)
        while self.step < self.config.steps:
            self._iterate()
            if (self.run_dir / "STOP").exists():
                self._save()
                log.info("stopped after step %d as asked, and saved; resume=auto goes on from there", self.step)
                return None
        after = self._evaluate()
        self._pictures("after")
        return self._finish(after)

    @property
    def seconds(self) -> float:
        """Spent on this run, earlier processes included."""
        return self.earlier_s + time.monotonic() - self.start

    def _iterate(self) -> None:
        began = time.monotonic()
        iteration = sft_iteration if self.run.algorithm.needs.clips else run_iteration
        metrics = iteration(self.run, self.step)
        self.step += 1
        every = self.config.eval.every
        if every and self.step % every == 0 and self.step < self.config.steps:
            metrics["heldout/reward"] = self._evaluate().mean
        metrics["time/step_s"] = time.monotonic() - began
        metrics["time/elapsed_s"] = self.seconds
        self.history.append(metrics)
        self.track(metrics, self.step)
        log.info(report.progress_line(self.step, self.config.steps, metrics))
        every = self.config.checkpoint.every
        if self.step == self.config.steps or (every and self.step % every == 0):
            self._save()

    def _evaluate(self) -> Evaluation:
        return evaluate(self.config, self.run.workers, self.run.rewards, self.heldout, self.weights)

    def _save(self) -> None:
        before = self.before
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "before": [before.mean, before.standard_error, before.by_prompt, before.parts],
            "config": json.loads(self.config.model_dump_json()),
        }
        self.checkpoints.save(self.step, self.run.workers.save, state)

    def _resume(self) -> None:
        folder = self.checkpoints.resolve(self.config.resume)
        self.checkpoints.continue_from(folder)
        if folder is None:
            return
        state = self.checkpoints.state(folder)
        self.run.workers.load(folder)
        self.step, self.history, self.earlier_s = state["step"], state["history"], state["seconds"]
        self.before = Evaluation(*state["before"])
        for number, metrics in enumerate(self.history, start=1):  # verl's file logger starts anew
            self.track(metrics, number)
        log.info("resumed %s at step %d", folder, self.step)

    def _pictures(self, when: str) -> None:
        folder = self.run_dir / "videos"
        folder.mkdir(parents=True, exist_ok=True)
        shown = showcase(self.config, self.run.workers, self.heldout, self.weights)
        videos = np.concatenate([m.videos for m in shown])
        texts, ids = zip(*[(key.prompt.text, key.prompt.id) for m in shown for key in m.keys], strict=True)
        np.savez_compressed(folder / f"{when}.npz", videos=videos, texts=np.array(texts), ids=np.array(ids))
        for i, video in enumerate(videos):
            media.write_mp4(folder / f"{when}-{i:02d}.mp4", video, self.config.video.fps)
        media.write_gif(folder / f"{when}.gif", videos, self.config.video.fps, texts)
        media.write_sheet(folder / f"{when}.png", videos, texts)

    def _finish(self, after: Evaluation) -> report.Summary:
        kept = {when: np.load(self.run_dir / "videos" / f"{when}.npz") for when in ("before", "after")}
        media.write_comparison(
            self.run_dir / "before_after.png",
            list(kept["after"]["texts"]),
            kept["before"]["videos"],
            kept["after"]["videos"],
            rewards=[(self.before.by_prompt.get(i, nan), after.by_prompt.get(i, nan)) for i in kept["after"]["ids"]],
        )
        summary = report.summarize(
            self.config,
            self.history,
            before=self.before,
            after=after,
            seconds=self.seconds,
            workers=self.run.workers.dp_size * self.config.parallel.ulysses,
            driver_peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        report.write_summary(self.run_dir, summary)
        report.draw_curve(self.run_dir / "reward.png", self.history, self.before.mean, after.mean)
        log.info(report.closing_text(summary, self.run_dir))
        return summary
