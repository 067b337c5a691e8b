"""Reading: every byte of a file is a row, a reject, or white space."""

import bz2
import gzip
import json
import lzma
import tracemalloc

import pyarrow
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
def test_the_elements_of_a_list_are_found_whatever_the_chunks(rows, chunk, ascii):
    data = json.dumps(rows, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    pieces = [data[i : i + chunk] for i in range(0, len(data), chunk)]
    found = [sources._parsed(e, "x") for e in sources._elements(pieces)]
    readable = [isinstance(row, RowError) or row == want for row, want in zip(found, rows, strict=True)]
    assert all(readable)
    if ascii:
        assert found == rows


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), chunk=st.integers(1, 9))
def test_no_bytes_make_the_scanner_fail(data, chunk):
    pieces = [b"[", *(data[i : i + chunk] for i in range(0, len(data), chunk))]
    list(sources._elements(pieces))
    list(sources._line_rows(pieces))


@pytest.mark.parametrize(
    ("content", "good", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b"}, {"te', 2, "the list ends inside row 3"),
        (b'[{"text": "a"}, {"text": "b"}', 2, "the list is not closed after row 2"),
        (b"[" * 100_000, 0, "the list ends inside row 1"),
        (b'[{"text": "a"}, {oops}, {"text": "b"}]', 2, "row 2 of the list is no JSON"),
        (b'[{"text": "a"}, ' + b"[" * 100_000 + b"]" * 100_000 + b', {"text": "b"}]', 2, "nested too deeply"),
        (b'[{"text": "a"}, {"text": "\xff\xfe"}, "c"]', 2, "row 2 of the list is not UTF-8 at byte 11"),
        (b'[{"text": "a"}] [1, 2]', 1, "6 bytes follow the end of the list"),
        (b"[]", 0, "the list is empty"),
        (b" \n", 0, "f.json is empty"),
        (b'{"text": "a"}\n{"text": \n{"text": "b"}', 2, "line 2 is no JSON"),
        (b'{"text": "a"}\n"\xff\xfe"\n{"text": "b"}', 2, "line 2 is not UTF-8 at byte 1"),
        (b'{"text": "a"}\n' + b'{"a":' * 100_000 + b"\n1", 2, "line 2 is nested too deeply"),
        (gzip.compress(LINES * 50)[:-30], None, "f.json is damaged after"),
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


@pytest.mark.parametrize("shape", [b'%s\n{"text": "b"}', b'[%s, {"text": "b"}]'])
@pytest.mark.parametrize("long", [b'{"text": "%s"}', b'{"text": "\\\\\\"%s"}', b'{"text": ["%s"]}'])
def test_a_row_of_50_megabytes_is_rejected_in_bounded_memory(tmp_path, shape, long):
    path = written(tmp_path, shape % (long % ((b'x\\"\\\\ ' + b"y" * 94) * 520_000)))
    tracemalloc.start()
    rows = list(read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows[1] == {"text": "b"}
    assert "MiB, more than the 16 of the longest row" in str(rows[0])
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
