"""Where MindSpeed-MM is looked for, what is said when it is not there, and the config files: all without its source."""

import subprocess
import sys
from importlib import resources

import hydra
import pytest

from crossrl import doctor, registry
from crossrl.config import Model, Parallel
from crossrl.errors import ConfigError, PluginError
from crossrl_mindspeed import attention, compat, plugin, source
from crossrl_mindspeed.backend import backend

FILES = (
    "model_engine/crossrl_mindspeed",
    "actor/crossrl_mindspeed_actor",
    "ref/crossrl_mindspeed_ref",
    "critic/crossrl_mindspeed_critic",
)


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """Checkouts that look real from outside; the variables point to them."""
    for package, variable in source.VARIABLES.items():
        (tmp_path / variable / package / source.LANDMARKS[package]).mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / variable))
        monkeypatch.delitem(sys.modules, package, raising=False)  # where other tests have loaded the real one
    registry.refresh()
    yield tmp_path
    monkeypatch.undo()
    registry.refresh()


def listed():
    registry.refresh()
    return next(s for s in registry.status("crossrl.backends") if s.name == "mindspeed")


def test_both_checkouts_make_it_available(homes):
    assert source.locate("mindspeed_mm") == (homes / "MINDSPEED_MM_HOME/mindspeed_mm").resolve()
    assert source.obstacle() is None and listed().state == "ok"


def test_what_is_missing_is_named_with_the_way_to_get_it(homes, monkeypatch):
    monkeypatch.delenv("MINDSPEED_HOME")
    monkeypatch.setenv("MINDSPEED_MM_HOME", "/nowhere")
    reason = source.obstacle()
    for words in (
        "MINDSPEED_MM_HOME=/nowhere has no mindspeed_mm/fsdp/models",
        "no source of MindSpeed (neither MINDSPEED_HOME nor installed)",
        "git clone https://github.com/Ascend/MindSpeed-MM and set MINDSPEED_MM_HOME to it",
        "git clone https://github.com/Ascend/MindSpeed and set MINDSPEED_HOME to it",
    ):
        assert words in reason
    assert listed().state == f"unavailable: {reason}"
    with pytest.raises(PluginError, match="git clone"):
        registry.select("crossrl.backends", "mindspeed")


def test_a_placeholder_package_of_the_same_name_does_not_count(homes, monkeypatch, tmp_path):
    monkeypatch.delenv("MINDSPEED_HOME")
    (tmp_path / "site/mindspeed").mkdir(parents=True)
    (tmp_path / "site/mindspeed/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "no source of MindSpeed" in source.obstacle()


def test_a_checkout_without_the_parts_is_refused_by_their_names(homes):
    for package in source.VARIABLES:
        (homes / source.VARIABLES[package] / package / "__init__.py").write_text("")
    code = "from crossrl_mindspeed.source import components; components()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "lacks modeling (No module named 'mindspeed_mm.fsdp.models.wan2_2'" in done.stderr
    assert "ParallelApplier" in done.stderr and "clip_grad_norm" in done.stderr


def test_a_torch_npu_without_an_npu_is_explained(homes, monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: "a spec" if name == "torch_npu" else None)
    with pytest.raises(PluginError, match="torch_npu is installed but finds no NPU"):
        source._check_npu()
    monkeypatch.setattr(doctor, "find_spec", source.find_spec)
    monkeypatch.setattr(doctor, "_child", lambda command: (False, "ImportError: libhccl.so: cannot open shared object"))
    lines = [line for line, ok in doctor.examine() if not ok]
    assert "libhccl.so" in lines[0] and "CANN's libraries" in lines[1]


def test_looking_for_it_imports_nothing(homes):
    code = (
        "import sys, crossrl_mindspeed as c; c.plugin.available(); print({'torch', 'mindspeed_mm'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_plugin_names_this_backend():
    assert plugin.target == "crossrl_mindspeed.backend:backend"
    with pytest.raises(ConfigError, match="language"):
        backend.engine("language")


def test_the_fsdp_plan_follows_the_config():
    plan = compat.fsdp_plan(Model(path="x", dtype="bfloat16"), Parallel(), "npu:1", "blocks.{*}")
    assert plan == {
        "apply_modules": ["blocks.{*}"],
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "cast_forward_inputs": False,
        "reshard_after_forward": True,
        "num_to_forward_prefetch": 1,
        "num_to_backward_prefetch": 1,
    }
    plan = compat.fsdp_plan(Model(path="x"), Parallel(reshard_after_forward=False), "cpu", "blocks.{*}")
    assert (plan["param_dtype"], plan["reshard_after_forward"], plan["num_to_forward_prefetch"]) == (None, False, 0)


def test_attention_follows_device_and_dtype(monkeypatch):
    wanted = {"device": "cpu", "dtype": "float32", "ulysses": 1, "heads": 4}
    assert attention.choose(None, **wanted) == attention.EAGER
    monkeypatch.setattr(attention, "find_spec", lambda name: "a spec" if name == "torch_npu" else None)
    assert attention.choose(None, **wanted | {"device": "npu:0", "dtype": "bfloat16"}) == attention.FLASH
    assert attention.choose(None, **wanted | {"device": "npu:0"}) == attention.EAGER
    assert attention.choose(None, **wanted | {"device": "cuda", "dtype": "bfloat16"}) == attention.EAGER
    for name, words in (("sdpa", "unknown attention"), (attention.FLASH, "needs bfloat16")):
        with pytest.raises(ConfigError, match=words):
            attention.choose(name, **wanted)
    with pytest.raises(ConfigError, match="4 attention heads"):
        attention.choose(None, **wanted | {"ulysses": 3})


@pytest.mark.parametrize("name", FILES)
def test_the_package_holds_the_files(name):
    assert (resources.files("crossrl_mindspeed.conf") / f"{name}.yaml").is_file()


def test_verls_config_composes():
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["model_engine=crossrl_mindspeed"])
    actor = config.actor_rollout_ref.actor
    assert (config.model_engine, actor.strategy, actor.engine.strategy) == ("crossrl_mindspeed",) * 3
