"""Rows of a data file -> conversations or texts; a row that cannot be used is a RowError with the reason.

Forms: a JSON list or JSONL of ShareGPT rows (`conversations` with `from`/`value`), of `messages` (`role`/
`content`), of strings, of `{"text": ...}`. Local files (also .gz) and globs, or the name of a dataset on the Hub.
"""

import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
}
TEXT_KEYS = ("text", "story", "content", "prompt")


class RowError(ValueError):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class Conversation:
    """Messages `{"role", "content"}`: an optional system turn, then user and assistant in turn."""

    id: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Text:
    """A document that the base continues from some point."""

    id: str
    text: str


def read_rows(path: str) -> Iterator[Any]:
    """Raw rows of every file that `path` (a file, a glob, a Hub dataset) names; a RowError stands for a
    line that is no JSON.

    Raises ValueError when nothing is there, a file is empty, or a JSON list does not parse.
    """
    check_source("data.path", path)
    files = sorted(glob.glob(str(Path(path).expanduser())))
    if not files:
        yield from _read_hub(path)
    for file in files:
        yield from _read_file(Path(file))


def check_source(option: str, path: str | None) -> None:
    """Raises ValueError when files are named that are not there or are empty: long work starts after this."""
    if path is None or _looks_like_hub(path):
        return
    files = [Path(file) for file in sorted(glob.glob(str(Path(path).expanduser())))]
    if not files:
        raise ValueError(f"{option}={path}: no such file")
    for file in files:
        if file.is_dir():
            raise ValueError(f"{option}={path}: {file} is a folder; give a JSON or JSONL file, or a glob")
        if not file.stat().st_size:
            raise ValueError(f"{option}={path}: the file {file} is empty")


def source_hash(path: str) -> str:
    """A hash over the content of the files that `path` names (over the name, for the Hub)."""
    digest = hashlib.sha256()
    files = sorted(glob.glob(str(Path(path).expanduser())))
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else path


def conversation_of(row: Any, index: int) -> Conversation:
    """The conversation in a row. Raises RowError with what is wrong and in which turn."""
    row = _object(row)
    turns = row.get("conversations", row.get("messages"))
    if not isinstance(turns, list) or not turns:
        raise RowError("no list under 'conversations' or 'messages'")
    messages = tuple(_message(turn, i) for i, turn in enumerate(turns))
    body = messages[1:] if messages[0]["role"] == "system" else messages
    for i, message in enumerate(body):
        if message["role"] != ("user", "assistant")[i % 2]:
            where = "starts with" if i == 0 else f"turn {i + len(messages) - len(body)} is from"
            raise RowError(f"{where} the {message['role']} where the {('user', 'assistant')[i % 2]} is due")
    if not body:
        raise RowError("no user turn")
    return Conversation(str(row.get("id", index)), messages)


def text_of(row: Any, index: int) -> Text:
    """The text in a row. Raises RowError when there is none."""
    if isinstance(row, RowError):
        raise row
    if isinstance(row, dict):
        name = str(row.get("id", index))
        row = next((row[key] for key in TEXT_KEYS if key in row), None)
    else:
        name = str(index)
    if not isinstance(row, str):
        raise RowError(f"neither a string nor an object with one of {', '.join(TEXT_KEYS)}")
    if not row.strip():
        raise RowError("empty text")
    return Text(name, _encodable(row, "the text"))


def _object(row: Any) -> dict[str, Any]:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"an object is needed, this is a {type(row).__name__}")
    return row


def _message(turn: Any, index: int) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise RowError(f"turn {index} is no object")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"turn {index} has the unknown role {role!r}")
    if not isinstance(content, str) or not content.strip():
        raise RowError(f"turn {index} (from the {ROLES[role]}) is empty")
    return {"role": ROLES[role], "content": _encodable(content, f"turn {index}")}


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{where} holds half a character (a lone surrogate) at {error.start}") from error
    return text


def _read_file(file: Path) -> Iterator[Any]:
    try:
        text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: damaged ({error})") from error
    if not text.strip():
        raise ValueError(f"{file}: the file is empty")
    if text.lstrip()[0] == "[":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: starts like a JSON list but is none ({error})") from error
        if not rows:
            raise ValueError(f"{file}: the list is empty")
        yield from rows
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield RowError(f"line {number} is no JSON")


def _looks_like_hub(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix


def _read_hub(name: str) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(name, split="train")
    except Exception as error:  # whatever the Hub or the network answers
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"data.path={name}: no such file, and the Hub gave no dataset ({reason})") from error
