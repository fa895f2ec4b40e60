"""A run says in one line where it stands, and in the end whether it learned and why that is said."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from crossrl import report
from crossrl.config import RunConfig

CONFIG = RunConfig(
    algorithm="dance_grpo",
    backend="veomni",
    model={"path": "toy"},
    data={"train": "toy:train"},
    rewards=[{"name": "toy"}],
    seed=5,
)
METRICS = {
    "reward/mean": 0.412,
    "reward/within_group_std": 0.081,
    "update/ratio": 1.0002,
    "update/clip_high": 0.01,
    "update/clip_low": 0.005,
    "update/first_ratio_deviation_max": 2e-7,
    "update/skipped": 1.0,
    "reward/failed": 2,
    "rollout/denoise_s": 1.0,
    "rollout/peak_rss_bytes": 3e9,
    "time/rollout_and_reward_s": 1.2,
    "time/update_s": 0.8,
    "time/step_s": 2.0,
    "time/elapsed_s": 24.0,
}


def evaluation(*values):
    by_prompt = {f"p{i}": v for i, v in enumerate(values)}
    return SimpleNamespace(mean=float(np.mean(values)), by_prompt=by_prompt)


def summary(before, after, history=(METRICS,), **extra):
    return report.summarize(
        CONFIG, list(history), before=evaluation(*before), after=evaluation(*after), seconds=99.0, workers=2, **extra
    )


def test_the_progress_line_is_one_line_with_all_that_matters():
    line = report.progress_line(12, 50, METRICS)
    for words in (
        "step 12/50", "reward 0.412", "spread 0.081", "ratio 1.0002", "clip 1.5%", "rollout and reward 1.2s",
        "update 0.8s", "eta 1m16s",
    ):  # fmt: skip
        assert words in line
    assert "\n" not in line and "elapsed" not in line


def test_the_progress_line_shows_what_there_is():
    assert report.progress_line(1, 2, {}) == "step 1/2"
    line = report.progress_line(1, 2, {"update/loss": 0.5, "time/step_s": 4000.0})
    assert line == "step 1/2 | loss 0.5000 | eta 1h06m"
    assert "reward nan" in report.progress_line(1, 2, {"reward/mean": math.nan})


@pytest.mark.parametrize(
    ("before", "after", "learned", "words"),
    [
        ([0.2, 0.3, 0.4], [0.6, 0.7, 0.8], True, "It learned"),
        ([0.1, 0.9], [0.2, 1.0], True, "It learned"),  # prompts differ more than the gain, which is the same on each
        ([0.2, 0.3, 0.4], [0.2, 0.34, 0.44], False, "below 0.05"),
        ([0.5, 0.5], [0.3, 0.3], False, "below 0.05"),
        ([0.5, 0.5, 0.5], [1.0, 0.5, 0.3], False, "within twice its standard error"),
        ([0.2], [0.9], False, "at least two held-out prompts"),
        ([0.2, 0.2], [math.nan, 0.9], False, "cannot be told"),
    ],
)
def test_learned_needs_a_gain_that_is_large_and_certain(before, after, learned, words):
    found = summary(before, after)
    assert found.learned is learned
    assert words in report.closing_text(found, "nowhere")


def test_the_summary_on_disk_has_every_figure_and_is_strict_json(tmp_path):
    first = {**METRICS, "update/first_ratio_deviation_max": 1e-3}
    found = summary([0.2], [0.9], [METRICS, first], driver_peak_rss_bytes=4e9, note={"nan": math.nan, "x": (1,)})
    path = report.write_summary(tmp_path, found)

    def refuse(text):
        raise AssertionError(text)

    written = json.loads(path.read_text(), parse_constant=refuse)
    assert written["heldout_reward_before"] == 0.2 and written["heldout_reward_after"] == 0.9
    assert written["learned"] is False and written["gain_standard_error"] is None
    assert written["max_abs_ratio_deviation_at_first_update"] == 1e-3
    assert written["peak_rss_bytes"] == 4e9 and written["extra"]["note"] == {"nan": None, "x": [1]}
    assert (written["steps"], written["seconds"], written["seed"], written["workers"]) == (2, 99.0, 5, 2)
    assert (written["backend"], written["algorithm"]) == ("veomni", "dance_grpo")
    assert (written["dropped_samples"], written["skipped_updates"]) == (4, 2)
    assert written["seconds_per_stage"]["time/update"] == 0.8 and "time/elapsed" not in written["seconds_per_stage"]
    assert {"python", "crossrl", "torch", "verl"} <= set(written["versions"])
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_the_closing_text_shows_the_course_and_the_pictures_that_exist(tmp_path):
    history = [{**METRICS, "reward/mean": 0.1 * i} for i in range(8)]
    (tmp_path / "reward.png").touch()
    text = report.closing_text(summary([0.1, 0.2], [0.5, 0.6], history), tmp_path)
    assert "0.150 -> 0.550 (+0.400" in text and "[_.-=+*%#]" in text
    assert str(tmp_path / "reward.png") in text and "before_after.png" not in text
    assert "16 samples dropped, 8 updates skipped" in text
    assert text.isascii()


def test_a_run_without_rewards_or_steps_has_a_summary_too(tmp_path):
    for history in ([], [{"update/loss": 0.3}]):
        found = summary([0.2, 0.2], [0.2, 0.2], history)
        assert found.max_abs_ratio_deviation_at_first_update is None
        assert "training reward" not in report.closing_text(found, tmp_path)
        report.draw_curve(tmp_path / "r.png", history, 0.2, 0.2)


def test_sparklines_take_any_values():
    assert report.sparkline([]) == ""
    assert report.sparkline([1.0]) == "_"
    assert report.sparkline([0, math.nan, 1]) == "_?#"
    assert len(report.sparkline(list(range(1000)))) == 60


def colours(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def near(pixels, colour):
    return (np.abs(pixels - colour).max(-1) < 40).sum()


def test_the_curve_shows_both_lines_within_its_axes(tmp_path):
    history = [{"reward/mean": math.sqrt(i), **({"heldout/reward": 1.0} if i % 10 == 9 else {})} for i in range(50)]
    report.draw_curve(tmp_path / "r.png", history, 0.0, 7.0)
    pixels = colours(tmp_path / "r.png")
    assert near(pixels, report.BLUE) > 200 and near(pixels, report.ORANGE) > 200
    assert (pixels[:, 0] == 255).all() and (pixels[-1] == 255).all(), "nothing is cut off"


@pytest.mark.parametrize("values", [[math.nan], [3.0] * 4, [-1e6, 1e6], [1e-7, 2e-7], [-0.3]])
def test_the_curve_survives_odd_values(tmp_path, values):
    report.draw_curve(tmp_path / "r.png", [{"reward/mean": v} for v in values], values[0], math.nan)
    assert colours(tmp_path / "r.png").shape == (400, 720, 3)
