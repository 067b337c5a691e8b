"""Reading: every byte of a file is a row, a reject, or white space."""

import bz2
import gzip
import io
import json
import lzma
import tracemalloc
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.data import sources
from ctcdraft.data.sources import RowError, check_source, read_mixture, read_rows

ROWS = [{"text": 'a\n{[,"\\'}, {"text": "é", "n": [1, [2, {"x": "]"}]]}, "bare", 7]


def written(tmp_path, content, name="f.json"):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def rows_of(tmp_path, content, name="f.json"):
    return list(read_rows(written(tmp_path, content, name)))


def reasons(rows):
    return [str(row) for row in rows if isinstance(row, RowError)]


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


LIST = json.dumps(ROWS, indent=1, ensure_ascii=False).encode()
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


@pytest.mark.parametrize("content", [LIST, LINES, b"\xef\xbb\xbf" + LIST, b"\n\n " + LIST, LINES + b"\n\n"])
@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd])
def test_lists_and_lines_plain_or_compressed_give_the_same_rows(tmp_path, content, packed):
    assert rows_of(tmp_path, packed(content)) == ROWS


TURNS = [[{"from": "human", "value": f"é {i} {{["}, {"from": "gpt", "value": "x" * i}] for i in range(150)]
TABLE = [{"conversations": turns, "n": i, "system": None if i % 2 else "s"} for i, turns in enumerate(TURNS)]


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path, row_group_size=70)


def arrow_file(path):
    table = pyarrow.Table.from_pylist(TABLE)
    with pyarrow.ipc.new_file(path, table.schema) as out:
        out.write_table(table, max_chunksize=70)


def arrow_stream(path):
    table = pyarrow.Table.from_pylist(TABLE)
    with pyarrow.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("write", [parquet, arrow_file, arrow_stream])
def test_tables_are_read_row_by_row_whatever_their_name_and_what_is_cut_is_said(tmp_path, write):
    path = tmp_path / "rows"
    write(str(path))
    assert list(read_rows(str(path))) == TABLE
    path.write_bytes(path.read_bytes()[:-200])
    rows = list(read_rows(str(path)))
    assert "rows is damaged after" in reasons(rows)[-1]


def dumped(value, **options):
    return json.dumps(value, ensure_ascii=False, **options).encode()


