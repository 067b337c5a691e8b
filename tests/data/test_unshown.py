"""Each value that a rendering does not show is named; what it shows in a form of its own is not."""

import json

import pytest
from bases import tiny_tokenizer

from ctcdraft.data.records import Conversation, conversation_of
from ctcdraft.data.template import render, unread_in_prompt
from ctcdraft.data.unshown import unshown

CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"zone": ["UTC", "CET"]}}}
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "what time?", "name": "ann"},
    {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it is noon"},
]
ZONE = {"type": "object", "properties": {"zone": {"type": "string", "description": "where"}}}
TOOL = {"type": "function", "function": {"name": "clock", "description": "tells the time", "parameters": ZONE}}
WHOLE = json.dumps([CHAT, TOOL])


def name(key):
    return f"turn.{key} (the template does not show it)"


def test_a_text_that_holds_everything_leaves_nothing_unread():
    assert unshown(CHAT, [TOOL], [WHOLE]) == []
    assert unshown(CHAT, [TOOL], [WHOLE[:300], WHOLE[250:]]) == []  # several sequences of one conversation


@pytest.mark.parametrize(
    ("gone", "names"),
    [
        ("be kind", [name("content")]),
        ("ann", [name("name")]),
        ("let me see", [name("content")]),
        ("c1", [name("tool_calls.id"), name("tool_call_id")]),
        ("zone", [name("tool_calls.function.arguments"), "tools (the template shows a part of them)"]),
        ("CET", [name("tool_calls.function.arguments")]),
        ("where", ["tools (the template shows a part of them)"]),
        ("tells the time", ["tools (the template shows a part of them)"]),
    ],
)
def test_what_is_gone_is_named(gone, names):
    assert unshown(CHAT, [TOOL], [WHOLE.replace(gone, "")]) == names


def test_tools_of_which_nothing_is_shown():
    assert unshown(CHAT[:1], [TOOL], ["be kind"]) == ["tools (the template shows none)"]


@pytest.mark.parametrize("value", ['say "so"', "two\nlines", "back\\slash", " spaces ", "Ünï 🦙", "a's", "", "\n"])
@pytest.mark.parametrize("form", [str.strip, json.dumps, repr, lambda v: json.dumps(v, ensure_ascii=False)])
def test_values_are_found_trimmed_and_escaped(value, form):
    text = f"<u>{form(value)}</s>".replace("\\u00dc", "Ü").replace("\\u00ef", "ï")
    assert unshown([{"role": "user", "content": value}], None, [text]) == []


def test_a_template_that_drops_the_system_turn_is_told_of_in_both_ways_of_preparing():
    template = "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}{% generation %}"
    template += "{{ m.content }}</s>{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = tiny_tokenizer(template)
    chat = Conversation("", (CHAT[0], {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}))
    assert render(tokenizer, chat).unread == [name("content")]
    assert unread_in_prompt(tokenizer, chat) == [name("content")]


def test_the_name_of_a_turn_of_results_alone_is_counted():
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "noon"}
    turns = [CHAT[1], CHAT[2], {"role": "user", "content": [result], "name": "ann"}, CHAT[4]]
    chat = conversation_of({"messages": turns}, 0)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.unread == ("turn.name",)
