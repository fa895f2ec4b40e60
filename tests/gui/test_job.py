"""A config with a `gui` node on the command line: what is refused, before anything starts, and how."""

import shutil

import pytest

from crossrl.errors import ConfigError, CrossRLError
from crossrl.launch import kind_of, prepare
from crossrl.registry import refresh
from crossrl_gui_agent.job import GuiKind
from crossrl_gui_agent.seeds import alternating, ranges_of


@pytest.fixture
def chromium(monkeypatch, tmp_path):
    """A program of its name on the PATH: nothing here starts it."""
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    refresh()
    yield
    refresh()


def test_the_node_tells_the_kind():
    assert isinstance(kind_of("gui_agent"), GuiKind)
    assert kind_of("demo").node == "crossrl"


def test_short_names_reach_verls_keys(chromium):
    job = prepare(
        "gui_agent", ["algorithm=gigpo", "gui.algorithm.gamma=0.9", "steps=3", "workers=2", "run_dir=x", "max_steps=4"]
    )
    assert job.workers == 2
    assert (job.run.algorithm, job.run.run_dir, job.run.max_steps) == ({"name": "gigpo", "gamma": 0.9}, "x", 4)
    assert job.tree.trainer.total_training_steps == 3
    assert job.tree.trainer.default_local_dir == "x/checkpoints"
    assert job.title == "gigpo on miniwob with verl's fsdp2"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=dance_grpo", "no algorithm for a GUI agent"),
        ("algorithm=gui_gpro", "gui_grpo"),
        ("codec=computer_usage", "computer_use, mobile_use, ui_tars"),
        ("max_stepz=3", "max_steps"),
        ("gui.max_stepz=3", "max_steps"),
        ("max_steps=0", "max_steps"),
        ("env.name=minivob", "miniwob"),
        ("env.kontexts=3", "kontexts"),
        ("env.contexts=0", "contexts"),
        ("data.train_files=[click-tset:0-9]", "no task 'click-tset'"),
        ("data.val_files=[click-test]", "e.g. click-test:0-1023"),
        ("data.val_files=[click-test:9-3]", "does not name episodes"),
        ("malformed_penalty=2", "malformed_penalty"),
    ],
)
def test_nonsense_is_refused_by_name(chromium, override, said):
    with pytest.raises(CrossRLError) as caught:
        prepare("gui_agent", [override])
    assert said in str(caught.value)


def test_without_a_browser_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("chromium") is None
    refresh()
    try:
        with pytest.raises(CrossRLError, match="apt-get install chromium"):
            prepare("gui_agent", [])
    finally:
        refresh()


def test_episodes_of_several_tasks_take_turns():
    ranges = ranges_of(["a:0-2", "b:7-7"], "data.train_files")
    assert alternating(ranges) == [("a", 0), ("b", 7), ("a", 1), ("a", 2)]
    with pytest.raises(ConfigError, match="data.train_files"):
        ranges_of("a:1", "data.train_files")
