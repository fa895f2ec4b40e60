"""A whole run around the loop: resume, evaluate, iterate, log, save, show."""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from math import nan
from pathlib import Path
from typing import NoReturn

import numpy as np

from crossrl import media, report
from crossrl.checkpoint import Checkpoints, RunLock
from crossrl.config import RunConfig
from crossrl.data import PromptCursor, load_prompts
from crossrl.errors import CrossRLError, GuardError
from crossrl.evaluate import Evaluation, evaluate, showcase
from crossrl.gate import pass_gate
from crossrl.guard import Finding, Guard, Report
from crossrl.loop import Run, run_iteration, sft_iteration
from crossrl.protocols import Algorithm, RewardRuntime, WorkerGroup
from crossrl.rewards import labels
from crossrl.seeds import stream_seed
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
        self.guard = self._guard()
        self.findings: list[Finding] = []  # the guard's, those of abandoned steps included
        self.rollbacks = 0
        self.healthy: list[int] = []  # steps of the checkpoints that the guard found healthy when they were saved
        self.earlier_s = 0.0  # spent before this process took over
        self.start = time.monotonic()

    def train(self) -> report.Summary | None:
        self._resume()
        if self.step == 0:
            (self.run_dir / "config.json").write_text(self.config.model_dump_json(indent=2))
            if self.config.gate:
                pass_gate(self.run)
            self.before = self._evaluate()
            self._pictures("before")
            log.info("held-out reward before training: %.3f", self.before.mean)
        while self.step < self.config.steps:
            self._iterate()
            if (self.run_dir / "STOP").exists():
                self._save()
                log.info("stopped after step %d as asked, and saved; resume=auto goes on from there", self.step)
                return None
        return self._finish()

    @property
    def seconds(self) -> float:
        """Spent on this run, earlier processes included."""
        return self.earlier_s + time.monotonic() - self.start

    def _iterate(self) -> None:
        began = time.monotonic()
        self.run.skip_above = self.guard.skip_above
        iteration = sft_iteration if self.run.algorithm.needs.clips else run_iteration
        metrics = iteration(self.run, self.step)
        self.step += 1
        every = self.config.eval.every
        if every and self.step % every == 0 and self.step < self.config.steps:
            metrics |= self._evaluate().metrics
        metrics["time/step_s"] = time.monotonic() - began
        metrics["time/elapsed_s"] = self.seconds
        findings = self.guard.observe(metrics)
        metrics |= {f"guard/{name}": level for name, level in self.guard.levels.items()}
        metrics |= {"guard/findings": float(len(findings)), "guard/rollbacks": float(self.rollbacks)}
        metrics["guard/lr_scale"] = self.run.lr_scale
        self.history.append(metrics)
        self.track(metrics, self.step)
        log.info(report.progress_line(self.step, self.config.steps, metrics))
        if self._heed(findings):
            return
        every = self.config.checkpoint.every
        if self.step == self.config.steps or (every and self.step % every == 0):
            self._save()

    def _evaluate(self) -> Evaluation:
        return evaluate(self.config, self.run.workers, self.run.rewards, self.heldout, self.weights)

    # ---- the guard ---------------------------------------------------------------------------------------------

    def _guard(self) -> Guard:
        """A guard that knows the history."""
        rewards = self.config.rewards
        gold = [name for name, reward in zip(labels(rewards), rewards, strict=True) if reward.weight == 0]
        return Guard(self.config.guard, gold, self.history)

    def _heed(self, findings: list[Finding]) -> bool:
        """Do what follows from the findings; whether the run went back to an earlier step."""
        self.findings += findings
        for finding in findings:
            log.warning("%s", finding)
        by_action = {finding.action: finding for finding in findings}
        if "stop" in by_action:
            self._stop(by_action["stop"], "")
        if "rollback" in by_action:
            return self._roll_back(by_action["rollback"])
        if "cut_lr" in by_action:
            self._cut_lr()
        return False

    def _cut_lr(self) -> None:
        self.run.lr_scale *= self.config.guard.lr_cut
        log.warning("guard: the learning rate is now scaled by %g (guard.lr_cut)", self.run.lr_scale)

    def _roll_back(self, finding: Finding) -> bool:
        """Go on from the newest checkpoint from before the trouble with other noise, other prompts and a lower rate.

        That checkpoint is written again with what was learned, so a run killed after this does not forget it, and
        those after it are set aside.
        """
        if self.rollbacks >= self.config.guard.max_rollbacks:
            self._stop(finding, f" after {self.rollbacks} rollbacks (guard.max_rollbacks)")
        refuge = self._refuge()
        self._cut_lr()
        if refuge is None:
            log.warning(
                "guard: no checkpoint from before the trouble to go back to (checkpoint.every, checkpoint.keep)"
            )
            return False
        left, state = self.step, self.checkpoints.verify(refuge)
        self.run.workers.load(refuge)
        self.step, self.history = state["step"], state["history"]
        self.guard = self._guard()
        self.rollbacks += 1
        self._reseed()
        self._save()
        log.warning(
            "guard: rolled back from step %d to %d (%d of %d)",
            *(left, self.step, self.rollbacks, self.config.guard.max_rollbacks),
        )
        return True

    def _refuge(self) -> Path | None:
        """The newest checkpoint that was healthy and that no rule has held anything against since."""
        for path in reversed(self.checkpoints.published()):
            step = int(path.name.removeprefix("step-"))
            if step in self.healthy and step <= self.guard.good_step:
                return path
        return None

    def _reseed(self) -> None:
        """Other prompts and noise for every rollback; evaluation keeps its own."""
        if self.rollbacks:
            seed = stream_seed(self.config.seed, "rollback", self.rollbacks)
            self.run.config = self.config.model_copy(update={"seed": seed})
            if self.run.data is not None:
                self.run.data = PromptCursor(self.run.data.prompts, self.config.batch.prompts, seed)

    def _stop(self, finding: Finding, after: str) -> NoReturn:
        """Save, report and raise `GuardError`."""
        refuge = self._refuge()
        self._save()
        reason = f"stopped after step {self.step}{after}: {finding.seen}"
        facts = (self.run.lr_scale, self.rollbacks, refuge and str(refuge), self.findings, self.guard.levels)
        Report(self.step, reason, *facts).write(self.run_dir)
        try:
            self._finish()
        except CrossRLError as error:  # a broken policy's videos may be beyond scoring
            log.warning("guard: no final evaluation: %s", error)
        raise GuardError(
            reason,
            where=f"guard.{finding.rule}",
            fix=f"read {self.run_dir / 'guard_report.md'}; "
            + (f"go on with other settings and resume={refuge}" if refuge else "start again with other settings"),
        )

    # ---- state -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        spare = self._refuge() if self.guard.may_roll_back else None
        self.healthy = [step for step in self.healthy if step < self.step] + [self.step] * self.guard.healthy
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "before": astuple(self.before),
            "guard": {
                "healthy": self.healthy,
                "lr_scale": self.run.lr_scale,
                "rollbacks": self.rollbacks,
                "findings": [asdict(finding) for finding in self.findings],
            },
            "config": json.loads(self.config.model_dump_json()),
        }
        self.checkpoints.save(self.step, self.run.workers.save, state, spare)

    def _resume(self) -> None:
        folder = self.checkpoints.resolve(self.config.resume)
        self.checkpoints.continue_from(folder)
        if folder is None:
            return
        state = self.checkpoints.state(folder)
        self.run.workers.load(folder)
        self.step, self.history, self.earlier_s = state["step"], state["history"], state["seconds"]
        self.before = Evaluation(*state["before"])
        self.guard = self._guard()
        known = state["guard"]
        self.healthy, self.run.lr_scale, self.rollbacks = known["healthy"], known["lr_scale"], known["rollbacks"]
        self.findings = [Finding(**finding) for finding in known["findings"]]
        self._reseed()
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

    def _finish(self) -> report.Summary:
        after = self._evaluate()
        self._pictures("after")
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
            guard={"findings": len(self.findings), "rollbacks": self.rollbacks, "lr_scale": self.run.lr_scale},
            driver_peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        report.write_summary(self.run_dir, summary)
        report.draw_curve(self.run_dir / "reward.png", self.history, self.before.mean, after.mean)
        log.info(report.closing_text(summary, self.run_dir))
        return summary
