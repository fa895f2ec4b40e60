"""The words a model says an action in: Qwen's tool calls and UI-TARS's calls, rendered and read strictly.

An answer is a thought, then a call. The first call that is valid wins; what follows it is ignored. Nothing is
evaluated. All codecs speak relative coordinates 0..1000 (`actions.SCALE`), which need no knowledge of how an image was
resized; a point outside is moved to the edge and counted (`Parsed.clamped`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Protocol

from crossrl_gui_agent.actions import BUTTONS, SCALE, STATUSES, Action, Kind, Malformed, Parsed
from crossrl_gui_agent.ui_tars import UiTars
from crossrl_gui_agent.verbs import Refused, Verb, permit, verb_for


class Codec(Protocol):
    """An action format."""

    name: str
    kinds: frozenset[Kind]  # those it can say

    def system_prompt(self, allowed: Collection[Kind] | None = None) -> str:
        """How to act, for the model: only the `allowed` kinds (None: all it can say)."""

    def render(self, action: Action, thought: str = "") -> str:
        """The answer that says this; `ConfigError` for a kind that the format has no words for."""

    def parse(self, text: str, allowed: Collection[Kind] | None = None) -> Parsed:
        """What an answer says. Never raises."""


_POINT_SCHEMA = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "xy": {**_POINT_SCHEMA, "description": f"(x, y), each 0 to {SCALE} from the left and the top edge"},
    "xy2": {**_POINT_SCHEMA, "description": f"(x, y) where it ends, each 0 to {SCALE}"},
    "text": {"type": "string"},
    "keys": {"type": "array", "items": {"type": "string"}},
    "pixels": {"type": "number", "description": "positive: up or left; negative: down or right"},
    "seconds": {"type": "number", "description": "how long"},
    "status": {"type": "string", "enum": list(STATUSES)},
}


class ToolCalls:
    """Qwen's function calls: one JSON object between <tool_call> tags, of the one tool named like the codec."""

    def __init__(self, name: str, about: str, verbs: tuple[Verb, ...]) -> None:
        self.name, self.about, self.verbs = name, about, verbs
        self.kinds = frozenset(verb.kind for verb in verbs)
        self._by_word = {verb.word: verb for verb in verbs}

    def system_prompt(self, allowed: Collection[Kind] | None = None) -> str:
        """The tool's signature in the frame that Qwen's chat template gives to tools."""
        verbs = [verb for verb in self.verbs if allowed is None or verb.kind in allowed]
        properties: dict[str, Any] = {"action": {"type": "string", "enum": [verb.word for verb in verbs]}}
        for verb in verbs:
            for name, to in verb.arguments.items():
                properties.setdefault(name, dict(_SCHEMAS[to.rstrip("?")]))
        if "button" in properties:
            properties["button"]["enum"] = [button.title() for button in BUTTONS]
        lines = [f"* {verb.word}{_arguments(verb)}: {verb.help}" for verb in verbs]
        signature = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "\n".join([self.about, *lines]),
                "parameters": {"type": "object", "properties": properties, "required": ["action"]},
            },
        }
        example = '{"name": <function-name>, "arguments": <args-json-object>}'
        return (
            f"# Tools\n\n<tools>\n{json.dumps(signature)}\n</tools>\n\nAnswer with a short thought, then one call in "
            f"XML tags:\n<tool_call>\n{example}\n</tool_call>"
        )

    def render(self, action: Action, thought: str = "") -> str:
        """The thought, then the call."""
        verb = verb_for(self.verbs, action, self.name)
        given = {name: list(v) if isinstance(v, tuple) else v for name, v in verb.said(action).items()}
        if action.kind is Kind.SYSTEM:
            given["button"] = given["button"].title()
        call = {"name": self.name, "arguments": {"action": verb.word, **given}}
        said = json.dumps(call, ensure_ascii=False)
        if re.search("</?(tool_call|think)>", said):  # a text that has our tags in it
            said = said.replace("<", r"\u003c")
        text = f"<tool_call>\n{said}\n</tool_call>"
        return f"{thought.strip()}\n{text}" if thought.strip() else text

    def parse(self, text: str, allowed: Collection[Kind] | None = None) -> Parsed:
        """The first valid call outside of <think> wins; else the error of the first call."""
        start = text.rfind("</think>") + 1
        tags = [match.end() for match in re.finditer("<tool_call>", text[start:])][:16]
        thought = text[: start + tags[0] - len("<tool_call>")] if tags else text
        thought = re.sub(r"</?think>", " ", thought).strip()
        errors: list[Malformed] = []
        for tag in tags:
            try:
                action, clamped = self._call(text[start + tag :].lstrip(), allowed)
                return Parsed(action, thought, None, clamped)
            except Refused as refused:
                errors.append(refused.reason)
        return Parsed(None, thought, errors[0] if errors else Malformed.NO_CALL)

    def _call(self, text: str, allowed: Collection[Kind] | None) -> tuple[Action, bool]:
        try:
            call, end = _JSON.raw_decode(text)
        except (ValueError, RecursionError):  # ValueError: also a number of more than 4300 digits
            raise Refused(Malformed.SYNTAX) from None
        if not text[end:].lstrip().startswith("</tool_call>") or not isinstance(call, dict):
            raise Refused(Malformed.SYNTAX)
        if call.get("name") != self.name:
            raise Refused(Malformed.UNKNOWN_TOOL)
        arguments = call.get("arguments")
        if call.keys() != {"name", "arguments"} or not isinstance(arguments, dict):
            raise Refused(Malformed.ARGUMENTS)
        word = arguments.get("action")
        if not isinstance(word, str) or word not in self._by_word:
            raise Refused(Malformed.UNKNOWN_ACTION)
        verb = self._by_word[word]
        permit(verb.kind, allowed)
        given = {name: value for name, value in arguments.items() if name != "action"}
        if verb.kind is Kind.SYSTEM and isinstance(given.get("button"), str):
            given["button"] = given["button"].lower()
        return verb.action(given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name given twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once)


