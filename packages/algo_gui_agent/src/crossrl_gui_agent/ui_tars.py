"""UI-TARS's action format."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from crossrl.errors import ConfigError
from crossrl_gui_agent.actions import SCALE, Action, Kind, Malformed, Parsed
from crossrl_gui_agent.verbs import Refused, Verb, permit, verb_for

_TARS_CALL = re.compile(r"\s*([a-z_]+)\(((?:[^'()]|'(?:[^'\\]|\\.)*')*)\)[ \t]*(?:\n|$)", re.DOTALL)
_TARS_ARGUMENT = re.compile(r"\s*([a-z_0-9]+)\s*=\s*'((?:[^'\\]|\\.)*)'\s*(,|$)", re.DOTALL)
_TARS_POINT = re.compile(
    r"(?:<\|box_start\|>)?\((-?\d{1,6}(?:\.\d{1,6})?),\s*(-?\d{1,6}(?:\.\d{1,6})?)\)(?:<\|box_end\|>)?"
)
_TARS_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_DIRECTIONS = {
    "up": (Kind.SCROLL, 1),
    "down": (Kind.SCROLL, -1),
    "left": (Kind.HSCROLL, 1),
    "right": (Kind.HSCROLL, -1),
}
NOTCH = 300  # pixels that a scroll of a format without a distance goes


class UiTars:
    """UI-TARS's answers: `Thought: ...`, then `Action: verb(argument='value', ...)`.

    It has no pixels to scroll by: a scroll is `NOTCH` pixels. `finished` with a text is an answer, without one success.
    """

    name = "ui_tars"
    verbs = (
        Verb("click", Kind.CLICK, "click", {"start_box": "xy"}),
        Verb("left_double", Kind.DOUBLE_CLICK, "double-click", {"start_box": "xy"}),
        Verb("right_single", Kind.RIGHT_CLICK, "click with the right button", {"start_box": "xy"}),
        Verb("long_press", Kind.LONG_PRESS, "press and hold", {"start_box": "xy"}),
        Verb("drag", Kind.DRAG, "drag from one point to another", {"start_box": "xy", "end_box": "xy2"}),
        Verb("hotkey", Kind.KEY, "press keys together, names joined by spaces", {"key": "keys"}),
        Verb("type", Kind.TYPE, r"type; \n at the end submits", {"content": "text"}),
        Verb("scroll", Kind.SCROLL, "scroll up, down, left or right", {"start_box": "xy", "direction": "pixels"}),
        Verb("wait", Kind.WAIT, "wait"),
        Verb("finished", Kind.TERMINATE, "the task is done; with the answer, if any", {"content": "text?"}),
        Verb("call_user", Kind.TERMINATE, "the task cannot be done"),
    )
    kinds = frozenset({verb.kind for verb in verbs} | {Kind.HSCROLL, Kind.ANSWER})
    _by_word = {verb.word: verb for verb in verbs}

    def system_prompt(self, allowed: Collection[Kind] | None = None) -> str:
        """The calls there are, one a line, and the form of an answer."""
        verbs = [verb for verb in self.verbs if allowed is None or verb.kind in allowed]
        values = {"xy": "(x,y)", "xy2": "(x,y)", "keys": "ctrl c", "pixels": "down", "text": "..."}
        lines = []
        for verb in verbs:
            given = ", ".join(f"{name}='{values[to.rstrip('?')]}'" for name, to in verb.arguments.items())
            lines.append(f"{verb.word}({given})  # {verb.help}")
        return (
            "You are a GUI agent. You see the screen and take the next action.\n\n## Form of an answer\nThought: ...\n"
            f"Action: ...\n\n## Actions (x and y go from 0 to {SCALE})\n" + "\n".join(lines)
        )

    def render(self, action: Action, thought: str = "") -> str:
        """The thought, then the call."""
        call = _tars_call(self.verbs, action)
        return f"Thought: {thought.strip()}\nAction: {call}" if thought.strip() else f"Action: {call}"

    def parse(self, text: str, allowed: Collection[Kind] | None = None) -> Parsed:
        """The first call after the first "Action:" is it."""
        before, marker, after = text.partition("Action:")
        thought = before.strip().removeprefix("Thought:").strip()
        if not marker:
            return Parsed(None, thought, Malformed.NO_CALL)
        try:
            action, clamped = self._call(after, allowed)
        except Refused as refused:
            return Parsed(None, thought, refused.reason)
        return Parsed(action, thought, None, clamped)

    def _call(self, text: str, allowed: Collection[Kind] | None) -> tuple[Action, bool]:
        match = _TARS_CALL.match(text)
        if not match:
            raise Refused(Malformed.SYNTAX)
        given = _tars_arguments(match[2])
        verb = self._by_word.get(match[1])
        if verb is None:
            raise Refused(Malformed.UNKNOWN_ACTION)
        action, clamped = _tars_action(verb, given)
        permit(action.kind, allowed)
        return action, clamped


def _tars_call(verbs: Collection[Verb], action: Action) -> str:
    if action.kind is Kind.ANSWER:
        return f"finished(content='{_quoted(action.text)}')"
    if action.kind is Kind.TERMINATE:
        return "finished()" if action.status == "success" else "call_user()"
    if action.kind in (Kind.SCROLL, Kind.HSCROLL):
        ways = {(kind, sign): word for word, (kind, sign) in _DIRECTIONS.items()}
        x, y = (SCALE // 2, SCALE // 2) if action.x is None else (action.x, action.y)
        return f"scroll(start_box='({x},{y})', direction='{ways[action.kind, 1 if action.pixels > 0 else -1]}')"
    verb = verb_for(verbs, action, "ui_tars")
    said = verb.said(action)
    if action.kind is Kind.DRAG and "start_box" not in said:
        raise ConfigError("ui_tars has no word for a drag from the pointer", where="codec", fix="give its start")
    return f"{verb.word}({', '.join(f'{name}={_tars_value(value)}' for name, value in said.items())})"


def _tars_value(value: Any) -> str:
    if isinstance(value, str):
        return f"'{_quoted(value)}'"
    return f"'({value[0]},{value[1]})'" if isinstance(value[0], int) else f"'{_quoted(' '.join(value))}'"


def _quoted(text: str) -> str:
    for char, escaped in (("\\", r"\\"), ("'", r"\'"), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t")):
        text = text.replace(char, escaped)
    return text


def _tars_arguments(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    position = 0
    while text[position:].strip():
        match = _TARS_ARGUMENT.match(text, position)
        if not match or match[1] in given:
            raise Refused(Malformed.SYNTAX)
        given[match[1]] = re.sub(r"\\(.)", lambda m: _TARS_ESCAPES.get(m[1], m[1]), match[2], flags=re.DOTALL)
        position = match.end()
    return given


def _tars_action(verb: Verb, given: dict[str, str]) -> tuple[Action, bool]:
    values: dict[str, Any] = dict(given)
    for name in {"start_box", "end_box"} & values.keys():
        match = _TARS_POINT.fullmatch(values[name].strip())
        if not match:
            raise Refused(Malformed.ARGUMENTS)
        values[name] = [float(match[1]), float(match[2])]
    if verb.kind is Kind.KEY and "key" in values:
        values["key"] = values["key"].split()
    if verb.kind is Kind.SCROLL and "direction" in values:
        if values["direction"] not in _DIRECTIONS:
            raise Refused(Malformed.ARGUMENTS)
        kind, sign = _DIRECTIONS[values["direction"]]
        verb, values["direction"] = Verb(verb.word, kind, verb.help, verb.arguments), sign * NOTCH
    if verb.kind is Kind.TERMINATE:
        if not values.keys() <= verb.arguments.keys():
            raise Refused(Malformed.ARGUMENTS)
        if values.get("content"):
            return Verb(verb.word, Kind.ANSWER, verb.help, verb.arguments).action(values)
        return Action(Kind.TERMINATE, status="success" if verb.word == "finished" else "failure"), False
    return verb.action(values)
