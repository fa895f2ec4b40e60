"""What the suites share: deviations that an implementer declares."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest


class Suite:
    """Tests that a subclass inherits. Those that it names in `deviations` are expected to fail, and must."""

    deviations: ClassVar[Mapping[str, str]] = {}  # name of a test -> why this plug-in may fail it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, reason in cls.deviations.items():
            inherited = getattr(cls, name, None)
            if inherited is None or not reason:
                raise TypeError(f"{cls.__name__}.deviations: {name!r} is no test of this suite, or has no reason")
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(_copy(inherited)))


def _copy(test: Any) -> Any:
    @functools.wraps(test)  # a mark must not reach the suite that others inherit from
    def run(*arguments: Any, **fixtures: Any) -> Any:
        return test(*arguments, **fixtures)

    return run
