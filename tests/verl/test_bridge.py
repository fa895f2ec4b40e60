"""Our engines behind verl's own interface, chosen by name from verl's registry."""

import tempfile

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry

from crossrl.errors import ConfigError, DeviceLeakError, PluginError
from crossrl.launch import _compose
from crossrl.verl.config import CrossRLModelConfig

DEMO = ["--config-name=demo"]


def engine_config(*overrides):
    tree = _compose(DEMO, list(overrides), "demo.yaml")
    return omega_conf_to_dataclass(tree.actor_rollout_ref.actor).engine


@pytest.fixture(scope="module")
def engine():
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    config = engine_config("++crossrl.algorithm.name=flow_matching", "++crossrl.data.sft=toy:train")
    yield EngineRegistry.new(
        "diffusion",
        config.strategy,
        model_config=CrossRLModelConfig(),
        engine_config=config,
        optimizer_config=None,
        checkpoint_config=None,
    )
    torch.distributed.destroy_process_group()


def batch(n=8, device="cpu"):
    torch.manual_seed(0)
    x0, eps, sigma = torch.randn(n, 8, 3, 4, 4), torch.randn(n, 8, 3, 4, 4), torch.rand(n)
    x = (1 - sigma.view(-1, 1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1, 1) * eps
    data = TensorDict({"x": x, "sigma": sigma, "target.velocity": eps - x0}, batch_size=n)
    if device != "cpu":
        data["x"] = data["x"].to(device)
    tensordict_utils.assign_non_tensor(data, prompts=["a red circle moving up"] * n)
    return data


def test_verls_train_batch_trains_rows(engine):
    losses = [sum(engine.train_batch(batch(), None)["loss"]) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert sum(engine.infer_batch(batch())["loss"]) < losses[0]


def test_a_tensor_off_the_host_is_refused_by_name(engine):
    with pytest.raises(DeviceLeakError, match=r"x"):
        engine.infer_batch(batch(device="meta"))


def test_every_installed_backend_is_registered_and_none_is_loaded():
    registered = EngineRegistry._engines["diffusion"]
    assert {"crossrl_veomni", "crossrl_mindspeed"} <= set(registered)
    assert all(set(devices) == {"cpu", "cuda", "npu"} for devices in registered.values())


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("++crossrl.batch.prompst=1", ConfigError, "'prompts'"),
        ("++crossrl.backend=mindspeed", ConfigError, "disagree"),
        ("++crossrl.algorithm.name=dance_grop", PluginError, "dance_grpo"),
        ("trainer.n_gpus_per_node=3", ConfigError, "divisible by the 3"),
    ],
)
def test_the_engine_config_refuses_in_the_driver(override, error, words):
    from hydra.errors import InstantiationException

    with pytest.raises((error, InstantiationException)) as caught:
        engine_config(override)
    assert words in str(caught.value)
