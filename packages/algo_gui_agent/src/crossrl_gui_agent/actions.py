"""What an agent may do on a screen, independent of the words a model says it in.

Coordinates are relative: 0..1000 over the width and the height of the screen, whatever size the model sees it in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from crossrl.errors import ConfigError

SCALE = 1000  # the right and the lower edge
LONG_TEXT = 4000  # characters; more is refused


class Kind(StrEnum):
    """Every action there is."""

    CLICK = "click"
    DOUBLE_CLICK = "double_click"
    TRIPLE_CLICK = "triple_click"
    RIGHT_CLICK = "right_click"
    MIDDLE_CLICK = "middle_click"
    LONG_PRESS = "long_press"
    MOVE = "move"
    DRAG = "drag"
    TYPE = "type"
    KEY = "key"
    SCROLL = "scroll"
    HSCROLL = "hscroll"
    WAIT = "wait"
    SYSTEM = "system"
    OPEN = "open"
    ANSWER = "answer"
    TERMINATE = "terminate"


FINAL = frozenset({Kind.ANSWER, Kind.TERMINATE})
"""The actions that end an episode."""

_NAMED_KEYS = """
enter tab space backspace delete escape insert home end pageup pagedown up down left right ctrl shift alt meta
f1 f2 f3 f4 f5 f6 f7 f8 f9 f10 f11 f12
"""
KEYS = frozenset(_NAMED_KEYS.split())
"""Named keys; besides them a key is one printable character."""

ALIASES = {
    "return": "enter",
    "esc": "escape",
    "control": "ctrl",
    "cmd": "meta",
    "command": "meta",
    "super": "meta",
    "win": "meta",
    "option": "alt",
    "del": "delete",
    "page_up": "pageup",
    "page_down": "pagedown",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    " ": "space",
}
"""Other names of keys that are understood."""

BUTTONS = ("back", "home", "menu", "enter")
STATUSES = ("success", "failure")

_NEEDS: dict[Kind, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed.split()), frozenset(optional.split()))
    for kind, needed, optional in (
        *((kind, "x y", "") for kind in (Kind.CLICK, Kind.DOUBLE_CLICK, Kind.TRIPLE_CLICK, Kind.RIGHT_CLICK)),
        (Kind.MIDDLE_CLICK, "x y", ""),
        (Kind.LONG_PRESS, "x y", "seconds"),
        (Kind.MOVE, "x y", ""),
        (Kind.DRAG, "x2 y2", "x y"),
        (Kind.TYPE, "text", ""),
        (Kind.KEY, "keys", ""),
        (Kind.SCROLL, "pixels", "x y"),
        (Kind.HSCROLL, "pixels", "x y"),
        (Kind.WAIT, "", "seconds"),
        (Kind.SYSTEM, "text", ""),
        (Kind.OPEN, "text", ""),
        (Kind.ANSWER, "text", ""),
        (Kind.TERMINATE, "status", ""),
    )
}


@dataclass(frozen=True, slots=True)
class Action:
    """One action; a field that its kind does not have is None, anything else is refused with `ConfigError`.

    A drag goes from (x, y), or from where the pointer is, to (x2, y2). Scrolling by `pixels` > 0 is up, or left.
    `text` is what is typed, answered or opened, or the name of a system button.
    """

    kind: Kind
    x: int | None = None
    y: int | None = None
    x2: int | None = None
    y2: int | None = None
    text: str | None = None
    keys: tuple[str, ...] | None = None
    pixels: int | None = None
    seconds: float | None = None
    status: str | None = None

    def __post_init__(self) -> None:
        needed, optional = _NEEDS[self.kind]
        names = ("x", "y", "x2", "y2", "text", "keys", "pixels", "seconds", "status")
        given = {name for name in names if getattr(self, name) is not None}
        if not needed <= given <= needed | optional or ("x" in given) != ("y" in given):
            raise _wrong(self.kind, f"has {sorted(given)}, needs {sorted(needed)}")
        if any(not 0 <= getattr(self, name) <= SCALE for name in given & {"x", "y", "x2", "y2"}):
            raise _wrong(self.kind, f"lies outside 0..{SCALE}")
        if self.text is not None and not (0 < len(self.text) <= LONG_TEXT and _whole(self.text)):
            raise _wrong(self.kind, f"has no text, or more than {LONG_TEXT} characters, or half a character")
        if self.keys is not None and not (0 < len(self.keys) <= 8 and all(map(is_key, self.keys))):
            raise _wrong(self.kind, f"has keys {self.keys}")
        if self.pixels is not None and not 0 < abs(self.pixels) <= 100_000:
            raise _wrong(self.kind, f"scrolls by {self.pixels} pixels")
        if self.seconds is not None and not 0 < self.seconds <= 3600:
            raise _wrong(self.kind, f"takes {self.seconds} seconds")
        if self.status is not None and self.status not in STATUSES:
            raise _wrong(self.kind, f"has status {self.status!r}")
        if self.kind is Kind.SYSTEM and self.text not in BUTTONS:
            raise _wrong(self.kind, f"has button {self.text!r}")

    def short(self) -> str:
        """One line for a prompt's history."""
        parts: list[Any] = [self.kind.value]
        if self.x is not None:
            parts.append(f"({self.x}, {self.y})")
        if self.x2 is not None:
            parts.append(f"to ({self.x2}, {self.y2})")
        if self.text is not None:
            line = " ".join(self.text.split()) or "..."
            parts.append(json.dumps(line if len(line) <= 80 else f"{line[:77]}...", ensure_ascii=False))
        if self.keys is not None:
            parts.append("+".join(self.keys))
        if self.pixels is not None:
            parts.append(f"{self.pixels:+d}")
        if self.seconds is not None:
            parts.append(f"{self.seconds:g} s")
        return " ".join([*parts, *([self.status] if self.status else [])])


class Malformed(StrEnum):
    """Why an answer is no action."""

    NO_CALL = "no_call"  # nothing that looks like one
    SYNTAX = "syntax"  # it looks like one, but does not read as one
    UNKNOWN_TOOL = "unknown_tool"
    UNKNOWN_ACTION = "unknown_action"
    ARGUMENTS = "arguments"  # missing, unknown, of the wrong type or out of range
    UNSUPPORTED = "unsupported"  # an action that this environment does not have


@dataclass(frozen=True, slots=True)
class Parsed:
    """What an answer says: an action or the error, the thought before it, and whether a coordinate was clamped."""

    action: Action | None
    thought: str = ""
    error: Malformed | None = None
    clamped: bool = False


def is_key(name: str) -> bool:
    """Whether it names a key, in the one spelling that an `Action` takes."""
    return name in KEYS or (len(name) == 1 and name.isprintable() and name != " " and not name.isupper())


def to_pixels(x: int, y: int, width: int, height: int) -> tuple[int, int]:
    """The pixel that a relative point falls on; the edge 1000 is the last pixel."""
    return min(width - 1, x * width // SCALE), min(height - 1, y * height // SCALE)


def from_pixels(x: float, y: float, width: int, height: int) -> tuple[int, int]:
    """The relative point nearest to a position in pixels, clamped to the screen."""
    return max(0, min(SCALE, round(x * SCALE / width))), max(0, min(SCALE, round(y * SCALE / height)))


def _whole(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _wrong(kind: Kind, what: str) -> ConfigError:
    return ConfigError(f"{kind.value} {what}", where="Action")
