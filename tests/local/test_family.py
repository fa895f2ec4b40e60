"""Every algorithm, two tiny iterations on the real engine and the real tiny model: it runs, measures and moves."""

import math

import pytest

from crossrl.loop import run_iteration
from tests.local.test_iteration import change, weights

METRICS = {
    "dance_grpo": {"ratio", "clip_high", "clip_low"},
    "flow_grpo": {"ratio", "kl", "clip_low"},
    "flow_cps": {"ratio", "clip_low"},
    "mix_grpo": {"ratio", "clip_low"},
    "grpo_guard": {"ratio", "guard_log_ratio"},
    "flow_dppo": {"ratio", "divergence", "masked_high", "masked_low"},
    "temp_flow": {"ratio", "kl", "clip_low"},
    "awm": {"ratio", "kl", "kl_old"},
    "dpo": {"margin", "accuracy", "paired"},
    "diffusion_nft": {"old_deviate", "kl"},
}
SPECIAL = {
    "mix_grpo": ("algorithm.window=2", "algorithm.tau=1"),
    "dpo": ("algorithm.best_of_n=4",),
    "diffusion_nft": ("algorithm.rows_per_sample=2",),
    "awm": ("algorithm.rows_per_sample=2",),
}


@pytest.mark.parametrize("name", METRICS)
def test_two_iterations_of_each_algorithm(job, name):
    small = ("batch.prompts=2", "batch.samples=4", "sampling.steps=4", "batch.updates=2", "optimizer.lr=1e-4")
    run = job(f"algorithm={name}", *small, *SPECIAL.get(name, ()))
    assert isinstance(run.workers.engine.algorithm, type(run.algorithm))
    before = weights(run)
    for step in range(2):
        metrics = run_iteration(run, step)
        assert METRICS[name] <= {key.removeprefix("update/") for key in metrics}
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["update/optimizer_steps"] == 2 and metrics["update/skipped"] == 0
        if "update/first_ratio_deviation_max" in metrics and step == 0:
            assert metrics["update/first_ratio_deviation_max"] < 1e-6
    assert max(float(d.abs().max()) for d in change(run, before).values()) > 0
    if name == "dpo":
        assert metrics["update/paired"] == 1


def test_rows_of_a_window_alone_are_trained(job):
    run = job("algorithm=mix_grpo", "algorithm.window=2", "batch.samples=4", "sampling.steps=6", "batch.updates=1")
    metrics = run_iteration(run, 0)
    assert metrics["rollout/forwards"] == 2 * 4 * 6 and metrics["update/forwards"] == 2 * 4 * 2
