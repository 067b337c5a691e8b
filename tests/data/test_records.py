import json

import pytest

from ctcdraft.data.records import RowError, check_source, conversation_of, read_rows, text_of


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


def test_lists_and_lines_read_alike_and_a_bad_line_stands_for_itself(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": \n')
    assert list(read_rows(str(tmp_path / "list.json"))) == rows
    lines = list(read_rows(str(tmp_path / "lines.jsonl")))
    assert lines[:2] == rows
    assert isinstance(lines[2], RowError)
    assert "line 4" in str(lines[2])
    assert len(list(read_rows(str(tmp_path / "*.json*")))) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"[]", "list is empty"),
        (b'[{"text": "a"}', "starts like a JSON list"),
        (b"[" * 100_000, "starts like a JSON list"),
        (b'"\xff\xfe"', "not UTF-8"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(path)))


def test_a_missing_file_or_a_folder_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"data.path=nope.json: no such file"):
        check_source("data.path", "nope.json")
    with pytest.raises(ValueError, match="is a folder"):
        check_source("data.path", str(tmp_path))
    check_source("data.path", None)
