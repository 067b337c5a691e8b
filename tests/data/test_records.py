import json

import pyarrow.parquet
import pytest

from ctcdraft.data.records import conversation_of, record_of, text_of, tokens_of
from ctcdraft.data.sources import RowError, read_rows


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
        (turns(("human", 7)), "turn 0 holds no text but a int"),
        (turns(("human", "\ud800")), "half a character"),
        ({"conversations": []}, "no list under"),
        ({"conversations": ["hi"]}, "turn 0 is no object"),
        ({"dialogue": "A: hi\nB: hello"}, r"no question \(its columns: dialogue\)"),
        ({"messages": [{"speaker": "a", "text": "b"}]}, r"unknown role None \(its keys: speaker, text\)"),
        ({"conversations": [{"from": "system", "value": "x"}]}, "no user turn"),
        ({"turns": "[]"}, "no user turn"),
        ({"turns": "[]", "system": "be kind"}, "no user turn"),
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
    for row in ({"title": "x"}, {"text": 7}, " ", {"text": ""}):
        with pytest.raises(RowError, match="no text under any of text, story"):
            text_of(row, 0)
    for row in (7, None):
        with pytest.raises(RowError, match="an object is needed"):
            text_of(row, 0)


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
    assert found.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert found.messages[3]["tool_call_id"] == "x"
    assert found.messages[4]["reasoning_content"] == "the tool said so"
    shares = conversation_of(turns(("human", "q"), ("function_call", "f()"), ("observation", "1"), ("gpt", "one")), 0)
    assert [m["role"] for m in shares.messages] == ["user", "assistant", "tool", "assistant"]


def answered(question, answer, *before):
    return (*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer})


def said_by_system(text):
    return {"role": "system", "content": text}


NAN = float("nan")
PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
NESTED = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


@pytest.mark.parametrize(
    ("row", "want", "unread"),
    [
        ({"prompt": "q", "completion": "a"}, answered("q", "a"), ()),
        ({"prompt": "q", "response": "a", "source": "x"}, answered("q", "a"), ("source",)),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, answered("q", "a"), ()),
        ({"prompt": [said_by_system("s"), *PAIR[:1]], "completion": "a"}, answered("q", "a", said_by_system("s")), ()),
        ({"prompt": "q", "chosen": PAIR, "rejected": PAIR}, answered("q", "a"), ("rejected",)),
        ({"chosen": PAIR, "rejected": PAIR}, answered("q", "a"), ("rejected",)),
        ({"prompt": "q", "chosen": NESTED["conversations"]}, answered("q", "a"), ()),
        ({"prompt": "q", "chosen": [said_by_system("s"), *PAIR]}, answered("q", "a", said_by_system("s")), ()),
        ({"prompt": [said_by_system("s"), *PAIR[:1]], "chosen": PAIR}, answered("q", "a", said_by_system("s")), ()),
        ({"messages": PAIR[:1], "completion": "a"}, answered("q", "a"), ()),
        (
            {"conversations": NESTED["conversations"][:1], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"},
            answered("q", "a"),
            ("rejected",),
        ),
        ({"messages": PAIR[:1], "answer": 42}, (PAIR[0],), ("answer",)),
        ({"messages": PAIR, "answer": "b"}, answered("q", "a"), ("answer",)),
        ({"prompt": "q", "completion": "a", "data": "x"}, answered("q", "a"), ("data",)),
        ({"id": "0", "data": ["b", "c", "q", "a"]}, answered("b", "c") + answered("q", "a"), ()),
        ({"dialogue": '["q", "a"]'}, answered("q", "a"), ()),
        ({"messages": [{"role": "prompter", "text": "q"}, {"role": "bot", "text": "a"}]}, answered("q", "a"), ()),
        ({"instruction": "q", "input": NAN, "output": "a", "system": NAN, "history": NAN}, answered("q", "a"), ()),
        ({"instruction": "q", "input": "", "output": "a"}, answered("q", "a"), ()),
        ({"instruction": "q", "input": "on x", "output": "a"}, answered("q\non x", "a"), ()),
        ({"instruction": "q", "context": "on x", "response": "a", "category": "c"}, answered("q\non x", "a"), ()),
        ({"input": "q", "output": "a"}, answered("q", "a"), ()),
        ({"question": "q", "answer": "a"}, answered("q", "a"), ()),
        ({"query": "q", "response": "a"}, answered("q", "a"), ()),
        ({"problem": "q", "solution": "a"}, answered("q", "a"), ()),
        ({"instruction": "q", "output": "a", "history": [["b", "c"]]}, answered("b", "c") + answered("q", "a"), ()),
        ({"system_prompt": "s", "question": "q", "response": "a"}, answered("q", "a", said_by_system("s")), ()),
        ({"system": "s", **NESTED}, answered("q", "a", said_by_system("s")), ()),
        ({"system": "s", "messages": [said_by_system("s"), *PAIR]}, answered("q", "a", said_by_system("s")), ()),
        (
            {"system": "t", "messages": [said_by_system("s"), *PAIR]},
            answered("q", "a", said_by_system("s")),
            ("system (beside a system turn)",),
        ),
        ({"messages": json.dumps(PAIR)}, answered("q", "a"), ()),
        (
            {"messages": PAIR, "conversations": None, "prompt": None, "text": None, "system": None},
            answered("q", "a"),
            (),
        ),
        ({"messages": PAIR, "conversations": [], "prompt": "", "extra": []}, answered("q", "a"), ()),
        ({"messages": PAIR, "prompt": "q"}, answered("q", "a"), ("prompt",)),
        ({"turns": '["q", "r"]'}, ({"role": "user", "content": "q"}, {"role": "user", "content": "r"}), ()),
        ({"turns": "[INST] q"}, ({"role": "user", "content": "[INST] q"},), ()),
        ({"prompt": '["q", "r"]'}, ({"role": "user", "content": '["q", "r"]'},), ()),
        (
            {"question": "q", "reasoning": "hm", "answer": "a"},
            (PAIR[0], {**PAIR[1], "reasoning_content": "hm"}),
            (),
        ),
    ],
)
def test_every_convention_of_columns_is_read_and_what_is_not_is_named(row, want, unread):
    found = conversation_of(row, 0)
    assert found.messages == want
    assert found.unread == unread


