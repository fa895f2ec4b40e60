"""Each rule of the linter fires on a config that was seen to work badly, and not on the shipped ones."""

import dataclasses

import pytest
from typer.testing import CliRunner

from crossrl import linter
from crossrl.build import build_algorithm
from crossrl.cli import app
from crossrl.config import RunConfig
from crossrl.launch import prepare
from crossrl.section import merged

RULES = {rule.__name__.removeprefix("_") for rule in (*linter._ANY, *linter._RL)}
BAD = {
    "global_batch": {"batch": {"prompts": 8, "samples": 8}},
    "group_size": {"batch": {"prompts": 32, "samples": 4}},
    "few_prompts": {"batch": {"prompts": 4, "samples": 24}},
    "guidance": {"sampling": {"guidance": 4.5}},
    "bf16_ratio": {"model": {"dtype": "bfloat16"}, "batch": {"rollout_micro": 8}},
    "eval_steps": {"eval": {"steps": 20}},
    "schedule_end": {"steps": 81},
}
GOOD = {
    "global_batch": {"batch": {"prompts": 8, "samples": 12}},
    "group_size": {"batch": {"prompts": 16, "samples": 8}},
    "few_prompts": {"batch": {"prompts": 5}},
    "guidance": {"eval": {"guidance": 5.0}},  # evaluation has its own
    "bf16_ratio": {"model": {"dtype": "bfloat16"}, "batch": {"rollout_micro": 128}},
    "eval_steps": {"eval": {"steps": 8}},
    "schedule_end": {"steps": 80},
}


@pytest.fixture(scope="module")
def demos():
    return {name: prepare("demo", [f"algorithm={name}"]) for name in ("dance_grpo", "diffusion_nft")}


@pytest.fixture
def fired(demos):
    """The advice, by rule, on the demo with some changes."""

    def fire(changes, algorithm="dance_grpo"):
        config = RunConfig.model_validate(merged(demos[algorithm].run.model_dump(), changes))
        return {a.rule: a for a in linter.advise(config, build_algorithm(config))}

    return fire


def test_the_shipped_configs_need_no_advice(demos):
    assert all(job.advice == [] for job in demos.values())
    assert prepare("toy_base", ["model.path=toy"]).advice == []  # supervised: nothing about groups


@pytest.mark.parametrize("rule", BAD)
def test_a_rule_fires_on_the_bad_config_alone(rule, fired):
    advice = fired(BAD[rule])
    assert set(advice) == {rule} and rule not in fired(GOOD[rule])
    assert advice[rule].key.split(".")[0] in ("batch", "sampling", "eval", "optimizer")
    assert all(isinstance(value, str) and value for value in dataclasses.astuple(advice[rule]))


def test_a_ratio_in_bf16_does_not_concern_algorithms_with_an_old_policy(fired):
    assert fired(BAD["bf16_ratio"], "diffusion_nft") == {}


@pytest.mark.parametrize(
    ("lr", "lora", "large", "advised"),
    [
        (3e-4, None, True, True),
        (2e-5, None, True, False),
        (5e-6, {}, True, True),
        (3e-4, {}, True, False),
        (3e-4, None, False, False),
        (5e-6, {}, False, False),
    ],
)
def test_learning_rates_are_judged_for_large_models_only(lr, lora, large, advised, tmp_path, fired):
    (tmp_path / "transformer").mkdir()
    with (tmp_path / "transformer" / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(linter.SMALL_MODEL_BYTES if large else 1000)  # a hole, no bytes on disk
    changes = {"optimizer": {"lr": lr}, "model": {"path": str(tmp_path), "lora": lora}}
    assert set(fired(changes)) == ({"learning_rate"} if advised else set())


def test_every_rule_is_tried_here():
    assert {*BAD, "learning_rate"} == RULES


def test_the_advice_of_the_algorithm_comes_first(fired):
    assert list(fired({"sampling": {"shift": 5, "guidance": 2}}, "diffusion_nft")) == ["nft_density", "guidance"]


def test_check_shows_config_command_and_advice():
    done = CliRunner().invoke(app, ["check", "demo", "sampling.guidance=2.0"])
    assert done.exit_code == 0
    assert '"guidance": 2.0' in done.stdout and "verl.trainer.main_ppo" in done.stdout
    assert "advice (guidance)" in done.stderr and "advice" not in done.stdout
