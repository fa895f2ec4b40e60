"""The five distributions as wheels: complete, in lockstep, and installable in any subset."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(p.parent for p in ROOT.glob("packages/*/pyproject.toml"))
METADATA = {p.name: tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in PACKAGES}


def test_versions_move_together_and_siblings_are_pinned_to_the_minor_version():
    assert len({m["version"] for m in METADATA.values()}) == 1
    for name, metadata in METADATA.items():
        siblings = [d for d in metadata["dependencies"] if d.startswith("crossrl-")]
        assert all(d.endswith(">=0.1,<0.2") for d in siblings) and (siblings or name == "core")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, *map(str, PACKAGES)], check=True, capture_output=True)
    return {p.name.split("-")[0]: p for p in folder.glob("*.whl")}


@pytest.mark.parametrize(
    ("wheel", "files"),
    [
        ("crossrl_core", ["crossrl/py.typed", "crossrl/verl/conf/crossrl.yaml", "hydra_plugins/crossrl_searchpath.py"]),
        ("crossrl_veomni", ["crossrl_veomni/py.typed", "crossrl_veomni/conf/actor/crossrl_veomni_actor.yaml"]),
        (
            "crossrl_mindspeed",
            ["crossrl_mindspeed/py.typed", "crossrl_mindspeed/conf/actor/crossrl_mindspeed_actor.yaml"],
        ),
        (
            "crossrl_gui_agent",
            [
                "crossrl_gui_agent/py.typed",
                "crossrl_gui_agent/conf/gui_agent.yaml",
                "crossrl_gui_agent/envs/miniwob.js",
                "crossrl_gui_agent/assets/chat_template.jinja",
                "crossrl_gui_agent/assets/tiny/model.safetensors",
            ],
        ),
        (
            "crossrl_t2v",
            [
                "crossrl_t2v/py.typed",
                "crossrl_t2v/conf/demo.yaml",
                "crossrl_t2v/toy/assets/wan_tiny/vae/diffusion_pytorch_model.safetensors",
                "crossrl_t2v/toy/assets/wan_tiny/transformer/diffusion_pytorch_model.safetensors",
            ],
        ),
    ],
)
def test_a_wheel_is_complete(wheels, wheel, files):
    names = zipfile.ZipFile(wheels[wheel]).namelist()
    assert set(files) <= set(names)
    assert "hydra_plugins/__init__.py" not in names  # a namespace shared with other Hydra plug-ins


def listed(folder, *wheel_files):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *map(str, wheel_files)], check=True, capture_output=True)
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from crossrl.cli import main; main()"
    command = [sys.executable, "-c", script, str(folder), "list", "--json"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MINDSPEED")}
    done = subprocess.run(command, env={**variables, "PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_wheels_install_together_and_describe_themselves(wheels, tmp_path):
    report = listed(tmp_path, *wheels.values())
    states = {(p["group"], p["name"]): p["state"] for p in report["plugins"]}
    assert states["crossrl.backends", "veomni"] == states["crossrl.algorithms", "dance_grpo"] == "ok"
    assert "unavailable: no source of MindSpeed-MM" in states["crossrl.backends", "mindspeed"]
    assert states["crossrl.algorithms", "gui_grpo"] == states["crossrl.jobs", "gui"] == "ok"
    assert {"demo", "toy_base", "gui_agent"} <= set(report["configs"])