OBJECTS = [{"text": 'a\n{[,"\\'}, {"text": "é", "n": [1, [2, {"x": "]"}]], "m": {}}, {"data": ["q", "a"]}]
JSON_FORMS = {
    "wrapped": dumped({"version": 1, "meta": {"data": 2}, "data": OBJECTS}),
    "wrapped on lines": dumped({"train": OBJECTS}, indent=2),
    "object of rows": dumped({str(i): row for i, row in enumerate(OBJECTS)}),
    "object of rows on lines": dumped({str(i): row for i, row in enumerate(OBJECTS)}, indent=1),
    "objects on lines": b"\n".join(dumped(row, indent=2) for row in OBJECTS),
    "objects on lines, crlf": b"\r\n".join(dumped(row, indent=2).replace(b"\n", b"\r\n") for row in OBJECTS),
    "lines": b"\n".join(dumped(row) for row in OBJECTS),
    "lines, crlf": b"\r\n".join(dumped(row) for row in OBJECTS),
    "json-seq": b"".join(b"\x1e" + dumped(row) + b"\n" for row in OBJECTS),
}


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize("chunk", [1 << 20, 200])
def test_json_is_read_in_every_form(tmp_path, form, chunk, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    content = JSON_FORMS[form]
    assert rows_of(tmp_path, content) == OBJECTS
    assert rows_of(tmp_path, b"\xef\xbb\xbf" + content, "g") == OBJECTS
    assert rows_of(tmp_path, gzip.compress(content), "h") == OBJECTS


def test_one_object_alone_is_one_row(tmp_path):
    for row in ({"conversations": [{"from": "human", "value": "x"}]}, {"data": ["q", "a"]}, {"prompt": "q"}):
        for indent in (None, 2):
            assert rows_of(tmp_path, dumped(row, indent=indent)) == [row]


def test_what_follows_the_wrapped_list_is_told(tmp_path):
    rows = rows_of(tmp_path, dumped({"train": OBJECTS, "test": [1]}))
    assert rows[:-1] == OBJECTS
    assert "more follows the end of the list" in str(rows[-1])


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_before_any_work(tmp_path, packed, encoding):
    path = written(tmp_path, packed(LINES.decode().encode(encoding)))
    name = encoding.upper()
    with pytest.raises(ValueError, match=rf"f.json is {name}: write it as UTF-8 \(iconv -f {name} -t UTF-8"):
        list(read_rows(path))


def test_windows_1252_is_named_with_what_it_would_read(tmp_path):
    first, second = rows_of(tmp_path, '{"text": "abc café crème"}\n{"text": "b"}'.encode("cp1252"))
    assert "not UTF-8 at byte 17 (in Windows-1252 it reads '\"abc café crème\"'" in str(first)
    assert second == {"text": "b"}


@pytest.mark.parametrize("name", ["a[1].jsonl", "a (1).jsonl", "a*.jsonl", "a?", "my [data]/rows", "a,b=c.jsonl"])
def test_a_file_of_that_very_name_comes_before_a_pattern(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    written(tmp_path, b'{"text": "other"}', "a1.jsonl")
    path = written(tmp_path, b'{"text": "this"}', name)
    assert list(read_rows(path)) == [{"text": "this"}]
    assert sources.source_hash(path) != sources.source_hash(str(tmp_path / "a1.jsonl"))


def test_a_file_that_looks_like_a_hub_name_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    written(tmp_path, b'{"text": "this"}', "chats/rows")
    assert list(read_rows("chats/rows")) == [{"text": "this"}]


@pytest.mark.parametrize(
    ("splits", "read"),
    [(("test", "train_sft", "train"), "train"), (("test", "train_sft", "train_gen"), "train_sft"), (("all",), "all")],
)
def test_a_dataset_repository_gives_what_it_has_for_training(tmp_path, monkeypatch, splits, read):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "HuggingFaceH4" / "chats"
    folder.mkdir(parents=True)
    for split in splits:
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": split}))
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    assert list(read_rows("HuggingFaceH4/chats")) == [{"text": read}]


def test_a_glob_reads_its_files_in_order(tmp_path):
    written(tmp_path, LINES, "a.jsonl")
    written(tmp_path, gzip.compress(LIST), "b.json.gz")
    written(tmp_path, b"", "c.json")
    rows = list(read_rows(str(tmp_path / "*.json*")))
    assert rows[:8] == [*ROWS, *ROWS]
    assert reasons(rows[8:]) == ["c.json is empty"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(JSON, min_size=1, max_size=6), chunk=st.integers(1, 9), ascii=st.booleans())
def test_rows_are_found_whatever_the_chunks(rows, chunk, ascii):
    objects = [{"a": row} for row in rows]
    forms = {
        "]": (rows, json.dumps(rows, ensure_ascii=ascii)[1:]),
        "}": (rows, json.dumps({f'"{i}: ': row for i, row in enumerate(rows)}, ensure_ascii=ascii)[1:]),
        "": (objects, "\n".join(json.dumps(row, ensure_ascii=ascii, indent=1) for row in objects)),
    }
    for end, (want, text) in forms.items():
        with patch.object(sources, "CHUNK", chunk):
            assert list(sources._values(io.BufferedReader(io.BytesIO(text.encode())), end)) == want


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60))
def test_no_bytes_make_the_scanner_fail(data):
    for end in ("]", "}", ""):
        list(sources._values(io.BufferedReader(io.BytesIO(data)), end))


