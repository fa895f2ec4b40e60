"""The real command line: verl, Ray workers, VeOmni. Each run is a whole job, so they are few and small."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

CROSSRL = str(Path(sys.executable).with_name("crossrl"))
SMALL = ["batch.prompts=4", "batch.samples=8", "batch.updates=2", "eval.samples=1", "checkpoint.every=1", "steps=4"]


def start(run_dir, *overrides, config="demo"):
    command = [CROSSRL, "run", config, f"run_dir={run_dir}", *SMALL, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, code=0):
    out, _ = process.communicate(timeout=600)
    assert process.returncode == code, out
    return out


def logged(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def timeless(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith(("_s", "seconds", "_bytes"))}


def wait_for(run_dir, steps, process):
    path, end = run_dir / "checkpoints" / f"step-{steps:08d}", time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with two workers, from a config file of the user's own, and what it printed."""
    run_dir, own = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("own") / "my_job.yaml"
    own.write_text("defaults: [demo, _self_]\n")
    return run_dir, finish(start(run_dir, "workers=2", config=str(own)))


def test_what_a_person_sees(whole):
    run_dir, out = whole
    assert "held-out reward before training" in out and "step 4/4 | reward" in out and "ratio" in out
    assert "VERL" not in out and "pid=" not in out
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["workers"] == 2 and summary["backend"] == "veomni"
    assert summary["max_abs_ratio_deviation_at_first_update"] == 0.0
    assert summary["peak_rss_bytes"] > 1e8 and summary["versions"]["verl"].startswith("0.9.")
    assert {"heldout_reward_before", "heldout_reward_after", "learned", "seconds", "seed"} <= set(summary)
    for name in ("before_after.png", "reward.png", "videos/before.gif", "videos/after-00.mp4", "config.json"):
        assert (run_dir / name).stat().st_size > 0
    assert list((run_dir / "tensorboard").iterdir()) and len(logged(run_dir)) == 4


def test_a_killed_run_resumes_bit_for_bit(whole, tmp_path):
    process = start(tmp_path, "workers=2")
    wait_for(tmp_path, 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(tmp_path, "workers=2", "resume=auto"))
    for expected, got in zip(logged(whole[0]), logged(tmp_path), strict=True):
        assert timeless(got["data"]) == timeless(expected["data"])
    command = [CROSSRL, "export", "demo", *SMALL, "resume=auto"]
    for run_dir in (whole[0], tmp_path):
        subprocess.run([*command, f"run_dir={run_dir}", "--out", str(run_dir / "out")], check=True, capture_output=True)
    left, right = (load_file(d / "out/transformer/diffusion_pytorch_model.safetensors") for d in (whole[0], tmp_path))
    assert left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def test_the_plain_verl_line_runs_the_same_job_at_another_world_size(whole, tmp_path):
    overrides = [f"++crossrl.{o}" for o in (*SMALL, f"run_dir={tmp_path}", "steps=1")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=demo", "model_engine=crossrl_veomni"]
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    subprocess.run([*command, *overrides], env=env, check=True, capture_output=True, timeout=600)
    one, two = logged(tmp_path)[0]["data"], logged(whole[0])[0]["data"]
    assert one["update/first_ratio_deviation_max"] == 0.0
    assert one["reward/mean"] == pytest.approx(two["reward/mean"], abs=1e-6)
    assert one["update/grad_norm"] == pytest.approx(two["update/grad_norm"], rel=1e-3)


def test_sigterm_saves_and_says_so(tmp_path):
    process = start(tmp_path, "steps=500")
    wait_for(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    out = finish(process, code=128 + signal.SIGTERM)
    assert "stopping after the current step" in out and "resume=auto goes on" in out
    last = len(logged(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()


@pytest.mark.faults
def test_a_worker_that_is_killed_ends_the_run_with_the_cause_and_leaves_no_process(tmp_path):
    process = start(tmp_path, "steps=500")
    wait_for(tmp_path, 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    next(p for p in family if p.name().startswith("ray::RLWorker")).kill()
    out = finish(process, code=1)
    cause = out[out.index("the job failed") :]
    assert (
        "worker RLWorker (pid" in cause and "died" in cause and "resume=auto goes on" in cause and "full log: " in cause
    )
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert "step 500" not in out and list((tmp_path / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sed=1"], ["unknown key 'sed'", "'seed'"]),
        (["batch.prompst=1"], ["batch.prompst", "'prompts'"]),
        (["backend=veomi"], ["veomi", "did you mean 'veomni'"]),
        (["backend=mindspeed"], ["no source of MindSpeed-MM", "set MINDSPEED_MM_HOME"]),
        (["algorithm.etta=1"], ["algorithm.etta", "'eta'"]),
        (["rewards=[{name: beauty}]"], ["beauty", "installed"]),
        (["data.train=missing.parquet"], ["missing.parquet", "no such file"]),
        (["workers=3"], ["batch.prompts=8", "3"]),
        (["model.path=./nowhere"], ["nowhere"]),
        (["algorithm.timestep_fraction=0.01"], ["timestep_fraction=0.01"]),
        (["algorithm.best_of_n=32"], ["best_of_n=32", "16 samples"]),
    ],
)
def test_bad_input_is_one_clear_error_before_any_worker_starts(overrides, words, tmp_path):
    command = [CROSSRL, "run", "demo", f"run_dir={tmp_path}/run", *overrides]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MINDSPEED")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_the_plain_verl_line_refuses_bad_config_in_the_driver(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=demo", "++crossrl.batch.prompst=1"]
    done = subprocess.run(command, env={**os.environ, "VERL_PLATFORM": "cpu"}, capture_output=True, text=True)
    assert done.returncode != 0 and "batch.prompst" in done.stderr and "'prompts'" in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr


def test_sft_trains_on_clips_through_the_same_workers(tmp_path):
    overrides = ["model.path=toy", "steps=2", "batch.prompts=4", "data.sft_clips=8", "eval.samples=1", "eval.every=0"]
    command = [CROSSRL, "sft", "toy_base", f"run_dir={tmp_path}", *overrides]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithm"] == "flow_matching" and summary["steps"] == 2
    assert all(np.isfinite(row["data"]["update/loss"]) for row in logged(tmp_path))