def test_tools_are_schemas_whatever_their_column():
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string", "enum": None}}}}
    want = json.loads(json.dumps(function).replace(', "enum": null', ""))
    for tools, kept in (
        ({"tools": [{"type": "function", "function": function}]}, want),
        ({"tools": json.dumps([{"type": "function", "function": function}])}, function),
        ({"tools": [json.dumps({"type": "function", "function": function})]}, function),
        ({"tools": {"type": "function", "function": function}}, want),
        ({"tools": [function]}, want),
        ({"tools": [{"type": "function", **function}]}, want),
        ({"functions": [function], "tools": None}, want),
    ):
        found = conversation_of({"messages": PAIR, **tools}, 0)
        assert found.tools == [{"type": "function", "function": kept}]
        assert not found.unread
    for none in (None, "", "  ", "[]", "null", []):
        assert conversation_of({"messages": PAIR, "tools": none}, 0).tools is None


def messages(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (messages(("user", "q"), ("tool", "x")), "turn 1 is from the tool where the assistant is due"),
        (messages(("user", "q"), ("system", "x")), "turn 1 is from the system where the assistant is due"),
        (messages(("system", "a"), ("system", "x")), "starts with the system where the user is due"),
        (messages(("user", float("nan"))), "holds no text but a float"),
        (messages(("user", None)), "is empty"),
        (messages(("user", [{"type": "image_url"}])), r"a part that is no text \(image_url\)"),
        (messages(("user", [])), "is empty"),
        ({**messages(("user", "q")), "tools": "{"}, "'tools' is no JSON"),
        ({**messages(("user", "q")), "tools": "[1]"}, "'tools' is no list"),
        ({"turns": []}, r"no question \(its columns: none\)"),
        ({"turns": [7]}, "turn 0 holds no text but a int"),
        ({"a": 1, "b": "x"}, r"no question \(its columns: a, b\)"),
        ({"output": "x"}, "starts with the assistant"),
        ({"prompt": "q", "history": ["a"]}, "'history' is no list of pairs"),
    ],
)
def test_an_unusable_message_says_why(row, reason):
    with pytest.raises(RowError, match=reason):
        conversation_of(row, 0)


def test_prompts_alone_are_conversations_without_answers():
    assert [m["role"] for m in conversation_of({"turns": ["a", "b"], "question_id": 81}, 0).messages] == ["user"] * 2
    assert conversation_of({"prompt": "a"}, 3).messages == ({"role": "user", "content": "a"},)


def test_a_mask_is_read_under_any_of_its_names():
    for mask in (
        {"loss_mask": [0, 1]},
        {"completion_mask": [0, 1]},
        {"assistant_masks": [0, 1]},
        {"labels": [-100, 6]},
    ):
        found = tokens_of({"input_ids": [5, 6], **mask, "attention_mask": [1, 1], "text": None}, 0)
        assert (found.ids, found.mask, found.unread) == ([5, 6], [0, 1], ("attention_mask",))


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
    union = {"text": None, "conversations": None, "messages": None, "input_ids": None, "loss_mask": None}
    for name, row in forms.items():
        assert type(record_of(row, "0", "mixed")).__name__ == name
        assert record_of(union | row, "0", "mixed") == record_of(row, "0", "mixed")
    assert type(record_of({**forms["Conversation"], "text": "rendered"}, "0", "mixed")).__name__ == "Conversation"
    assert type(record_of("bare", "0", "mixed")).__name__ == "Text"
    assert type(record_of({"text": "once", "data": "x"}, "0", "mixed")).__name__ == "Text"
    with pytest.raises(RowError):
        record_of(forms["Text"], "0", "sharegpt")
    with pytest.raises(RowError):
        record_of(forms["Conversation"], "0", "text")


def test_a_union_of_schemas_changes_no_record(tmp_path):
    """Parquet gives every row all columns, every turn all keys, every call all arguments of the others."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": "x"}, {"b": 1}, {})]
    rows = [
        {"messages": [PAIR[0], {"role": "assistant", "content": None, "tool_calls": calls[i : i + 1]}], "source": "s"}
        for i in range(3)
    ]
    rows += [
        {"messages": [{**PAIR[0], "name": "ann"}, {**PAIR[1], "reasoning": "hm", "weight": 0}]},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"instruction": "q", "input": "", "output": "a"},
        {"conversations": NESTED["conversations"], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    columns = {key for row in rows for key in row}
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in columns} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "rows")
    found = [record_of(row, str(i), "sharegpt") for i, row in enumerate(read_rows(str(tmp_path / "rows")))]
    assert found == [record_of(row, str(i), "sharegpt") for i, row in enumerate(rows)]
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"b": 1}


def test_equal_content_has_equal_digests_whatever_its_form():
    a = conversation_of(turns(("human", "hi"), ("gpt", "hello")), 0)
    b = conversation_of(messages(("user", "hi"), ("assistant", "hello")), 1)
    c = conversation_of(messages(("user", "hi"), ("assistant", "hello!")), 1)
    assert a.digest == b.digest != c.digest
    assert text_of("x", 0).digest == text_of({"text": "x"}, 1).digest
