"""Where MindSpeed-MM comes from, and which of its parts are there: found by what they are, never by a version.

MindSpeed-MM and MindSpeed are not on PyPI (the names there are placeholders): they come from source checkouts named by
`MINDSPEED_MM_HOME` and `MINDSPEED_HOME`, or from an installation. Their own start-up patches (transformers' attention,
torch's fully_shard, megatron) are not applied: nothing here needs them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from crossrl import env
from crossrl.errors import PluginError

VARIABLES = {"mindspeed_mm": "MINDSPEED_MM_HOME", "mindspeed": "MINDSPEED_HOME"}
URLS = {
    "mindspeed_mm": "https://github.com/Ascend/MindSpeed-MM",
    "mindspeed": "https://github.com/Ascend/MindSpeed",
}
TITLES = {"mindspeed_mm": "MindSpeed-MM", "mindspeed": "MindSpeed"}

LANDMARKS = {"mindspeed_mm": "fsdp/models", "mindspeed": "fsdp/utils"}
"""A folder that the real package has and a placeholder of the same name has not."""

_FSDP = "mindspeed_mm.fsdp"
COMPONENTS = {
    "modeling": (f"{_FSDP}.models.wan2_2.modeling_wan2_2", f"{_FSDP}.models.wan.modeling_wan"),
    "states": (f"{_FSDP}.distributed.parallel_state",),
    "decorators": (f"{_FSDP}.utils.decorators",),
    "device": (f"{_FSDP}.utils.device",),
    "ParallelApplier": (f"{_FSDP}.distributed.torch_parallelize:ParallelApplier",),
    "ParallelArguments": (f"{_FSDP}.params.parallel_args:ParallelArguments",),
    "TrainingArguments": (f"{_FSDP}.params.training_args:TrainingArguments",),
    "FeatureArguments": (f"{_FSDP}.params.feature_args:FeatureArguments",),
    "FeaturesApplier": (f"{_FSDP}.features.apply_features:FeaturesApplier",),
    "build_optimizer": (f"{_FSDP}.optimizer.optimizer:build_optimizer",),
    "clip_grad_norm": (f"{_FSDP}.optimizer.clip_grad_norm:clip_grad_norm",),
    "add_lora_to_model": (f"{_FSDP}.utils.lora_utils:add_lora_to_model",),
}
"""What the engine uses: name -> where it may be ("module" or "module:attribute"), first found wins."""


@dataclass(frozen=True, slots=True)
class Components:
    """MindSpeed-MM's parts, as `COMPONENTS` names them."""

    modeling: ModuleType
    states: ModuleType
    decorators: ModuleType
    device: ModuleType
    ParallelApplier: type
    ParallelArguments: type
    TrainingArguments: type
    FeatureArguments: type
    FeaturesApplier: type
    build_optimizer: Any
    clip_grad_norm: Any
    add_lora_to_model: Any


def locate(package: str) -> Path | None:
    """The folder of `package` ("mindspeed_mm" or "mindspeed"); None if it is nowhere. Imports nothing."""
    home = env.mindspeed_homes()[package]
    if home:
        folders = [Path(home).expanduser() / package]
    else:
        spec = find_spec(package)
        folders = [Path(f) for f in (spec and spec.submodule_search_locations) or ()]
    return next((f.resolve() for f in folders if (f / LANDMARKS[package]).is_dir()), None)


def obstacle() -> str | None:
    """Why this backend cannot be selected, with what to do; None if both sources are there. Imports nothing."""
    missing = [package for package in VARIABLES if locate(package) is None]
    if not missing:
        return None
    homes, reasons = env.mindspeed_homes(), []
    for package in missing:
        home, want = homes[package], f"{package}/{LANDMARKS[package]}"
        where = f"{VARIABLES[package]}={home} has no {want}" if home else f"neither {VARIABLES[package]} nor installed"
        reasons.append(f"no source of {TITLES[package]} ({where})")
    steps = " and ".join(f"git clone {URLS[p]} and set {VARIABLES[p]} to it" for p in missing)
    return f"{'; '.join(reasons)}: {steps}"


@functools.cache
def components() -> Components:
    """MindSpeed-MM's parts, imported now (seconds); `PluginError` names those that are not there, and why."""
    if (reason := obstacle()) is not None:
        raise PluginError(reason, where="crossrl.backends")
    _check_npu()
    for package in reversed(VARIABLES):
        # MindSpeed-MM's package imports megatron unless told not to; its fsdp package patches transformers if so told
        with env.variables(NON_MEGATRON="true"):
            _load(package)
    with env.variables(NON_MEGATRON=""), _no_fully_shard_patch():
        found = {name: _first(candidates) for name, candidates in COMPONENTS.items()}
    absent = [f"{name} ({value})" for name, value in found.items() if isinstance(value, Exception)]
    if not absent and not hasattr(found["modeling"], "WanDiTFSDP2"):
        absent = ["WanDiTFSDP2 (not in modeling_wan2_2)"]
    if absent:
        raise PluginError(
            f"{TITLES['mindspeed_mm']} at {locate('mindspeed_mm')} lacks {', '.join(absent)}",
            where="crossrl.backends",
            fix=f"use a checkout of {URLS['mindspeed_mm']} near commit 57069cd5, which this release was tested with",
        )
    return Components(**found)


def _check_npu() -> None:
    """MindSpeed-MM takes an importable torch_npu for a working NPU."""
    if not find_spec("torch_npu"):
        return
    import torch

    if not (hasattr(torch, "npu") and torch.npu.is_available()):
        raise PluginError(
            "torch_npu is installed but finds no NPU: the driver or CANN is missing, or not in this environment",
            where="crossrl.backends",
            fix="source CANN's set_env.sh on a machine with an NPU, or uninstall torch_npu to use another device",
        )


def _load(package: str) -> None:
    """Import `package` from where it is, without putting the rest of the checkout on sys.path."""
    folder = locate(package)
    if package in sys.modules:
        return
    spec = spec_from_file_location(package, folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = sys.modules[package] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[package]
        raise


@contextmanager
def _no_fully_shard_patch() -> Iterator[None]:
    """Within it, MindSpeed-MM's variant of fully_shard is an empty module.

    The real one imports private names of torch 2.7.1 or 2.9.0, so that `import mindspeed_mm.fsdp` fails with others;
    it adds `hook_modules`, which are not used here.
    """
    name = f"{_FSDP}.ops.fully_shard.fully_shard"
    if name in sys.modules:
        yield
        return
    stand_in = sys.modules[name] = ModuleType(name)
    stand_in.apply_fully_shard_patch = lambda: None
    try:
        yield
    finally:
        del sys.modules[name]


def _first(candidates: tuple[str, ...]) -> Any:
    """The first candidate that can be imported, or the error of the first."""
    errors = []
    for candidate in candidates:
        module, _, attribute = candidate.partition(":")
        try:
            found = importlib.import_module(module)
            return getattr(found, attribute) if attribute else found
        except Exception as error:  # a foreign module may raise anything while it is imported
            errors.append(error)
    return errors[0]
