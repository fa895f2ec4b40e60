"""The example of docs/new-algorithm.md is a real package: installed out of tree, listed, checked and run by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CROSSRL = str(Path(sys.executable).with_name("crossrl"))
EXAMPLE = Path(__file__).parent / "reward_weighted"


def test_the_page_shows_the_code_that_runs():
    page = (ROOT / "docs/new-algorithm.md").read_text()
    for name in ("algorithm.py", "__init__.py"):
        assert (EXAMPLE / "src/reward_weighted" / name).read_text() in page


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(EXAMPLE)], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(target)}


def test_it_is_listed(installed):
    out = subprocess.run([CROSSRL, "list", "--json"], env=installed, check=True, capture_output=True, text=True)
    (row,) = [p for p in json.loads(out.stdout)["plugins"] if p["name"] == "reward_weighted"]
    assert row["state"] == "ok" and row["distribution"] == "reward-weighted"


def test_it_runs_by_name(installed, tmp_path):
    command = [CROSSRL, "run", "demo", "algorithm=reward_weighted", f"run_dir={tmp_path}", "steps=2"]
    small = ["batch.prompts=2", "batch.samples=4", "eval.samples=1", "eval.every=0"]
    done = subprocess.run([*command, *small], env=installed, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithm"] == "reward_weighted" and summary["steps"] == 2


def test_its_options_are_checked(installed, tmp_path):
    command = [CROSSRL, "check", "demo", "algorithm=reward_weighted", "algorithm.rows_per_sampel=3"]
    done = subprocess.run(command, env=installed, capture_output=True, text=True)
    assert done.returncode == 2
    assert "algorithm.rows_per_sampel" in done.stderr and "'rows_per_sample'" in done.stderr
