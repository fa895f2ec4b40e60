"""verl's own config composes with `model_engine=crossrl_veomni`, and the wheel would carry the files for it."""

from importlib import resources

import hydra
import pytest

FILES = (
    "model_engine/crossrl_veomni",
    "actor/crossrl_veomni_actor",
    "ref/crossrl_veomni_ref",
    "critic/crossrl_veomni_critic",
)


@pytest.mark.parametrize("name", FILES)
def test_the_package_holds_the_files(name):
    assert (resources.files("crossrl_veomni.conf") / f"{name}.yaml").is_file()


def test_verls_config_composes():
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["model_engine=crossrl_veomni"])
    assert config.model_engine == "crossrl_veomni"
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.engine.strategy) == ("crossrl_veomni", "crossrl_veomni")