@pytest.mark.parametrize(
    ("content", "good", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b"}, {"te', 2, "no JSON of at most 16 MiB (Unterminated string"),
        (b'[{"text": "a"}, {"text": "b"}', 2, "no JSON of at most 16 MiB (Expecting value"),
        (b"[" * 100_000, 0, "no JSON of at most 16 MiB (maximum recursion depth"),
        (b'[{"text": "a"}, {oops}, {"text": "b"}]', 1, "no JSON of at most 16 MiB (Expecting property name"),
        (b'[{"text": "a"}, {"text": "\xff\xfe"}, "c"]', 2, "not UTF-8 at byte 10"),
        (b'[{"text": "a"}] [1, 2]', 1, "more follows the end of the list"),
        (b"[]", 0, "the list is empty"),
        (b" \n", 0, "f.json is empty"),
        (b'{"text": "a"}\n{"text": \n{"text": "b"}', 2, "no JSON"),
        (b"prompt,completion\nq,a\n", 0, "(Expecting value): 'prompt,completion"),
        (b'{"text": "a"}\n"\xff\xfe"\n{"text": "b"}', 2, "not UTF-8 at byte 1"),
        (b'{"text": "a"}\n' + b'{"a":' * 100_000 + b'\n{"text": "b"}', 2, "(maximum recursion depth"),
        (gzip.compress(LINES * 50, mtime=0)[:-30], None, "f.json is damaged after"),
        (zstd(LINES * 50)[:-5], None, "f.json is damaged after"),
        (b"\x1f\x8bgarbage", 0, "f.json is damaged after 0 rows"),
    ],
)
def test_what_cannot_be_read_stands_for_itself_and_the_rest_is_read(tmp_path, content, good, reason):
    rows = rows_of(tmp_path, content)
    (found,) = reasons(rows)
    assert reason in found
    if good is not None:
        assert len(rows) == good + 1


@pytest.mark.parametrize(("shape", "behind"), [(b'%s\n{"text": "b"}', [{"text": "b"}]), (b'[%s, {"text": "b"}]', [])])
@pytest.mark.parametrize("long", [b'{"text": "%s"}', b'{"text": "\\\\\\"%s"}', b'{"text": ["%s"]}'])
def test_a_row_of_50_megabytes_is_rejected_in_bounded_memory(tmp_path, shape, behind, long):
    path = written(tmp_path, shape % (long % ((b'x\\"\\\\ ' + b"y" * 94) * 520_000)))
    tracemalloc.start()
    rows = list(read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows[1:] == behind
    assert "16 MiB" in str(rows[0])
    assert peak < 60 * 2**20  # the row is 50 MB; held are at most 16 of it, and a copy


def test_not_a_number_is_read_and_left_to_whoever_needs_the_field(tmp_path):
    (row,) = rows_of(tmp_path, b'{"text": "a", "score": NaN}')
    assert row["text"] == "a"


def test_a_file_with_nothing_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"data.path=nope.json: no such file"):
        check_source("data.path", "nope.json")
    with pytest.raises(ValueError, match="is a folder"):
        check_source("data.path", str(tmp_path))
    with pytest.raises(ValueError, match="is empty"):
        check_source("data.path", written(tmp_path, b""))
    check_source("data.path", None)


@pytest.mark.parametrize("name", ["teknium/OpenHermes-2.5", "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "a/b"])
def test_a_name_on_the_hub_may_have_a_dot(name):
    check_source("data.path", name)
    for suffix in (".json", ".jsonl", ".JSONL", ".jsonl.gz", ".parquet", ".arrow", ".zst", ".json*"):
        with pytest.raises(ValueError, match="no such file"):
            check_source("data.path", f"{name}{suffix}")


def test_a_mixture_keeps_its_shares_until_a_source_ends(tmp_path):
    a = written(tmp_path, json.dumps([f"a{i}" for i in range(100)]).encode(), "a.json")
    b = written(tmp_path, json.dumps([f"b{i}" for i in range(10)]).encode(), "b.json")
    mixed = [row for _, row in read_mixture([a, b], [0.75, 0.25])]
    assert sum(row[0] == "b" for row in mixed) == 10
    assert 28 <= sum(row[0] == "a" for row in mixed) <= 33
    for end in range(8, len(mixed)):
        assert abs(sum(row[0] == "b" for row in mixed[:end]) - 0.25 * end) <= 1
    whole = list(read_mixture([a, b]))
    assert len(whole) == 110
    assert whole[0] == ("0:0", "a0")
    assert whole[100] == ("1:0", "b0")
    assert next(read_mixture([a])) == ("0", "a0")
