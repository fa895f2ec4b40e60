"""The words of an action format and their arguments, which the formats share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from crossrl.errors import ConfigError
from crossrl_gui_agent.actions import ALIASES, SCALE, Action, Kind, Malformed


class Refused(Exception):
    """Why a call is not valid."""

    def __init__(self, reason: Malformed) -> None:
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Verb:
    """A word of a format. `arguments`: its argument -> the `Action` field (`xy`, `xy2` are points); "?" = optional."""

    word: str
    kind: Kind
    help: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def action(self, given: Mapping[str, Any]) -> tuple[Action, bool]:
        """The action said with these arguments, and whether a point was clamped."""
        needed = {name for name, to in self.arguments.items() if not to.endswith("?")}
        if not needed <= given.keys() <= self.arguments.keys():
            raise Refused(Malformed.ARGUMENTS)
        values: dict[str, Any] = {}
        clamped = False
        for name, value in given.items():
            to = self.arguments[name].rstrip("?")
            if to in ("xy", "xy2"):
                (x, y), outside = _point(value)
                values |= dict(zip(("x", "y") if to == "xy" else ("x2", "y2"), (x, y), strict=True))
                clamped |= outside
            else:
                values[to] = _READERS[to](value)
        try:
            return Action(self.kind, **values), clamped
        except ConfigError:
            raise Refused(Malformed.ARGUMENTS) from None

    def said(self, action: Action) -> dict[str, Any]:
        """The arguments that say this action."""
        points = {"xy": (action.x, action.y), "xy2": (action.x2, action.y2)}
        fields = {name: to.rstrip("?") for name, to in self.arguments.items()}
        values = {name: points[to] if to in points else getattr(action, to) for name, to in fields.items()}
        return {name: value for name, value in values.items() if value is not None and value != (None, None)}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(Malformed.ARGUMENTS)
    try:
        number = float(value)
    except OverflowError:
        raise Refused(Malformed.ARGUMENTS) from None
    if not math.isfinite(number):
        raise Refused(Malformed.ARGUMENTS)
    return number


def _point(value: Any) -> tuple[tuple[int, int], bool]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Refused(Malformed.ARGUMENTS)
    exact = [round(_number(part)) for part in value]
    x, y = (max(0, min(SCALE, part)) for part in exact)
    return (x, y), [x, y] != exact


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(Malformed.ARGUMENTS)
    return value


def _keys(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(key, str) for key in value):
        raise Refused(Malformed.ARGUMENTS)
    return tuple(ALIASES.get(key.lower(), key.lower()) for key in value)


_READERS = {
    "text": _text,
    "keys": _keys,
    "pixels": lambda value: round(_number(value)),
    "seconds": _number,
    "status": _text,
}


def verb_for(verbs: Collection[Verb], action: Action, codec: str) -> Verb:
    """The word for this action; `ConfigError` if the format has none."""
    for verb in verbs:
        if verb.kind is action.kind:
            return verb
    raise ConfigError(f"{codec} has no word for {action.kind.value}", where="codec", fix="choose another gui.codec")


def permit(kind: Kind, allowed: Collection[Kind] | None) -> None:
    """Refuse a kind that is not among the allowed ones (None: all are)."""
    if allowed is not None and kind not in allowed:
        raise Refused(Malformed.UNSUPPORTED)
