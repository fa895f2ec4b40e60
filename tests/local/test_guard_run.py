"""The guard in a real run: a learning rate a hundred times too high is noticed and undone, and the run learns on."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from crossrl import job as jobs
from crossrl.errors import GuardError
from crossrl.types import Score

SMALL = ("batch.prompts=4", "batch.samples=4", "sampling.steps=4", "eval.samples=1", "eval.every=0", "gate=false")
QUICK = ("checkpoint.every=3", "guard.warmup=8", "guard.lr_cut=0.01", *SMALL)
PRESENCE = "rewards=[{name: toy, options: {kind: presence}}]"  # it scatters little: few samples are enough
BROKEN = ("resume=auto", "optimizer.lr=3e-2", PRESENCE)


def train(job, run_dir, *overrides, stop_at=None, spoil=None):
    """(run, (step, metrics) as logged) of a job; `stop_at`: it is asked to stop after so many iterations."""
    run = job(*QUICK, f"run_dir={run_dir}", *overrides)
    if spoil:
        spoil(run)
    logged = []

    def track(metrics, step):
        logged.append((step, metrics))
        if len(logged) == stop_at:
            (run_dir / "STOP").touch()

    try:
        jobs.train(run.config, run.workers, run.rewards, run.algorithm, lambda: track)
    finally:
        (run_dir / "STOP").unlink(missing_ok=True)
    return run, logged


def timeless(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith(("_s", "seconds", "_bytes"))}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the healthy run is, once a test has made it."""
    return tmp_path_factory.mktemp("healthy") / "good"


@pytest.fixture
def good(job, kept, tmp_path):
    """Makes copies of a run of 12 healthy iterations."""
    if not kept.exists():
        _, logged = train(job, kept, PRESENCE, "steps=12")
        assert not any(metrics["guard/findings"] for _, metrics in logged)
    return lambda name: shutil.copytree(kept, tmp_path / name)


def test_a_learning_rate_a_hundred_times_too_high_is_rolled_back_and_the_run_recovers(job, good):
    run_dir = good("whole")
    whole, logged = train(job, run_dir, *BROKEN, "steps=22")
    earlier, logged = logged[:12], logged[12:]
    back = next(i for i, (_, m) in enumerate(logged) if m["guard/rollbacks"] == 1)
    worst = min(m["reward/mean"] for _, m in logged[:back])
    before, after = (np.mean([m["reward/mean"] for _, m in part[-6:]]) for part in (earlier, logged))
    assert before > 0.8 and worst < 0.5, "it had collapsed"
    assert back <= 8 and logged[back][0] <= 13, "noticed within eight iterations, back to before the trouble"
    assert after > before - 0.03 and logged[-1][1]["guard/lr_scale"] == pytest.approx(0.01)
    state = json.loads((run_dir / "checkpoints" / "step-00000022" / "manifest.json").read_text())["state"]
    assert [m["guard/rollbacks"] for m in state["history"]] == [0.0] * 12 + [1.0] * 10
    assert {f["action"] for f in state["guard"]["findings"]} >= {"rollback"} and state["guard"]["rollbacks"] == 1

    run_dir = good("parts")
    train(job, run_dir, *BROKEN, "steps=22", stop_at=12 + back + 5)  # after the rollback
    resumed, again = train(job, run_dir, *BROKEN, "steps=22")
    assert [(s, timeless(m)) for s, m in again[-10:]] == [(s, timeless(m)) for s, m in logged[-10:]]
    final = [r.workers.engine.module.state_dict() for r in (whole, resumed)]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])


def test_without_rollbacks_left_it_stops_with_a_report(job, good):
    run_dir = good("stopped")
    with pytest.raises(GuardError, match=r"guard.reward_drop: stopped after step \d+ after 0 rollbacks") as error:
        train(job, run_dir, *BROKEN, "guard.max_rollbacks=0", "steps=40")
    facts = json.loads((run_dir / "guard_report.json").read_text())
    assert facts["healthy_checkpoint"].endswith("step-00000012") and facts["healthy_checkpoint"] in str(error.value)
    assert facts["findings"][-1]["action"] == "rollback" and (run_dir / "guard_report.md").exists()
    assert (run_dir / "summary.json").exists()
    assert (run_dir / "checkpoints" / "step-00000012").is_dir(), "spared, though two newer ones were saved"
    assert (run_dir / "checkpoints" / f"step-{facts['step']:08d}").is_dir()


def test_loss_that_stays_nan_cuts_the_rate_where_there_is_no_checkpoint_to_go_back_to(job, tmp_path, caplog):
    def poison(run):
        honest = run.workers.engine.algorithm.loss

        def loss(velocity, rows):
            out = honest(velocity, rows)
            out.loss = out.loss * math.nan
            return out

        run.workers.engine.algorithm.loss = loss

    _, logged = train(job, tmp_path / "nan", "steps=3", "checkpoint.every=0", spoil=poison)
    assert len(logged) == 3 and "scaled by 0.01" in caplog.text
    assert "no checkpoint from before the trouble" in caplog.text and "update/loss = nan" in caplog.text


def test_a_reward_of_weight_zero_is_watched_and_never_trained_on(job, tmp_path):
    class Ones:
        name, range = "ones", (0.0, 1.0)

        def score(self, samples):
            return [Score(s.index / 10) for s in samples]

    two = "rewards=[{name: toy}, {name: toy, weight: 0.0}]"

    def replace(run):
        run.rewards.rewards.rewards[1] = Ones()

    _, plain = train(job, tmp_path / "one", "steps=1", "eval.every=1")
    _, watched = train(job, tmp_path / "two", "steps=1", "eval.every=1", two, spoil=replace)
    (_, plain), (_, watched) = plain[0], watched[0]
    assert watched["reward/toy_2"] == pytest.approx(0.15) and watched["reward/mean"] == plain["reward/mean"]
    assert watched["update/grad_norm"] == plain["update/grad_norm"]
    assert 0 < plain["video/brightness"] < 1 and plain["video/motion"] > 0
