"""Raw rows of data files, one at a time: memory does not grow with the file.

JSON lists and JSONL, plain or compressed (gzip, bz2, xz, zstd, known by their first bytes), globs, Hub datasets.
What cannot be read is a RowError in its place, and reading goes on behind it.
"""

import bz2
import glob
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
LONGEST_ROW = 16 * CHUNK  # bytes: a longer row is counted and rejected, never held
STRUCTURE = re.compile(rb'["\[\]{},]')
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)  # what a cut or broken compressed file raises


class RowError(ValueError):
    """Why a row cannot be used."""


def read_rows(path: str, option: str = "data.path") -> Iterator[Any]:
    """Raw rows of every file that `path` (a file, a glob, a Hub dataset) names; a RowError stands for each
    row, or rest of a file, that cannot be read.

    Raises ValueError when nothing is there.
    """
    check_source(option, path)
    files = _files(path)
    if not files:
        yield from _read_hub(option, path)
    for file in files:
        yield from _read_file(file)


def read_mixture(paths: Sequence[str], weights: Sequence[float] | None = None) -> Iterator[tuple[str, Any]]:
    """(name, raw row) of several sources; a name is `<row>`, with `<source>:` before it where there are several.

    Without weights, one source after the other, each whole. With weights, row by row in these shares, until
    the first source has no more: so the shares hold to the end.
    """
    streams = [enumerate(read_rows(path)) for path in paths]
    prefixes = [f"{i}:" for i in range(len(paths))] if len(paths) > 1 else [""]
    if weights is None:
        for prefix, stream in zip(prefixes, streams, strict=True):
            yield from ((f"{prefix}{number}", row) for number, row in stream)
        return
    taken = [0] * len(paths)
    while True:  # whoever lags furthest behind its share is next
        source = min(range(len(paths)), key=lambda i: (taken[i] + 0.5) / weights[i])
        found = next(streams[source], None)
        if found is None:
            return
        taken[source] += 1
        yield f"{prefixes[source]}{found[0]}", found[1]


def check_source(option: str, path: str | None) -> None:
    """Raises ValueError when files are named that are not there or hold nothing: long work starts after this."""
    if path is None or _looks_like_hub(path):
        return
    files = _files(path)
    if not files:
        raise ValueError(f"{option}={path}: no such file")
    for file in files:
        if file.is_dir():
            raise ValueError(f"{option}={path}: {file} is a folder; give a JSON or JSONL file, or a glob")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{option}={path}: the file {files[0]} is empty")


def source_hash(path: str) -> str:
    """A hash over the content of the files that `path` names (over the name, for the Hub)."""
    digest = hashlib.sha256()
    files = _files(path)
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else path


def _files(path: str) -> list[Path]:
    return [Path(file) for file in sorted(glob.glob(str(Path(path).expanduser()), recursive=True))]


def _opened(file: Path) -> Any:
    with file.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if magic.startswith(b"BZh"):
        return bz2.open(file)
    if magic.startswith(b"\xfd7zXZ\x00"):
        return lzma.open(file)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        return pyarrow.input_stream(file, compression="zstd")
    return file.open("rb")


def _chunks(file: Path) -> Iterator[bytes]:
    """The file's bytes, without a byte order mark."""
    with _opened(file) as stream:
        start = stream.read(CHUNK).removeprefix(b"\xef\xbb\xbf")
        yield start
        while chunk := stream.read(CHUNK):
            yield chunk


def _read_file(file: Path) -> Iterator[Any]:
    number = 0
    try:
        chunks = _chunks(file)
        start = next(chunks).lstrip()
        while not start:  # blank so far
            chunk = next(chunks, None)
            if chunk is None:
                yield RowError(f"{file.name} is empty")
                return
            start = chunk.lstrip() and chunk
        read = _list_rows if start.lstrip().startswith(b"[") else _line_rows
        for row in read(_chained(start, chunks)):
            yield row
            number += 1
    except DAMAGE as error:
        yield RowError(f"{file.name} is damaged after {number} rows ({str(error).strip() or type(error).__name__})")


def _chained(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _line_rows(chunks: Iterable[bytes]) -> Iterator[Any]:
    for number, line in enumerate(_lines(chunks), 1):
        if isinstance(line, int) or line.strip():
            yield _parsed(line, f"line {number}")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes | int]:
    """Lines without their ends; of one that is too long, its length."""
    held, size = bytearray(), 0
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        for i, piece in enumerate(pieces):
            size += len(piece)
            if size <= LONGEST_ROW:
                held += piece
            if i < len(pieces) - 1:
                yield bytes(held) if size <= LONGEST_ROW else size
                held.clear()
                size = 0
    if size:
        yield bytes(held) if size <= LONGEST_ROW else size


def _list_rows(chunks: Iterable[bytes]) -> Iterator[Any]:
    empty = True
    for number, element in enumerate(_elements(chunks), 1):
        yield element if isinstance(element, RowError) else _parsed(element, f"row {number} of the list")
        empty = False
    if empty:
        yield RowError("the list is empty")


def _elements(chunks: Iterable[bytes]) -> Iterator[bytes | int | RowError]:
    """Each element of a JSON list as bytes (of one that is too long, its length), found by brackets alone, so
    that one that does not parse costs no other. At the end a RowError when the list is not closed."""
    buffer, quoted = b"", False
    start = at = depth = dropped = number = 0
    chunks = iter(chunks)
    for chunk in chunks:
        buffer, at, start = buffer[start:] + chunk, at - start, 0
        while True:
            if quoted:
                at = _string_end(buffer, at)
                if at < 0:
                    break
                quoted = False
            match = STRUCTURE.search(buffer, at)
            if not match:
                break
            at, token = match.end(), match[0]
            if token == b'"':
                quoted = True
                continue
            depth += 1 if token in b"[{" else -1 if token in b"]}" else 0
            if token == b"[" and depth == 1:
                start = at
            elif depth == 0 or (depth == 1 and token == b","):
                element = buffer[start : match.start()]
                if depth or number or dropped or element.strip():
                    number += 1
                    yield dropped + len(element) if dropped else element
                start, dropped = at, 0
                if depth == 0:
                    behind = len(buffer[at:].strip()) + sum(len(more.strip()) for more in chunks)
                    if behind:
                        yield RowError(f"{behind} bytes follow the end of the list")
                    return
        at = len(buffer.rstrip(b"\\")) if quoted else len(buffer)
        if len(buffer) - start > LONGEST_ROW:  # keep only what says where in a string we are
            dropped += at - 1 - start
            start = at - 1
    if depth == 1 and not (dropped or quoted) and buffer[start:].strip():
        number += 1
        yield buffer[start:]
        yield RowError(f"the list is not closed after row {number}: the file was cut")
    else:
        yield RowError(f"the list ends inside row {number + 1}: the file was cut")


def _string_end(buffer: bytes, at: int) -> int:
    """Behind the next quote that no backslash escapes; -1 where there is none."""
    while (end := buffer.find(b'"', at)) >= 0:
        escapes = end
        while buffer[escapes - 1] == ord("\\"):
            escapes -= 1
        at = end + 1
        if (end - escapes) % 2 == 0:
            return at
    return -1


def _parsed(data: bytes | int, where: str) -> Any:
    if isinstance(data, int):
        return RowError(f"{where} has {data / 2**20:.0f} MiB, more than the {LONGEST_ROW >> 20} of the longest row")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        return RowError(f"{where} is not UTF-8 at byte {error.start}")
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
