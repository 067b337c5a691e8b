"""One internal form of messages, whatever a file or a server calls their parts."""

import json
from datetime import datetime
from decimal import Decimal

import pytest

from ctcdraft.data.messages import for_server, read_tools, read_turn
from ctcdraft.data.sources import RowError

ARGUMENTS = {"zone": "UTC", "n": 2}
CALL = {"type": "function", "function": {"name": "clock", "arguments": ARGUMENTS}}


def read(turn, role="assistant"):
    unread = []
    return read_turn({"role": role, **turn}, "turn 3", unread), unread


def answer(**keys):
    return {"role": "assistant", "content": "", **keys}


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": json.dumps(ARGUMENTS)}}]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": CALL},
        {"tool_calls": [{"name": "clock", "arguments": ARGUMENTS}]},
        {"tool_calls": [{"function": {"name": "clock", "arguments": {**ARGUMENTS, "city": None}}, "type": None}]},
        {"tool_calls": None, "function_call": {"name": "clock", "arguments": json.dumps(ARGUMENTS)}},
        {"function_call": json.dumps({"name": "clock", "arguments": ARGUMENTS})},
        {"tool_calls": [CALL], "function_call": {"name": None, "arguments": None}},
        {"content": [{"type": "tool_use", "name": "clock", "input": ARGUMENTS}]},
        {"content": json.dumps({"name": "clock", "arguments": ARGUMENTS}), "role": "function_call"},
        {"content": json.dumps([{"name": "clock", "parameters": ARGUMENTS}]), "role": "tool_call"},
    ],
)
def test_a_call_has_its_arguments_as_an_object_however_it_is_written(said):
    assert read(said) == ([answer(tool_calls=[CALL])], [])


def test_a_call_keeps_its_id_and_null_within_json_text():
    text = {"id": "call12345", "function": {"name": "f", "arguments": '{"x": null}'}}
    assert read({"tool_calls": [text]})[0][0]["tool_calls"] == [
        {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    ]
    for nothing in ("", " ", None, {}, "{}", "null"):
        (message,), _ = read({"tool_calls": [{"function": {"name": "f", "arguments": nothing}}]})
        assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"x": '}}]}, "what turn 3 gives to f is no JSON"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "what turn 3 gives to f is no JSON object"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "turn 3 calls a tool without a name"),
        ({"tool_calls": ["f"]}, "turn 3 calls a tool without a name"),
        ({"tool_calls": "f()"}, "the call of turn 3 is no JSON"),
        ({"content": [{"type": "image_url", "text": "x"}]}, r"a part that is no text \(image_url\)"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, r"no text \(redacted_thinking\)"),
        ({"content": 7}, "turn 3 holds no text but a int"),
        ({"content": [{"type": "text", "text": 7}]}, "turn 3 holds no text but a int"),
        ({"reasoning": 7, "content": "a"}, "the thought of turn 3 holds no text but a int"),
        ({"content": [{"type": "tool_result", "content": "x"}]}, "another's turn"),
        ({"content": [{"type": "thinking", "thinking": "x"}], "role": "user"}, "another's turn"),
        ({"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]}, "surrogate"),
    ],
)
def test_what_cannot_be_read_says_what_it_is(said, reason):
    with pytest.raises(RowError, match=reason):
        read(said)


@pytest.mark.parametrize("value", [datetime(2024, 7, 26), Decimal("1.5"), b"x"])
def test_a_value_of_a_table_that_json_has_not_is_a_reject(value):
    held = {"x": [value]}
    for said, role in (
        ({"tool_calls": [{"name": "f", "arguments": held}]}, "assistant"),
        ({"content": held}, "tool"),
        ({"content": [{"type": "tool_result", "content": held}]}, "user"),
        ({"content": [{"type": "tool_result", "tool_use_id": value, "content": "a"}]}, "user"),
    ):
        with pytest.raises(RowError, match=rf"turn 3 is no JSON \(Object of type {type(value).__name__}"):
            read(said, role)
    with pytest.raises(RowError, match=rf"'tools' is no JSON \(Object of type {type(value).__name__}"):
        read_tools([{"name": "f", "parameters": held}])


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"thought": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "output_text", "text": "a"}]},
    ],
)
def test_a_thought_is_one_whatever_it_is_called(said):
    assert read({"content": "a", **said}) == ([{"role": "assistant", "content": "a", "reasoning_content": "hm"}], [])


