"""Raw rows of data files, one at a time: memory does not grow with the file.

JSONL, JSON lists, objects around such or behind each other, plain or compressed (gzip, bz2, xz, zstd); Parquet, Arrow;
all known by their content. Globs, Hub datasets. What cannot be read is a RowError in its place, and reading goes on
behind it.
"""

import bz2
import codecs
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from ctcdraft.model.folders import HUB_NAME

CHUNK = 1 << 20
LONGEST_REASON = 400
SHOWN = 40  # characters of what is no JSON
LONGEST_ROW = 16 * CHUNK  # bytes: a longer row is rejected, never held
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, pyarrow.ArrowException)  # what a cut or broken file raises
WRAPPERS = ("data", "train", "rows", "examples", "instances", "dataset")  # {"data": [{...}, ...]}
PACKED: dict[bytes, Callable[[Path], Any]] = {  # how a compressed file begins, and what opens it
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": partial(pyarrow.input_stream, compression="zstd"),
}
HUB_CONFIGS = {"openai/gsm8k": "main"}  # of a data set that has several
# what no name on the Hub ends in, though it may have a dot: teknium/OpenHermes-2.5
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".csv", ".gz", ".bz2", ".xz", ".zst")
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
ROWS_AT_ONCE = 64  # of a table's columns made into rows
MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*+")\s*:\s*')
GAP = re.compile(rf"(?:{MEMBER.pattern}|[\s,]*)")  # before a value, with its name where it has one
DECODER = json.JSONDecoder()
NEXT_LINE = re.compile(r'\n(?=[\x1e"{])')
BLANK = b" \t\r\n\x1e"  # RFC 7464 puts a record separator before each JSON text


class RowError(ValueError):
    """Why a row cannot be used, short and encodable, though it may quote the row."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:LONGEST_REASON].encode(errors="backslashreplace").decode())


def read_rows(path: str, option: str = "data.path", *, split: str = "train") -> Iterator[Any]:
    """Raw rows of every file that `path` (a file, a glob, a Hub dataset) names; a RowError stands for each
    row, or rest of a file, that cannot be read. Of a Hub dataset the split of that name, else the first whose name
    begins so (`train_sft` of UltraChat), else its first.

    Raises ValueError when nothing is there.
    """
    check_source(option, path)
    files = local_files(path)
    if not files:
        import datasets

        try:
            splits = datasets.load_dataset(path, HUB_CONFIGS.get(path), streaming=True)
            yield from splits[min(splits, key=lambda name: (name != split, not name.startswith(split)))]
        except Exception as error:  # whatever the Hub or the network answers
            reason = str(error).strip().split("\n")[0][:200]
            raise ValueError(f"{option}={path}: no such file, and the Hub gave no dataset ({reason})") from error
    for file in files:
        number = 0
        try:
            with _opened(file) as stream:
                for row in _rows(file, stream):
                    yield row
                    number += 1
        except DAMAGE as error:
            what = str(error).strip() or type(error).__name__
            yield RowError(f"{file.name} is damaged after {number} rows ({what})")


def read_mixture(paths: Sequence[str], weights: Sequence[float] | None = None) -> Iterator[tuple[str, Any]]:
    """(name, raw row) of several sources; a name is `<row>`, with `<source>:` before it where there are several.

    Without weights, one source after the other, each whole. With weights, row by row in these shares, until
    the first source has no more: so the shares hold to the end.
    """
    prefixes = [f"{i}:" for i in range(len(paths))] if len(paths) > 1 else [""]
    if weights is None:
        for prefix, path in zip(prefixes, paths, strict=True):
            yield from ((f"{prefix}{number}", row) for number, row in enumerate(read_rows(path)))
        return
    streams = [read_rows(path) for path in paths]
    taken = [0] * len(paths)
    while True:  # whoever lags furthest behind its share is next
        source = min(range(len(paths)), key=lambda i: (taken[i] + 0.5) / weights[i])
        try:
            yield f"{prefixes[source]}{taken[source]}", next(streams[source])
        except StopIteration:
            return
        taken[source] += 1


def check_source(option: str, path: str | None) -> None:
    """Raises ValueError when files are named that are not there or hold nothing: long work starts after this."""
    if path is None:
        return
    files = local_files(path)
    if not files:
        if _looks_like_hub(path):
            return
        raise ValueError(f"{option}={path}: no such file")
    for file in files:
        if file.is_dir():
            raise ValueError(f"{option}={path}: {file} is a folder; give a file in it, or a glob: {file}/*")
        start = b""
        with suppress(*DAMAGE), _opened(file) as stream:
            start = stream.read(4)
        encoding = json.detect_encoding(start).upper()
        if not encoding.startswith("UTF-8"):
            raise ValueError(
                f"{option}={path}: {file} is {encoding}: write it as UTF-8 (iconv -f {encoding} -t UTF-8 {file.name})"
            )
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{option}={path}: the file {files[0]} is empty")


def source_hash(path: str) -> str:
    """A hash over the content of the files that `path` names (over the name, for the Hub)."""
    digest = hashlib.sha256()
    files = local_files(path) or [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else path


def local_files(path: str) -> list[Path]:
    """The file of that name, or those that it is a pattern of. Empty where it names a Hub dataset, or a folder
    that `datasets` finds under such a name."""
    named = Path(path).expanduser()
    if not os.path.exists(named):  # where Path.exists raises on a name that is too long
        return [Path(file) for file in sorted(glob.glob(str(named), recursive=True))]
    return [] if named.is_dir() and _looks_like_hub(path) else [named]


def _opened(file: Path) -> BufferedReader:
    with file.open("rb") as stream:
        magic = stream.read(6)
    unpack = next((unpack for sign, unpack in PACKED.items() if magic.startswith(sign)), FileIO)
    return BufferedReader(unpack(file), CHUNK)


def _rows(file: Path, stream: BufferedReader) -> Iterable[Any]:
    """Rows of an open file, whose start tells its form."""
    start = stream.peek()
    if start.startswith((PARQUET, ARROW_FILE, ARROW_STREAM)):
        return _table_rows(file, start)
    if start.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    while (start := stream.peek()) and start[0] in BLANK:
        stream.read(len(start) - len(start.lstrip(BLANK)))
    if not start:
        return [RowError(f"{file.name} is empty")]
    skipped, end = (1, "]") if start.startswith(b"[") else _around_rows(start.decode("latin-1"))
    stream.read(skipped)
    return _values(stream, end)


def _table_rows(file: Path, magic: bytes) -> Iterator[Any]:
    """Rows of Parquet, or of Arrow's two forms (the stream is what `datasets` saves)."""
    if magic.startswith(PARQUET):
        batches: Iterable[Any] = parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
    elif magic.startswith(ARROW_FILE):
        reader = ipc.open_file(pyarrow.memory_map(str(file)))
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = ipc.open_stream(pyarrow.memory_map(str(file)))
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


