"""Raw rows of data files, one at a time: memory does not grow with the file.

JSONL, JSON lists, objects around such or behind each other, plain or compressed (gzip, bz2, xz, zstd); Parquet, Arrow;
all known by their content. Globs, Hub datasets. What cannot be read is a RowError in its place, and reading goes on
behind it.
"""

import bz2
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
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow import ipc, parquet

CHUNK = 1 << 20
LONGEST_REASON = 400
LONGEST_ROW = 16 * CHUNK  # bytes: a longer row is counted and rejected, never held
# What says where an element of JSON ends: brackets and commas outside strings. A string ends in group 1, or goes on
# behind the text.
STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{},]', re.DOTALL)
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, pyarrow.ArrowException)  # what a cut or broken file raises
WIDE = {  # encodings of two bytes by how a file begins: with their mark, or with the "{" or "[" of JSON
    rb"\xff\xfe|[{\[]\0": "UTF-16LE",
    rb"\xfe\xff|\0[{\[]": "UTF-16BE",
}
WRAPPERS = ("data", "train", "rows", "examples", "instances", "dataset")  # {"data": [{...}, ...]}
PACKED: dict[bytes, Callable[[Path], Any]] = {  # how a compressed file begins, and what opens it
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": partial(pyarrow.input_stream, compression="zstd"),
}
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
ROWS_AT_ONCE = 64  # of a table's columns made into rows
MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
MARK = b"\xef\xbb\xbf"  # a byte order mark, in UTF-8
BLANK = b" \t\r\n\x1e"  # RFC 7464 puts a record separator before each JSON text


class RowError(ValueError):
    """Why a row cannot be used, short and encodable, though it may quote the row."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:LONGEST_REASON].encode(errors="backslashreplace").decode())


def read_rows(path: str, option: str = "data.path") -> Iterator[Any]:
    """Raw rows of every file that `path` (a file, a glob, a Hub dataset) names; a RowError stands for each
    row, or rest of a file, that cannot be read.

    Raises ValueError when nothing is there.
    """
    check_source(option, path)
    files = local_files(path)
    if not files:
        yield from _read_hub(option, path)
    for file in files:
        yield from _read_file(file)


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
        encoding = next((name for pattern, name in WIDE.items() if start[:2] and re.match(pattern, start)), None)
        if encoding:
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


def _read_file(file: Path) -> Iterator[Any]:
    number = 0
    try:
        for row in _rows(file):
            yield row
            number += 1
    except DAMAGE as error:
        yield RowError(f"{file.name} is damaged after {number} rows ({str(error).strip() or type(error).__name__})")


def _rows(file: Path) -> Iterator[Any]:
    with _opened(file) as stream:
        start = stream.peek()
        if start.startswith((PARQUET, ARROW_FILE, ARROW_STREAM)):
            yield from _table_rows(file, start)
            return
        if start.startswith(MARK):
            stream.read(len(MARK))
        while (start := stream.peek()) and start[0] in BLANK:
            stream.read(len(start) - len(start.lstrip(BLANK)))
        yield from _json_rows(stream, start) if start else [RowError(f"{file.name} is empty")]


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


def _json_rows(stream: BufferedReader, start: bytes) -> Iterator[Any]:
    """Rows of JSON text, whose start, as far as it can be seen, tells its form."""
    chunks = iter(partial(stream.read1, CHUNK), b"")
    if start.startswith(b"["):
        return _element_rows(chunks)
    line, _, following = start.partition(b"\n")
    is_json = not isinstance(_parsed(line, ""), RowError)
    if not start.startswith(b"{") or (following.strip() and (is_json or following.startswith(b"{"))):
        return _line_rows(stream)
    wrapped, values = _outline(start.decode("latin-1"))
    if wrapped:  # {"data": [...]}
        stream.read(wrapped)
        return _element_rows(chunks)
    if len(values) > 1 and all(isinstance(value, dict) for value in values):  # {"0": {...}, "1": {...}}
        return _element_rows(chunks, of="object")
    if is_json or not following:
        return _line_rows(stream)
    return _element_rows(chain([b"["], chunks, [b"]"]))  # objects of several lines each


def _outline(text: str) -> tuple[int, list[Any]]:
    """Of an object, as far as its text goes: where the list of rows in it starts (0: it has none), and the values of
    its members up to there."""
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 1
    try:
        while key := MEMBER.match(text, at):
            if json.loads(key[1]) in WRAPPERS and re.compile(r"\[\s*\{").match(text, key.end()):
                return key.end(), values
            value, at = decoder.raw_decode(text, key.end())
            values.append(value)
    except (ValueError, RecursionError):  # it goes on behind the text
        pass
    return 0, values


def _line_rows(stream: BinaryIO) -> Iterator[Any]:
    for number in count(1):
        line = end = stream.readline(LONGEST_ROW + 1)
        if not line:
            return
        size = len(line)
        while size > LONGEST_ROW and end and not end.endswith(b"\n"):
            end = stream.readline(CHUNK)
            size += len(end)
        if size > len(line):
            yield _parsed(size, f"line {number}")
        elif line.strip(BLANK):
            yield _parsed(line.removesuffix(b"\n").lstrip(b"\x1e"), f"line {number}")


def _element_rows(chunks: Iterable[bytes], of: str = "list") -> Iterator[Any]:
    """The elements of a list, or the values of an object's members."""
    number = 0
    for number, element in enumerate(_elements(chunks), 1):
        if of == "object" and isinstance(element, bytes):
            element = b"{" + element + b"}"
        row = element if isinstance(element, RowError) else _parsed(element, f"row {number} of the {of}")
        yield from row.values() if of == "object" and isinstance(row, dict) else [row]
    if not number:
        yield RowError("the list is empty")


