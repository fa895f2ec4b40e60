"""Every action survives its words, no answer breaks the reader, and only the closed set gets through."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossrl.errors import ConfigError
from crossrl_gui_agent.actions import BUTTONS, KEYS, SCALE, Action, Kind, Malformed, from_pixels, is_key, to_pixels
from crossrl_gui_agent.codecs import CODECS
from crossrl_gui_agent.ui_tars import NOTCH

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

point = st.integers(0, SCALE)
text = st.text(min_size=1, max_size=60).filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t))
keys = st.lists(st.sampled_from(sorted(KEYS)) | st.characters().filter(is_key), min_size=1, max_size=3).map(tuple)
pixels = st.integers(-2000, 2000).filter(bool)
thought = st.text("abc XYZ.,:\n", max_size=40).filter(lambda t: "Action:" not in t).map(str.strip)

_AT = (Kind.CLICK, Kind.DOUBLE_CLICK, Kind.TRIPLE_CLICK, Kind.RIGHT_CLICK, Kind.MIDDLE_CLICK, Kind.MOVE)
actions = st.one_of(
    st.builds(Action, st.sampled_from(_AT), point, point),
    st.builds(Action, st.just(Kind.LONG_PRESS), point, point),
    st.builds(Action, st.just(Kind.DRAG), point, point, point, point),
    st.builds(Action, st.sampled_from([Kind.TYPE, Kind.ANSWER, Kind.OPEN]), text=text),
    st.builds(Action, st.just(Kind.KEY), keys=keys),
    st.builds(Action, st.sampled_from([Kind.SCROLL, Kind.HSCROLL]), point, point, pixels=pixels),
    st.just(Action(Kind.WAIT)),
    st.builds(Action, st.just(Kind.SYSTEM), text=st.sampled_from(BUTTONS)),
    st.builds(Action, st.just(Kind.TERMINATE), status=st.sampled_from(["success", "failure"])),
)
each = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def call(arguments, name="computer_use"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@each
@QUICK
@given(action=actions, thought=thought)
def test_an_action_survives_its_words(codec, action, thought):
    if action.kind not in codec.kinds:
        with pytest.raises(ConfigError, match="no word"):
            codec.render(action)
        return
    if codec.name == "ui_tars" and action.pixels:
        action = Action(action.kind, action.x, action.y, pixels=NOTCH if action.pixels > 0 else -NOTCH)
    parsed = codec.parse(codec.render(action, thought))
    assert (parsed.action, parsed.thought, parsed.error, parsed.clamped) == (action, thought, None, False)
    assert codec.parse(codec.render(action), codec.kinds - {action.kind}).error is Malformed.UNSUPPORTED
    assert len(action.short().splitlines()) == 1


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "computer_use", "arguments": ', '{"action": ', "{",
    "}", "[", "]", '"left_click"', ', "coordinate": ', "[1, 2]", "1e999", "NaN", "-Infinity", "9" * 5000, "[" * 3000,
    "Action: ", "Thought: ", "click(", "start_box=", "'(1,2)'", "'", "\\", ")", ",", "\n", "null", "true", "\x00",
]  # fmt: skip


@each
@QUICK
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=14).map("".join))
def test_no_answer_breaks_the_reader(codec, answer):
    parsed = codec.parse(answer)
    assert (parsed.action is None) == (parsed.error is not None)
    assert parsed.action is None or parsed.action.kind in codec.kinds


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("left_click [1, 2]", Malformed.NO_CALL),
        ("", Malformed.NO_CALL),
        ('<tool_call>{"name": "computer_use"', Malformed.SYNTAX),
        (call({"action": "wait"}).removesuffix("</tool_call>"), Malformed.SYNTAX),
        (call({"action": "wait"}).replace("\n</", "} </"), Malformed.SYNTAX),
        ('<tool_call>{"name": "computer_use", "name": "x", "arguments": {}}</tool_call>', Malformed.SYNTAX),
        ("<tool_call>[1]</tool_call>", Malformed.SYNTAX),
        (call({"action": "wait"}, "mobile_use"), Malformed.UNKNOWN_TOOL),
        (call({"action": "rm -rf"}), Malformed.UNKNOWN_ACTION),
        (call({"action": ["left_click"], "coordinate": [1, 2]}), Malformed.UNKNOWN_ACTION),
        (call({"action": "left_click"}), Malformed.ARGUMENTS),
        (call({"action": "left_click", "coordinate": [1, 2, 3]}), Malformed.ARGUMENTS),
        (call({"action": "left_click", "coordinate": ["1", 2]}), Malformed.ARGUMENTS),
        (call({"action": "left_click", "coordinate": [True, 2]}), Malformed.ARGUMENTS),
        (call({"action": "left_click", "coordinate": [float("nan"), 2]}), Malformed.ARGUMENTS),
        (call({"action": "left_click", "coordinate": [1, 2], "text": "x"}), Malformed.ARGUMENTS),
        (call({"action": "answer", "text": ""}), Malformed.ARGUMENTS),
        (call({"action": "type", "text": "\ud800"}), Malformed.ARGUMENTS),
        (call({"action": "key", "keys": ["hyper"]}), Malformed.ARGUMENTS),
        (call({"action": "terminate", "status": "fine"}), Malformed.ARGUMENTS),
        (f"<think>{call({'action': 'wait'})}</think> no", Malformed.NO_CALL),
    ],
)
def test_what_is_refused_and_why(answer, error):
    assert CODECS["computer_use"].parse(answer).error is error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("click(start_box='(1,2)')", Malformed.NO_CALL),
        ("Action: click(start_box=(1,2))", Malformed.SYNTAX),
        ("Action: click(start_box='(1,2)') and more", Malformed.SYNTAX),
        ("Action: __import__('os').system('true')", Malformed.SYNTAX),
        ("Action: click(start_box='(1,2)', start_box='(3,4)')", Malformed.SYNTAX),
        ("Action: press(start_box='(1,2)')", Malformed.UNKNOWN_ACTION),
        ("Action: click(start_box='1,2')", Malformed.ARGUMENTS),
        ("Action: scroll(start_box='(1,2)', direction='away')", Malformed.ARGUMENTS),
        ("Action: call_user(content='x')", Malformed.ARGUMENTS),
    ],
)
def test_what_ui_tars_refuses_and_why(answer, error):
    assert CODECS["ui_tars"].parse(answer).error is error


def test_the_first_valid_call_wins():
    codec = CODECS["computer_use"]
    first, second = Action(Kind.CLICK, 1, 2), Action(Kind.CLICK, 3, 4)
    bad = call({"action": "left_click"})
    assert codec.parse(codec.render(first) + codec.render(second)).action == first
    assert codec.parse(bad + codec.render(second)).action == second
    assert CODECS["ui_tars"].parse("Action: wait()\n\nclick(start_box='(1,2)')").action == Action(Kind.WAIT)


def test_points_outside_are_moved_to_the_edge_and_counted():
    parsed = CODECS["computer_use"].parse(call({"action": "left_click", "coordinate": [-5, 1000.4]}))
    assert (parsed.action, parsed.clamped) == (Action(Kind.CLICK, 0, 1000), True)
    parsed = CODECS["ui_tars"].parse("Action: click(start_box='<|box_start|>(1500,3)<|box_end|>')")
    assert (parsed.action, parsed.clamped) == (Action(Kind.CLICK, 1000, 3), True)


@each
def test_the_prompt_offers_what_is_allowed_only(codec):
    whole, few = codec.system_prompt(), codec.system_prompt({Kind.CLICK})
    word = "call_user" if codec.name == "ui_tars" else "terminate"
    assert word in whole and word not in few and "click" in few


@QUICK
@given(st.integers(1, 4000), st.integers(1, 4000), st.data())
def test_points_survive_pixels(width, height, data):
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    back = to_pixels(*from_pixels(x + 0.5, y + 0.5, width, height), width, height)
    assert all(abs(a - b) <= 1 + size / SCALE for a, b, size in zip(back, (x, y), (width, height), strict=True))
    assert to_pixels(SCALE, SCALE, width, height) == (width - 1, height - 1)
    assert width > 500 or height > 500 or back == (x, y)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": Kind.CLICK},
        {"kind": Kind.CLICK, "x": 1, "y": 1001},
        {"kind": Kind.WAIT, "x": 1, "y": 1},
        {"kind": Kind.DRAG, "x": 1, "x2": 1, "y2": 1},
        {"kind": Kind.SCROLL, "pixels": 0},
        {"kind": Kind.TYPE, "text": ""},
        {"kind": Kind.SYSTEM, "text": "power"},
    ],
)
def test_an_action_is_whole(wrong):
    with pytest.raises(ConfigError):
        Action(**wrong)