def _arguments(verb: Verb) -> str:
    named = [f"{name} (optional)" if to.endswith("?") else name for name, to in verb.arguments.items()]
    return f" with {', '.join(named)}" if named else ""


_AT = {"coordinate": "xy"}
_LAST = (
    Verb("answer", Kind.ANSWER, "answer the question and end", {"text": "text"}),
    Verb("terminate", Kind.TERMINATE, "end the task and say whether it is done", {"status": "status"}),
)

_COMPUTER = ToolCalls(
    "computer_use",
    f"Mouse and keyboard of a computer. Coordinates go from 0 to {SCALE}. Actions:",
    (
        Verb("key", Kind.KEY, "press keys together", {"keys": "keys"}),
        Verb("type", Kind.TYPE, "type text", {"text": "text"}),
        Verb("mouse_move", Kind.MOVE, "move the pointer", _AT),
        Verb("left_click", Kind.CLICK, "click", _AT),
        Verb("left_click_drag", Kind.DRAG, "drag to there", {"start_coordinate": "xy?", "coordinate": "xy2"}),
        Verb("right_click", Kind.RIGHT_CLICK, "click with the right button", _AT),
        Verb("middle_click", Kind.MIDDLE_CLICK, "click with the middle button", _AT),
        Verb("double_click", Kind.DOUBLE_CLICK, "click twice", _AT),
        Verb("triple_click", Kind.TRIPLE_CLICK, "click three times", _AT),
        Verb("scroll", Kind.SCROLL, "turn the wheel", {"pixels": "pixels", "coordinate": "xy?"}),
        Verb("hscroll", Kind.HSCROLL, "turn the wheel sideways", {"pixels": "pixels", "coordinate": "xy?"}),
        Verb("wait", Kind.WAIT, "wait for the screen to change", {"time": "seconds?"}),
        *_LAST,
    ),
)
_MOBILE = ToolCalls(
    "mobile_use",
    f"Touch screen of a phone. Coordinates go from 0 to {SCALE}. Actions:",
    (
        Verb("click", Kind.CLICK, "tap", _AT),
        Verb("long_press", Kind.LONG_PRESS, "press and hold", {"coordinate": "xy", "time": "seconds?"}),
        Verb("swipe", Kind.DRAG, "swipe from there to there", {"coordinate": "xy", "coordinate2": "xy2"}),
        Verb("type", Kind.TYPE, "type text", {"text": "text"}),
        Verb("system_button", Kind.SYSTEM, "press a button of the system", {"button": "text"}),
        Verb("open", Kind.OPEN, "open the app of this name", {"text": "text"}),
        Verb("wait", Kind.WAIT, "wait for the screen to change", {"time": "seconds?"}),
        *_LAST,
    ),
)

CODECS: dict[str, Codec] = {codec.name: codec for codec in (_COMPUTER, _MOBILE, UiTars())}
