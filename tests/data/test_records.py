import json

import pytest

from ctcdraft.data.records import conversation_of, record_of, text_of, tokens_of
from ctcdraft.data.sources import RowError


def turns(*pairs):
    return {"conversations": [{"from": who, "value": what} for who, what in pairs]}


def test_both_conversation_forms_give_the_same_messages():
    sharegpt = turns(("human", "hi"), ("gpt", "hello"))
    messages = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    want = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
    assert conversation_of(sharegpt, 0).messages == conversation_of(messages, 0).messages == want
    assert conversation_of({"id": "a7", **sharegpt}, 0).id == "a7"
    with_system = {"messages": [{"role": "system", "content": "be kind"}, *messages["messages"]]}
    assert conversation_of(with_system, 0).messages[1:] == want


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (turns(("gpt", "hello"), ("human", "hi")), "starts with the assistant"),
        (turns(("human", "hi"), ("gpt", "")), r"turn 1 \(from the assistant\) is empty"),
        (turns(("human", "hi"), ("gpt", "  \n")), "is empty"),
        (turns(("human", "hi"), ("human", "there")), "turn 1 is from the user where the assistant is due"),
        (turns(("robot", "hi")), "unknown role 'robot'"),
        (turns(("human", 7)), "is empty"),
        (turns(("human", "\ud800")), "half a character"),
        ({"conversations": []}, "no list under"),
        ({"conversations": ["hi"]}, "turn 0 is no object"),
        ({"conversations": [{"from": "system", "value": "x"}]}, "no user turn"),
        ({"text": "x"}, "no list under"),
        (["a"], "an object is needed, this is a list"),
        (None, "an object is needed"),
        (RowError("line 3 is no JSON"), "line 3 is no JSON"),
    ],
)
def test_an_unusable_conversation_says_why(row, reason):
    with pytest.raises(RowError, match=reason):
        conversation_of(row, 0)


def test_texts_are_strings_or_objects_that_hold_one():
    assert text_of("once", 4).text == text_of({"text": "once"}, 4).text == text_of({"story": "once"}, 4).text == "once"
    for row in (7, {"title": "x"}, None):
        with pytest.raises(RowError, match="neither a string"):
            text_of(row, 0)
    with pytest.raises(RowError, match="empty text"):
        text_of(" ", 0)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def test_tools_and_reasoning_survive():
    schema = {"type": "function", "function": {"name": "f"}}
    said = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        CALL,
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "assistant", "content": "it is 42", "reasoning_content": "the tool said so"},
    ]
    for tools in ([schema], json.dumps([schema])):
        found = conversation_of({"messages": said, "tools": tools}, 0)
        assert found.tools == [schema]
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[1]["content"] == found.opening == "ab"
    assert found.messages[2]["tool_calls"] == CALL["tool_calls"]
    assert found.messages[3]["tool_call_id"] == "x"
    assert found.messages[4]["reasoning_content"] == "the tool said so"
    shares = conversation_of(turns(("human", "q"), ("function_call", "f()"), ("observation", "1"), ("gpt", "one")), 0)
    assert [m["role"] for m in shares.messages] == ["user", "assistant", "tool", "assistant"]


def messages(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (messages(("user", "q"), ("tool", "x")), "turn 1 is from the tool where the assistant is due"),
        (messages(("user", "q"), ("system", "x")), "turn 1 is from the system where the assistant is due"),
        (messages(("system", "a"), ("system", "x")), "starts with the system where the user is due"),
        (messages(("user", float("nan"))), "is empty"),
        (messages(("user", None)), "is empty"),
        (messages(("user", [{"type": "image_url"}])), r"a part that is no text \(image_url\)"),
        (messages(("user", [])), "is empty"),
        ({**messages(("user", "q")), "tools": "{"}, "'tools' is no JSON"),
        ({**messages(("user", "q")), "tools": "[1]"}, "'tools' is no list"),
        ({"turns": []}, "no list of questions"),
        ({"turns": [7]}, "is empty"),
    ],
)
def test_an_unusable_message_says_why(row, reason):
    with pytest.raises(RowError, match=reason):
        conversation_of(row, 0)


def test_prompts_alone_are_conversations_without_answers():
    assert [m["role"] for m in conversation_of({"turns": ["a", "b"], "question_id": 81}, 0).messages] == ["user"] * 2
    assert conversation_of({"prompt": "a"}, 3).messages == ({"role": "user", "content": "a"},)


def test_tokens_come_with_a_mask_that_fits():
    found = tokens_of({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, 2)
    assert (found.id, found.ids, found.mask) == ("2", [5, 6, 7], [0, 1, 1])
    for row, reason in (
        ({"input_ids": [5, 6], "loss_mask": [1]}, "1 entries of loss_mask"),
        ({"input_ids": [5, -6], "loss_mask": [0, 1]}, "no list of numbers under 'input_ids'"),
        ({"input_ids": [5, 6]}, "no list of numbers under 'loss_mask'"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "marks no token"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "0 or 1"),
    ):
        with pytest.raises(RowError, match=reason):
            tokens_of(row, 0)


def test_the_kind_says_which_forms_a_row_may_have():
    forms = {
        "Text": {"text": "once"},
        "Conversation": turns(("human", "hi"), ("gpt", "hello")),
        "Tokens": {"input_ids": [5, 6], "loss_mask": [0, 1]},
    }
    for name, row in forms.items():
        assert type(record_of(row, "0", "mixed")).__name__ == name
    assert type(record_of("bare", "0", "mixed")).__name__ == "Text"
    with pytest.raises(RowError):
        record_of(forms["Text"], "0", "sharegpt")
    with pytest.raises(RowError):
        record_of(forms["Conversation"], "0", "text")


def test_equal_content_has_equal_digests_whatever_its_form():
    a = conversation_of(turns(("human", "hi"), ("gpt", "hello")), 0)
    b = conversation_of(messages(("user", "hi"), ("assistant", "hello")), 1)
    c = conversation_of(messages(("user", "hi"), ("assistant", "hello!")), 1)
    assert a.digest == b.digest != c.digest
    assert text_of("x", 0).digest == text_of({"text": "x"}, 1).digest
