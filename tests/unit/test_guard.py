"""The guard against synthetic runs: it notices what it is for, soon enough, and leaves healthy runs alone."""

import json
import math

import numpy as np
import pytest

from crossrl.checkpoint import Checkpoints
from crossrl.config import RewardConfig, RunConfig
from crossrl.errors import ConfigError
from crossrl.guard import Finding, Guard, GuardConfig, Report
from crossrl.media import statistics
from crossrl.rewards import labels
from crossrl.validation import validated

ACTING = {"skip", "cut_lr", "rollback", "stop"}
GOLD = ("gold",)


def healthy(steps, seed, noise=0.05, gain=0.4, tail=None, correlated=False):
    """The metrics of a run that learns: the reward saturates, everything else scatters about its level.

    `tail`: degrees of freedom of a t distribution of the noise, else it is normal; `correlated`: an iteration's noise
    of the reward keeps 0.6 of the last one's, as where the policy itself wanders.
    """
    rng = np.random.default_rng(seed)
    draw = (lambda: rng.standard_t(tail) / math.sqrt(tail / (tail - 2))) if tail else rng.standard_normal
    drift = 0.0
    for step in range(steps):
        drift = 0.6 * drift + 0.8 * draw() if correlated else draw()
        level = 0.3 + gain * (1 - math.exp(-step / 200))
        m = {
            "reward/mean": level + noise * drift,
            "reward/within_group_std": 0.2 * math.exp(0.1 * draw()),
            "reward/zero_std": float(np.clip(0.1 + 0.1 * draw(), 0, 1)),
            "update/loss": 1e-3 * draw(),
            "update/grad_norm_max": 0.1 * max(0.1, 1 + 0.25 * draw()),
            "update/kl": 1e-3 * math.exp(0.2 * draw()),
            "update/log_ratio": 1e-5 * draw(),
            "update/approx_kl": 1e-5,
            "update/clip_low": 0.04 * math.exp(0.2 * draw()),
            "update/clip_high": 0.03 * math.exp(0.2 * draw()),
            "update/first_ratio_deviation_max": 0.0,
            "video/brightness": 0.4 + 0.01 * draw(),
            "video/motion": 0.1 * math.exp(0.05 * draw()),
            "rollout/peak_rss_bytes": 4e9,
        }
        if step % 10 == 9:  # two evaluations on fixed noise differ by much less than the standard error over prompts
            m |= {"heldout/reward": level + 0.01 * draw(), "heldout/standard_error": 0.03}
            m |= {"heldout/gold": level / 2 + 0.006 * draw(), "heldout/gold_standard_error": 0.02}
        yield m


def changed(steps, seed, at, change, **how):
    """A healthy run that `change(metrics, age)` spoils from step `at` on."""
    for step, metrics in enumerate(healthy(steps, seed, **how)):
        yield metrics | change(metrics, step - at) if step >= at else metrics


def watch(stream, rule=None, **settings):
    """(the guard, all findings, those of `rule`) of a run."""
    guard = Guard(GuardConfig(**settings), GOLD)
    found = [finding for metrics in stream for finding in guard.observe(metrics)]
    return guard, found, [finding for finding in found if finding.rule == rule]


@pytest.mark.parametrize("how", [{}, {"tail": 5}, {"correlated": True}], ids=["normal", "heavy-tailed", "correlated"])
def test_healthy_runs_are_left_alone(how):
    """Fewer than one finding that acts in 10,000 steps: at most one in 10 runs of 2,000."""
    acting = [f for seed in range(10) for f in watch(healthy(2000, seed, **how))[1] if f.action in ACTING]
    assert len(acting) <= 1, acting


def test_every_rule_is_silent_on_a_healthy_run():
    guard, found, _ = watch(healthy(1000, 0))
    assert found == [] and guard.healthy and guard.good_step == 999
    assert set(guard.levels) >= {"reward_drop", "heldout_drop", "hacking", "grad_norm", "drift", "diversity", "memory"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [60, 300, 1500])
def test_a_collapse_is_noticed_within_eight_iterations(at, seed):
    stream = changed(at + 20, seed, at, lambda m, age: {"reward/mean": m["reward/mean"] - 0.4})
    guard, _, drops = watch(stream, "reward_drop")
    assert drops[0].action == "rollback" and drops[0].step - at <= 8
    assert not guard.healthy and at - 3 <= guard.good_step <= at + 1


def test_a_slow_collapse_is_noticed_before_two_thirds_of_the_gain_are_lost():
    stream = changed(800, 1, 500, lambda m, age: {"reward/mean": m["reward/mean"] - 0.002 * age})
    _, _, drops = watch(stream, "reward_drop")
    assert drops and 0.002 * (drops[0].step - 500) < 0.4 * 2 / 3


