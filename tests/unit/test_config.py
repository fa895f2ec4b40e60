"""A config that cannot run is refused with the key, the file and a suggestion."""

import pickle

import pytest

from crossrl.config import RunConfig
from crossrl.errors import ConfigError
from crossrl.validation import validated

BASE = {
    "algorithm": "dance_grpo",
    "backend": "veomni",
    "model": {"path": "toy"},
    "data": {"train": "toy:train"},
    "rewards": [{"name": "toy"}],
}


def build(**changes):
    return validated(RunConfig, {**BASE, **changes}, source="job.yaml", prefix="crossrl.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sed": 1}, ("crossrl.sed", "'seed'")),
        ({"batch": {"prompt": 3}}, ("crossrl.batch.prompt", "'prompts'")),
        ({"model": {"path": "x", "lora": {"rnk": 3}}}, ("crossrl.model.lora.rnk", "'rank'")),
        ({"rewards": [{"nme": "toy"}]}, ("crossrl.rewards.0.nme", "'name'", "crossrl.rewards.0.name")),
        ({"batch": {"prompts": "many"}}, ("crossrl.batch.prompts", "integer", "'many'")),
        ({"batch": {"prompts": 0}}, ("crossrl.batch.prompts",)),
        ({"rewards": []}, ("crossrl.rewards",)),
        ({"optimizer": {"schedule": "cosine"}}, ("optimizer.total",)),
        ({"batch": {"samples": 6, "updates": 4}}, ("batch.updates=4", "batch.samples=6")),
        ({"resume": "nowhere"}, ("nowhere", "auto")),
        ({"algorithm": {}}, ("algorithm.name",)),
    ],
)
def test_errors_name_the_key_and_suggest(changes, words):
    with pytest.raises(ConfigError) as caught:
        build(**changes)
    assert all(word in str(caught.value) for word in ("job.yaml", *words))


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        build(sed=1, stepz=3)
    assert "sed" in str(caught.value) and "stepz" in str(caught.value)


def test_for_algorithm_sets_values_that_explicit_ones_override():
    table = {"dance_grpo": {"algorithm": {"eta": 0.7}, "batch": {"updates": 4, "samples": 8}}, "other": {"steps": 1}}
    run = build(for_algorithm=table, batch={"samples": 4})
    assert run.algorithm == {"name": "dance_grpo", "eta": 0.7}
    assert (run.batch.updates, run.batch.samples) == (4, 4)
    assert build(for_algorithm=table, algorithm="other").steps == 1


def test_world_size_that_does_not_divide_the_batch_is_refused():
    run = build(batch={"prompts": 6})
    run.check_world_size(3)
    with pytest.raises(ConfigError, match=r"batch.prompts=6 is not divisible by the 4"):
        run.check_world_size(4)


def test_a_resolved_config_validates_to_itself():
    run = build()
    assert RunConfig.model_validate(run.model_dump(mode="json")) == run


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("bad", where="a.yaml", fix="do")))
    assert str(error) == "a.yaml: bad\n  -> do"