def test_a_thought_that_is_blank_is_none_and_one_that_differs_is_unread():
    for blank in ("", " \n", None, []):
        assert read({"content": "a", "reasoning": blank}) == ([{"role": "assistant", "content": "a"}], [])
    found = read({"content": "a", "reasoning": "hm", "thinking": "no"})
    assert found == ([{"role": "assistant", "content": "a", "reasoning_content": "hm"}], ["turn.thinking"])


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
def test_an_answer_that_is_not_to_be_learned_says_so(key):
    for off in (0, 0.0, False):
        assert read({"content": "a", key: off}) == ([{"role": "assistant", "content": "a", "label": False}], [])
    for on in (1, 1.0, True, None):
        assert read({"content": "a", key: on}) == ([{"role": "assistant", "content": "a"}], [])
    assert read({"content": "a", key: 0.5}) == ([{"role": "assistant", "content": "a"}], [f"turn.{key}"])
    assert read({"content": "q", key: 0}, "user") == ([{"role": "user", "content": "q"}], [])
    assert read({"content": "q", key: 1}, "user")[1] == [f"turn.{key}"]


def test_results_of_tools_are_text():
    want = {"role": "tool", "content": '{"t": 20}', "tool_call_id": "x"}
    assert read({"content": {"t": 20, "wind": None}, "tool_call_id": "x"}, "tool") == ([want], [])
    assert read({"content": '{"t": 20}', "tool_call_id": "x"}, "tool") == ([want], [])
    assert read({"content": [{"type": "text", "text": '{"t": 20}'}], "tool_call_id": "x"}, "tool") == ([want], [])
    for schema in ({"type": ["string", "null"]}, {"type": {"a": 1}}):
        assert read({"content": schema}, "tool")[0] == [{"role": "tool", "content": json.dumps(schema)}]
    assert read({"content": [1, 2]}, "observation") == ([{"role": "tool", "content": "[1, 2]"}], [])
    assert read({"content": "20", "name": "clock"}, "function") == (
        [{"role": "tool", "content": "20", "name": "clock"}],
        [],
    )
    part = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": '{"t": 20}'}]}
    assert read({"content": [part]}, "user") == ([want], [])
    assert read({"content": [part, {"type": "text", "text": "so?"}]}, "user")[0] == [
        want,
        {"role": "user", "content": "so?"},
    ]


def test_null_keys_are_absent_and_unknown_ones_are_named():
    union = dict.fromkeys(("name", "tool_calls", "function_call", "weight", "reasoning", "audio", "tool_call_id"))
    assert read({"content": "a", **union}) == ([{"role": "assistant", "content": "a"}], [])
    assert read({"content": "a", "annotations": [], "refusal": ""})[1] == []
    assert read({"content": "a", "timestamp": 0, "edited": False})[1] == ["turn.timestamp", "turn.edited"]
    assert read({"content": "q", "tool_calls": [CALL]}, "user")[1] == ["turn.tool_calls"]
    parts = [{"type": "text", "text": "a", "citations": [], "cache_control": {"type": "ephemeral"}}]
    assert read({"content": parts})[1] == ["turn.content.cache_control"]
    assert read({"tool_calls": [{"index": 0, "strict": True, **CALL}]})[1] == ["turn.tool_calls.strict"]
    assert read_turn({"from": "GPT", "role": None, "value": "a", "content": None}, "", []) == read({"content": "a"})[0]


def test_a_plain_turn_is_read_as_one_with_more_keys():
    for turn in (
        {"content": "user", "role": "gpt"},
        {"value": "user", "from": "model"},
        {"role": "ai", "value": "user"},
    ):
        for more in ({}, {"weight": None}):
            assert read_turn({**turn, **more}, "", []) == [{"role": "assistant", "content": "user"}]
    for turn, word in (({"role": ["a"], "content": "q"}, r"\['a'\]"), ({"role": "user", "from": "q"}, "'q'")):
        with pytest.raises(RowError, match=f"unknown role {word}"):
            read_turn(turn, "", [])


def test_a_server_gets_what_openai_defines():
    message = answer(tool_calls=[{"id": "x", **CALL}], reasoning_content="hm", label=False)
    sent = for_server(message)
    assert json.loads(sent["tool_calls"][0]["function"].pop("arguments")) == ARGUMENTS
    assert sent == answer(
        tool_calls=[{"id": "x", "type": "function", "function": {"name": "clock"}}],
        reasoning_content="hm",
        reasoning="hm",
    )
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert read(for_server(answer(tool_calls=[{"id": "x", **CALL}], reasoning_content="hm"))) == (
        [answer(tool_calls=[{"id": "x", **CALL}], reasoning_content="hm")],
        [],
    )