def _elements(chunks: Iterable[bytes]) -> Iterator[bytes | int | RowError]:
    """Each element of a JSON list (or member of an object) as bytes (of one that is too long, its length), found by
    brackets alone, so that one that does not parse costs no other; between objects there may be no comma. At the end a
    RowError when the list is not closed."""
    buffer, quoted, ended = b"", b"", False  # quoted: what says that a string is open
    start = at = depth = dropped = number = 0
    chunks = iter(chunks)
    for chunk in chunks:
        buffer, at, start, quoted = buffer[start:] + chunk, at - start, 0, b""
        for match in STRUCTURE.finditer(buffer, at):
            at, token = match.end(), match[0]
            if token.startswith(b'"'):
                if not match[1]:
                    at, quoted = match.start(), b'"' + buffer[match.end() :]
                continue
            depth += 1 if token in b"[{" else -1 if token in b"]}" else 0
            if token in b"[{" and depth == 1:
                start = at
            elif depth == 0 or (depth == 1 and token in b",]}"):
                closed = depth == 1 and token != b","
                element = buffer[start : at if closed else match.start()]
                if element.strip() or dropped or not (ended or (depth == 0 and number == 0)):
                    number += 1
                    yield dropped + len(element) if dropped else element
                start, dropped, ended = at, 0, closed
                if depth == 0:
                    behind = sum(len(more.strip(b" \t\r\n}")) for more in chain([buffer[at:]], chunks))
                    if behind:
                        yield RowError(f"{behind} bytes follow the end of the list")
                    return
        if not quoted:
            at = len(buffer)
        if len(buffer) - start > LONGEST_ROW:
            dropped += len(buffer) - start
            buffer, start, at = quoted, 0, 0
    if depth == 1 and not (dropped or quoted):
        if buffer[start:].strip():
            number += 1
            yield buffer[start:]
        yield RowError(f"the list is not closed after row {number}: the file was cut")
    else:
        yield RowError(f"the list ends inside row {number + 1}: the file was cut")


def _parsed(data: bytes | int, where: str) -> Any:
    if isinstance(data, int):
        return RowError(f"{where} has {data / 2**20:.0f} MiB, more than the {LONGEST_ROW >> 20} of the longest row")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        near, reads = data[max(0, error.start - 8) : error.start + 8], ""
        with suppress(UnicodeDecodeError):
            reads = f" (in Windows-1252 it reads {near.decode('cp1252')!r}: iconv -f WINDOWS-1252 -t UTF-8)"
        return RowError(f"{where} is not UTF-8 at byte {error.start}{reads}")
    except RecursionError:
        return RowError(f"{where} is nested too deeply")
    except ValueError:
        return RowError(f"{where} is no JSON")


def _looks_like_hub(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix


def _read_hub(option: str, name: str) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # whatever the Hub or the network answers
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{option}={name}: no such file, and the Hub gave no dataset ({reason})") from error