def test_a_heldout_reward_that_falls_is_noticed_at_the_second_evaluation():
    stream = changed(400, 2, 300, lambda m, age: {"heldout/reward": 0.4} if "heldout/reward" in m else {})
    guard, _, drops = watch(stream, "heldout_drop")
    assert drops[0].action == "rollback" and drops[0].step == 320 and guard.good_step == 300


def test_slow_hacking_stops_the_run():
    """The gold reward loses 0.01 an evaluation, half its standard error, while the trained one rises as it did."""

    def hack(m, age):
        return {k: m[k] + c * age for k, c in (("heldout/gold", -1e-3), ("heldout/reward", 1e-3)) if k in m}

    _, found, hacks = watch(changed(600, 3, 300, hack), "hacking")
    assert hacks[0].action == "stop" and hacks[0].step <= 300 + 10 * 9
    assert "heldout/gold fell" in hacks[0].seen and {f.rule for f in found} == {"hacking"}


def test_a_gold_reward_that_falls_with_the_trained_one_is_not_hacking():
    def worse(m, age):
        return {k: m[k] - 1e-3 * age for k in ("heldout/gold", "heldout/reward") if k in m}

    assert not watch(changed(600, 3, 300, worse), "hacking", heldout_drop={"action": "off"})[2]


def test_one_nan_is_reported_and_three_in_a_row_roll_back():
    bad = {"update/loss": math.nan, "update/grad_norm_max": math.nan}
    guard, _, nans = watch(changed(60, 4, 30, lambda m, age: bad if age == 0 else {}), "nan")
    assert [f.action for f in nans] == ["warn"] and guard.healthy
    assert "update/loss = nan" in nans[0].seen
    guard, _, nans = watch(changed(33, 4, 30, lambda m, age: bad), "nan")
    assert [f.action for f in nans] == ["warn", "warn", "rollback"] and guard.good_step == 29
    assert math.isfinite(guard.skip_above)


def test_a_nan_standard_error_of_a_single_prompt_is_no_alarm():
    stream = [m | ({"heldout/standard_error": math.nan} if "heldout/reward" in m else {}) for m in healthy(100, 0)]
    assert watch(stream)[1] == []


def test_gradient_spikes_are_to_be_skipped_and_do_not_move_the_limit():
    def spike(m, age):
        return {"update/grad_norm_max": 5.0} if age % 20 == 0 else {}

    guard, found, skips = watch(changed(200, 5, 100, spike), "grad_norm")
    assert [f.action for f in skips] == ["skip"] * 5 and skips == found
    assert 0.3 < guard.skip_above < 1.5
    assert Guard(GuardConfig()).skip_above is None, "nothing is skipped before it is known what is normal"
    assert watch(healthy(100, 5), grad_norm={"action": "warn"})[0].skip_above is None


def test_a_lasting_shift_of_the_norm_becomes_the_new_normal_and_cuts_the_rate_once():
    stream = changed(300, 6, 100, lambda m, age: {"update/grad_norm_max": 50 * m["update/grad_norm_max"]})
    guard, _, found = watch(stream, "grad_norm")
    assert [f.action for f in found] == ["skip"] * 4 + ["cut_lr"]
    assert guard.skip_above > 10


def test_an_explosion_of_the_learning_rate_is_met_with_skips_and_a_rollback():
    def explode(m, age):
        return {"update/grad_norm_max": m["update/grad_norm_max"] * 10.0**age, "reward/mean": 0.05}

    _, found, _ = watch(changed(120, 7, 100, explode))
    first = {action: next(f.step for f in found if f.action == action) for action in ("skip", "rollback")}
    assert first["skip"] <= 103 and first["rollback"] <= 108


WARNINGS = {
    "clip_asymmetry": (lambda m, age: {"update/clip_low": 0.2, "update/clip_high": 0.005}, 5),
    "log_ratio_bias": (lambda m, age: {"update/log_ratio": -4e-3}, 5),
    "ratio": (lambda m, age: {"update/first_ratio_deviation_max": 1e-3}, 3),
    "zero_std": (lambda m, age: {"reward/zero_std": 0.8}, 5),
    "diversity": (lambda m, age: {"reward/within_group_std": 0.01}, 15),
    "drift": (lambda m, age: {"video/motion": 0.02}, 5),
    "memory": (lambda m, age: {"rollout/peak_rss_bytes": 4e9 + 4e6 * age}, 200),
}


@pytest.mark.parametrize("rule", WARNINGS)
def test_what_only_warns_does_so_once_per_doubling(rule):
    change, delay = WARNINGS[rule]
    guard, found, warned = watch(changed(400, 8, 100, change), rule)
    assert warned == found and {f.action for f in warned} == {"warn"} and guard.healthy
    assert warned[0].step <= 100 + delay and len(warned) <= 7


def test_a_step_up_in_memory_is_no_leak_and_a_new_process_starts_anew():
    step_up = changed(400, 8, 100, lambda m, age: {"rollout/peak_rss_bytes": 6e9})
    assert watch(step_up)[1] == []
    restarts = changed(400, 8, 100, lambda m, age: {"rollout/peak_rss_bytes": 2e9 + 8e6 * (age % 60)})
    assert watch(restarts)[1] == []


