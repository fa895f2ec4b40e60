"""The start-up gate passes what is right, names what is wrong, and leaves no trace."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from crossrl import job as jobs
from crossrl.errors import GateError
from crossrl.gate import pass_gate
from crossrl.loop import run_iteration
from crossrl.spy import undisturbed
from crossrl.types import Score
from tests.local.test_iteration import weights

LORA = "model.lora={rank: 4, alpha: 8}"
FINE = "sampling.steps=5"  # timesteps 800, 600 ... are whole at shift 1
COARSE = ("sampling.steps=7", "sampling.shift=1.3")  # timesteps with decimals


@pytest.fixture
def small(job):
    """Makes a run whose start-up gate is cheap."""
    return lambda *overrides, **engine: job("batch.samples=4", *overrides, **engine)


@pytest.fixture(scope="module")
def engines():
    """Engines by algorithm: building one takes as long as the gate. Tests break them through `monkeypatch` only."""
    return {}


@pytest.fixture
def shared(small, engines):
    """Makes such a run on an engine that other tests use as well."""

    def make(*overrides, algorithm="dance_grpo"):
        run = small(f"algorithm={algorithm}", *overrides, engine=engines.get(algorithm))
        engines[algorithm] = run.workers.engine
        return run

    return make


def statuses(checks):
    return {c.name: c.status for c in checks}


def refusal(run):
    with pytest.raises(GateError) as caught:
        pass_gate(run)
    rows = json.loads(Path(run.config.run_dir, "gate.json").read_text())["checks"]
    return str(caught.value), {row["name"]: row["status"] for row in rows}


@pytest.mark.parametrize("lora", [(), (LORA,)], ids=["full", "lora"])
@pytest.mark.parametrize("algorithm", ["dance_grpo", "diffusion_nft"])
def test_the_demo_passes(job, algorithm, lora):
    run = job(f"algorithm={algorithm}", *lora)
    found = statuses(pass_gate(run))
    no_ratio = {"ratio is 1", "log-ratio has no bias", "kappa is below its spread"}
    skipped = {name for name, status in found.items() if status == "skip"}
    assert skipped == (no_ratio if algorithm == "diffusion_nft" else set())
    assert set(found.values()) <= {"ok", "skip"}
    assert ("adapters are bound" if lora else "gradients reach the weights") in found
    kept = json.loads(Path(run.config.run_dir, "gate.json").read_text())
    assert len(kept["ratio_by_sigma"]) == (7 if algorithm == "dance_grpo" else 0)
    assert all(row["kappa"] < 1e-3 for row in kept["ratio_by_sigma"])
    rollout, rows = 4 * 8, 4 * (7 if algorithm == "dance_grpo" else 8)
    assert kept["ranks"][0]["forwards"] < 6 * (rollout + rows)


def test_supervised_training_passes(job):
    run = job("algorithm=flow_matching", "data.sft=toy:train", "data.sft_clips=8", "algorithm.density=uniform")
    run.data = None
    found = statuses(pass_gate(run))
    assert found["gradients reach the weights"] == found["velocity: training = rollout"] == "ok"
    assert "groups are whole" not in found and set(found.values()) <= {"ok", "skip"}


def timeless(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith(("_s", "seconds", "_bytes"))}


def test_a_job_with_the_gate_is_the_job_without_it(small, tmp_path):
    (tmp_path / "few.txt").write_text("a red circle moving up\n")

    def train(gate):
        few = ("steps=1", f"data.heldout={tmp_path}/few.txt", "eval.samples=1")
        run = small(f"run_dir={tmp_path}/{gate}", f"gate={gate}", FINE, *few)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        logged = {}
        jobs.train(run.config, run.workers, run.rewards, run.algorithm, lambda: lambda m, step: logged.update(m))
        return weights(run), timeless(logged), (random.random(), np.random.random(), float(torch.rand(())))

    (gated, logged, streams), (plain, expected, plain_streams) = train("true"), train("false")
    assert (tmp_path / "true/gate.json").exists() and not (tmp_path / "false/gate.json").exists()
    assert logged == expected and streams == plain_streams
    assert all(torch.equal(p, plain[n]) for n, p in gated.items())


def test_an_iteration_after_the_gate_is_the_one_without_it(small):
    def iterate(gate):
        run = small("algorithm=diffusion_nft", "model.ema=0.9", FINE, LORA)
        if gate:
            pass_gate(run)
        metrics = timeless(run_iteration(run, 0))
        slots = {}
        for slot in ("ema", "old", "reference"):
            with run.workers.engine.slot(slot):
                slots[slot] = weights(run)
        return metrics, weights(run), slots

    (metrics, after, slots), (expected, plain, plain_slots) = iterate(True), iterate(False)
    assert metrics == expected and all(torch.equal(p, plain[n]) for n, p in after.items())
    assert all(torch.equal(p, plain_slots[slot][n]) for slot in slots for n, p in slots[slot].items())


def test_the_engine_comes_back_as_it_was_even_after_an_error(shared):
    engine = shared(FINE).workers.engine
    engine.forwards, engine.seconds["denoise"] = 7, 1.5
    before = dict(vars(engine))
    with pytest.raises(ZeroDivisionError):
        with undisturbed(engine):
            engine.condition(["a red circle moving up"])
            engine.forwards, engine.algorithm, engine.seconds["denoise"] = 1, None, 0.0
            raise ZeroDivisionError
    assert all(vars(engine)[name] is value for name, value in before.items())
    assert engine.seconds == {"denoise": 1.5} and not engine._texts._entries


def test_a_weight_that_is_not_a_number_is_named(shared):
    run = shared(FINE)
    name, weight = list(run.workers.engine.module.named_parameters())[40]
    good = weight.detach().clone()
    weight.data.view(-1)[3] = float("nan")
    text, found = refusal(run)
    weight.data.copy_(good)
    assert name in text and "model.path" in text
    assert found["weights are finite"] == found["loss is finite"] == "fail"
    assert found["ratio is 1"] == found["without noise: is the ODE"] == found["samples of a group differ"] == "skip"


def test_an_overflow_in_the_forward_is_named_by_module(shared):
    run = shared(FINE)
    network = run.workers.engine.module
    name, module = next((n, m) for n, m in network.named_modules() if n.endswith("blocks.1.ffn"))
    hook = module.register_forward_hook(lambda _m, _i, out: out * float("inf"))
    text, found = refusal(run)
    hook.remove()
    assert found["weights are finite"] == "ok" and found["loss is finite"] == "fail"
    assert f"first not finite in the forward: {name}" in text


@pytest.mark.parametrize("algorithm", ["dance_grpo", "diffusion_nft"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "rollout"])
def test_a_timestep_cut_to_an_integer_in_one_mode_only(shared, monkeypatch, algorithm, training):
    run = shared(*COARSE, algorithm=algorithm)
    engine, predict = run.workers.engine, run.workers.engine.predict

    def cut(x, sigma, condition):
        if torch.is_grad_enabled() is training:
            sigma = (1000 * sigma).floor() / 1000
        return predict(x, sigma, condition)

    monkeypatch.setattr(engine, "predict", cut)
    text, found = refusal(run)
    assert found["velocity: training = rollout"] == "fail" and "float" in text
    if algorithm == "dance_grpo":
        assert found["ratio is 1"] == "fail" and "at sigma" in text


def test_samples_that_depend_on_their_neighbours(shared, monkeypatch):
    run = shared(FINE)
    engine, predict = run.workers.engine, run.workers.engine.predict
    monkeypatch.setattr(engine, "predict", lambda x, sigma, condition: predict(x + 0.01 * x.sum(0), sigma, condition))
    text, found = refusal(run)
    assert found["samples: micro-batch 1 = rollout_micro"] == "fail" and "batch.rollout_micro" in text
    assert found["loss: micro-batch 1 = update_micro"] == "fail"


def test_an_algorithm_that_ignores_the_samples_index(shared, monkeypatch):
    run = shared(FINE)
    algorithm = run.workers.engine.algorithm
    sample = algorithm.sample

    def same_for_all(predict, noise, *rest):
        def shared(tag, *, shared=False):
            return noise(tag, shared=True)

        shared.seed, shared.step = noise.seed, noise.step
        return sample(predict, shared, *rest)

    monkeypatch.setattr(algorithm, "sample", same_for_all)
    text, found = refusal(run)
    assert found["samples of a group differ"] == "fail" and "sample's index" in text


def test_a_deterministic_sampler_that_is_not(shared, monkeypatch):
    run = shared(FINE)
    algorithm, count = run.workers.engine.algorithm, itertools.count()
    sample = algorithm.sample

    def noisy(predict, noise, keys, sampling, keep):
        latents, trajectory = sample(predict, noise, keys, sampling, keep)
        return latents + 0.01 * next(count) * noise("more"), trajectory

    monkeypatch.setattr(algorithm, "sample", noisy)
    text, found = refusal(run)
    assert found["without noise: repeats"] == "fail" and "stochastic=False" in text
    assert found["without noise: is the ODE"] == "warn"


def test_videos_that_depend_on_the_decoders_chunk(shared, monkeypatch):
    run = shared(FINE)
    family, decode = run.workers.engine.family, run.workers.engine.family.decode
    monkeypatch.setattr(family, "decode", lambda latents: decode(latents / latents.abs().max()))
    text, found = refusal(run)
    assert found["decoding: one by one = decode_micro"] == "fail" and "batch.decode_micro" in text


def test_an_adapter_without_a_gradient_is_named(small):
    run = small(FINE, LORA)
    name, weight = next((n, p) for n, p in run.workers.engine.module.named_parameters() if "lora_B" in n)
    weight.register_hook(torch.zeros_like)
    text, found = refusal(run)
    assert found["adapters are bound"] == "fail" and name in text and "model.lora.targets" in text


class Moody:
    """A reward that never says the same twice, or nothing at all."""

    name, range = "moody", (0.0, 100.0)

    def __init__(self, value):
        self.value = value

    def score(self, samples):
        return [Score(self.value()) for _ in samples]


def test_a_reward_that_changes_its_mind_is_a_warning(shared):
    run, count = shared(FINE), itertools.count()
    run.rewards.rewards.rewards = [Moody(lambda: float(next(count)))]
    assert statuses(pass_gate(run))["rewards repeat"] == "warn"
    run.rewards.rewards.rewards = [Moody(lambda: 1.0)]
    assert statuses(pass_gate(run))["rewards tell samples apart"] == "warn"


def test_a_reward_that_cannot_score_stops_the_run_before_it_starts(shared):
    run = shared(FINE)
    run.rewards.rewards.rewards = [Moody(lambda: float("nan"))]
    text, found = refusal(run)
    assert found["rewards score"] == "fail" and "nan is not a score" in text
