"""The GUI agent through verl's own trainer, by the real command line."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.usefixtures("browser")]

SMALL = ["steps=2", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
         "actor_rollout_ref.rollout.n=4", "data.val_files=[click-test:900000-900003]"]  # fmt: skip


def crossrl(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "crossrl.cli", *arguments], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory, browser):
    folder = tmp_path_factory.mktemp("gui")
    return folder, crossrl("run", "gui_agent", f"run_dir={folder}", *SMALL, "trainer.save_freq=2")


def test_it_says_how_it_goes(ran):
    _, said = ran
    assert "step 2/2 | success" in said
    assert "held out, step 2: click-test" in said


def test_it_leaves_metrics_pictures_and_a_checkpoint(ran):
    folder, _ = ran
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "gui/success" in row]
    assert [row["step"] for row in trained] == [1, 2]
    for row in trained:
        assert row["gui/stop/success"] + row["gui/stop/max_steps"] + row["gui/stop/malformed"] == pytest.approx(1)
        assert row["training/rollout_probs_diff_max"] < 1e-5  # rollout and trainer speak of the same distribution
    page = (folder / "episodes.html").read_text()
    assert page.count("class=step") >= 8
    assert "left_click" in page
    assert (folder / "success.png").exists()
    assert list((folder / "checkpoints").glob("global_step_2/actor/*"))


def test_a_stopped_run_goes_on(ran):
    folder, _ = ran
    said = crossrl("run", "gui_agent", f"run_dir={folder}", *SMALL[1:], "steps=3", "resume=auto")
    assert "step 3/3 | success" in said
    assert "step 2/3" not in said
