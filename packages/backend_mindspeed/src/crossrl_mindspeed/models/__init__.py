"""Model families that this backend trains: one module each."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from crossrl.errors import ConfigError

_FAMILIES = {"wan": "crossrl_mindspeed.models.wan"}


def family_module(name: str) -> ModuleType:
    """The module of a model family; raises `ConfigError` for one that this backend does not know."""
    if name not in _FAMILIES:
        raise ConfigError(
            f"the mindspeed backend does not train model family {name!r}",
            where="model.family",
            fix=f"one of {sorted(_FAMILIES)}",
        )
    return import_module(_FAMILIES[name])