def test_a_kl_budget_cuts_the_rate_and_there_is_none_by_default():
    stream = list(changed(60, 9, 30, lambda m, age: {"update/kl": 0.1}))
    assert watch(stream)[1] == []
    _, found, _ = watch(stream, kl={"limit": 0.01})
    assert [(f.step, f.action) for f in found] == [(33, "cut_lr"), (36, "cut_lr"), (42, "cut_lr"), (54, "cut_lr")]


def test_a_replayed_guard_is_the_same_guard():
    """What resume and rollback rely on, through the JSON of a checkpoint."""
    stream = list(changed(200, 10, 150, lambda m, age: {"reward/mean": 0.1, "update/grad_norm_max": 3.0}))
    for cut in (0, 5, 80, 152, 157):
        whole, resumed = Guard(GuardConfig(), GOLD), Guard(GuardConfig(), GOLD, json.loads(json.dumps(stream[:cut])))
        for metrics in stream[:cut]:
            whole.observe(metrics)
        for metrics in stream[cut:]:
            assert resumed.skip_above == whole.skip_above and resumed.good_step == whole.good_step
            assert resumed.observe(metrics) == whole.observe(metrics)
            assert resumed.levels == whole.levels


def test_a_job_may_set_one_key_of_a_rule_or_turn_it_off():
    config = GuardConfig(reward_drop={"limit": 8}, nan={"action": False}, kl={"limit": None})
    assert (config.reward_drop.action, config.reward_drop.limit, config.reward_drop.patience) == ("rollback", 8, 3)
    assert config.nan.action == "off" and GuardConfig.model_validate(config.model_dump()) == config
    for bad in ({"kl": {"action": "skip"}}, {"drift": {"limt": 1}}, {"drif": {}}):
        with pytest.raises(ConfigError):
            validated(GuardConfig, bad, source="job.yaml")
    bad = {"update/loss": math.nan}
    assert watch([bad] * 9, nan={"action": "off"})[1] == watch([bad] * 9, enabled=False)[1] == []


def test_the_report_says_what_was_seen_and_where_to_go_on(tmp_path):
    finding = Finding(120, "reward_drop", "reward/mean fell", "rollback")
    assert "guard.reward_drop" in str(finding) and "step 120" in str(finding) and "optimizer.lr" in str(finding)
    Report(120, "stopped", 0.25, 2, "/runs/a/step-00000100", [finding], {"reward_drop": 5.0}).write(tmp_path)
    assert json.loads((tmp_path / "guard_report.json").read_text())["findings"][0]["rule"] == "reward_drop"
    text = (tmp_path / "guard_report.md").read_text()
    assert "step-00000100" in text and "| 120 | `guard.reward_drop` | reward/mean fell | rollback |" in text


def test_the_checkpoint_to_go_back_to_is_spared_by_pruning(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = checkpoints.save(10, lambda folder: None, {})
    for step in (20, 30):
        checkpoints.save(step, lambda folder: None, {}, spare=good)
    assert [p.name for p in checkpoints.published()] == ["step-00000010", "step-00000030"]
    checkpoints.save(40, lambda folder: None, {})
    assert [p.name for p in checkpoints.published()] == ["step-00000040"]


def test_video_statistics_mean_what_they_say():
    grey, red = np.full((1, 5, 8, 8, 3), 51, np.uint8), np.zeros((1, 5, 8, 8, 3), np.uint8)
    red[..., 0] = 255
    assert statistics(grey) == pytest.approx({"brightness": 0.2, "saturation": 0, "detail": 0, "motion": 0}, abs=1e-6)
    assert statistics(red)["saturation"] == 1 and statistics(red)["brightness"] == pytest.approx(1 / 3)
    blink = np.zeros((2, 2, 8, 8, 3), np.uint8)
    blink[:, 1] = 255
    assert statistics(blink)["motion"] == pytest.approx(1) and statistics(blink)["detail"] == 0
    stripes = np.zeros((1, 1, 8, 8, 3), np.uint8)  # an image: one frame, no motion
    stripes[..., ::2, :] = 255
    assert statistics(stripes)["detail"] == pytest.approx(1) and statistics(stripes)["motion"] == 0


def test_rewards_of_one_name_are_told_apart_and_something_must_be_trained():
    rewards = [RewardConfig(name=name) for name in ("toy", "hps", "toy")]
    assert labels(rewards) == ["toy", "hps", "toy_2"]
    basics = {"algorithm": "a", "backend": "b", "model": {"path": "toy"}, "data": {"train": "toy:train"}}
    with pytest.raises(ConfigError, match="nothing to train for"):
        validated(RunConfig, {**basics, "rewards": [{"name": "toy", "weight": 0}]}, source="job.yaml")
