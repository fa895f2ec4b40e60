"""Every verl name that CrossRL touches, with the signature it relies on: the first thing to fail on another verl."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

BRIDGE = sorted((Path(__file__).parents[2] / "packages/core/src/crossrl/verl").glob("*.py"))

SIGNATURES = {
    "verl.trainer.ppo.v1.register_trainer": ["name"],
    "verl.utils.config.omega_conf_to_dataclass": ["config", "dataclass_type"],
    "verl.single_controller.base.decorator.register": [
        "dispatch_mode",
        "execute_mode",
        "blocking",
        "materialize_futures",
    ],
    "verl.utils.device.get_device_name": [],
    "verl.utils.tracking.Tracking": ["project_name", "experiment_name", "default_backend", "config"],
    "verl.single_controller.ray.RayResourcePool": [
        "process_on_nodes",
        "use_gpu",
        "name_prefix",
        "max_colocate_count",
        "detached",
        "accelerator_type",
    ],
}
MEMBERS = {
    "verl.workers.engine.EngineRegistry": {"register", "get_engine_cls", "new", "_engines"},
    "verl.workers.engine_workers.TrainingWorker": {"reset", "train_batch", "infer_batch", "to"},
    "verl.trainer.ppo.v1.PPOTrainer": {"on_step_end", "on_sample_end"},
    "verl.plugin.platform.PlatformRegistry": {"register"},
    "verl.single_controller.ray.RayWorkerGroup": {"world_size", "execute_all_async"},
}


def names_used() -> set[str]:
    used = set()
    for path in BRIDGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
    return used


def resolve(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None) or importlib.import_module(name)


@pytest.mark.parametrize("name", sorted(names_used()))
def test_name_exists(name):
    assert resolve(name) is not None


def test_we_touch_few_names():
    assert len(names_used()) < 40


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = [p for p in inspect.signature(resolve(name)).parameters if p != "self"]
    assert parameters == SIGNATURES[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_members(name):
    assert MEMBERS[name] <= set(dir(resolve(name)))


def test_platform_implements_every_abstract_member():
    from verl.plugin.platform import PlatformBase

    from crossrl.verl.platform import PlatformCPU

    assert PlatformBase.__abstractmethods__ and not PlatformCPU.__abstractmethods__
    assert PlatformCPU().device_name == "cpu" and not PlatformCPU().is_platform_available()
