"""What a run leaves for people."""

import io

from PIL import Image

from crossrl_gui_agent.actions import Action, Kind
from crossrl_gui_agent.envs import Episode, Step, StopReason
from crossrl_gui_agent.episodes import Recorder
from crossrl_gui_agent.report import Report

TRAINED = {"gui/success": 0.5, "timing_s/step": 1.0}


def held_out(value):
    return {"val-aux/click-test/success/mean@1": value}


def screen():
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(out, "PNG")
    return out.getvalue()


def report(folder, resumed=False):
    made = Report(folder, resumed)
    made.evaluation(0, held_out(0.2), swapped=False)
    made.step(1, 2, TRAINED)
    made.evaluation(1, held_out(0.6), swapped=False)
    return made


def test_episodes_are_shown_with_what_was_said_and_nothing_is_run(tmp_path):
    click = Action(Kind.CLICK, x=500, y=500)
    said = "<script>alert(1)</script>"
    episode = Episode("click-test", 7, "Click <the> button.", [Step(screen(), said, click, 1.0)], StopReason.SUCCESS)
    recorder = Recorder(str(tmp_path), most=1)
    recorder.keep(episode, 0)
    recorder.keep(Episode("click-test", 8), 0)  # one a task is enough
    report(tmp_path)
    page = (tmp_path / "episodes.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page
    assert page.count("class='episode") == 1
    assert "0.20" in page and "0.60" in page and "success.png" in page


def test_a_resumed_run_keeps_its_curve(tmp_path):
    report(tmp_path)
    again = Report(tmp_path, resumed=True)
    again.evaluation(1, held_out(0.7), swapped=False)  # evaluated again at the start
    assert again.curves == {"click-test": [(0, 0.2), (1, 0.7)]}
    assert set(again.history) == {1}


def test_a_new_run_in_a_used_folder_loses_nothing(tmp_path):
    report(tmp_path)
    assert report(tmp_path).curves == {"click-test": [(0, 0.2), (1, 0.6)]}
    (aside,) = tmp_path.glob("aside-*")
    assert (aside / "history.jsonl").exists() and (aside / "episodes.html").exists()


def test_a_swap_test_is_no_point_of_the_curve(tmp_path):
    made = report(tmp_path)
    made.evaluation(1, held_out(0.1), swapped=True)
    assert made.curves["click-test"][-1] == (1, 0.6)