def _around_rows(text: str) -> tuple[int, str]:
    """Where the rows within an object start, and what ends them; 0 and "" where it is a row itself, or none."""
    values, at = list[Any](), 1
    try:
        if text[DECODER.raw_decode(text)[1] :].strip():  # lines, or objects of several lines each
            return 0, ""
    except (ValueError, RecursionError):  # it goes on behind the text
        pass
    with suppress(ValueError, RecursionError):
        while key := MEMBER.match(text, at):
            if json.loads(key[1]) in WRAPPERS and re.compile(r"\[\s*\{").match(text, key.end()):
                return key.end() + 1, "]"  # {"data": [...]}
            value, at = DECODER.raw_decode(text, key.end())
            values.append(value)
    rows = len(values) > 1 and all(isinstance(value, dict) for value in values)
    return (1, "}") if rows else (0, "")  # {"0": {...}, "1": {...}}


def _values(stream: BufferedReader, end: str) -> Iterator[Any]:
    """The values of a list or of an object's members up to its `end`; where that is "", those of the whole stream.

    Never more than the longest row is held. Behind what is no JSON the next line is read that begins a row; within a
    list nothing says where that is.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    buffer, at, empty, more = "", 0, True, True
    while True:
        at = GAP.match(buffer, at).end()  # type: ignore[union-attr]
        if end and buffer.startswith(end, at):
            break
        try:
            value, behind = DECODER.raw_decode(buffer, at)
            if behind > at + LONGEST_ROW:
                raise ValueError("it is longer")
        except (ValueError, RecursionError) as error:
            reason, begins = getattr(error, "msg", error), buffer[at : at + SHOWN]
            value, behind = RowError(f"no JSON of at most {LONGEST_ROW >> 20} MiB ({reason}): {begins!r}"), len(buffer)
        if more and GAP.match(buffer, behind).end() == len(buffer) <= at + LONGEST_ROW:  # type: ignore[union-attr]
            read = stream.read(CHUNK)  # it may go on
            buffer, at, more = buffer[at:] + decode(read, not read), 0, bool(read)
            continue
        if at == len(buffer) and not end:
            return
        empty = False
        if not isinstance(value, RowError):
            element, at = buffer[at:behind], behind
            yield value if element.isascii() else _in_utf8(value, element)
        elif end:
            yield RowError(f"{value}; nothing behind it is read")
            return
        else:
            yield value
            while not (found := NEXT_LINE.search(buffer, at)) and more:
                read = stream.read(CHUNK)
                buffer, at, more = buffer[-1:] + decode(read, not read), 0, bool(read)
            at = found.end() if found else len(buffer)
    if empty:
        yield RowError("the list is empty")
    if (buffer[at + 1 :] + decode(stream.read(CHUNK))).strip(" \t\r\n}"):
        yield RowError("more follows the end of the list, and is not read")


def _in_utf8(value: Any, text: str) -> Any:
    """The value, unless its text has bytes that are no UTF-8."""
    data = text.encode(errors="surrogateescape")
    try:
        data.decode()
        return value
    except UnicodeDecodeError as error:
        near, reads = data[max(0, error.start - 8) : error.start + 8], ""
        with suppress(UnicodeDecodeError):
            reads = f" (in Windows-1252 it reads {near.decode('cp1252')!r}: iconv -f WINDOWS-1252 -t UTF-8)"
        return RowError(f"not UTF-8 at byte {error.start}{reads}")


def _looks_like_hub(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and Path(path).suffix.lower() not in SUFFIXES
