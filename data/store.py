"""Prepared data on disk: token sequences with a loss mask and labels, and the account of how they came.

A folder holds train.safetensors and dev.safetensors, heldout.jsonl (questions never trained on),
rejects.jsonl and manifest.json, which is written last: a folder without one is not prepared.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

COLUMNS = {"ids": "int32", "mask": "uint8", "labels": "int32"}
Column = Sequence[int] | NDArray[Any]


class Example(NamedTuple):
    """One sequence: token ids, mask (1 where the base itself wrote the token), and labels, the token that
    the base puts at each position (the ids themselves where it wrote them)."""

    ids: Column
    mask: Column
    labels: Column


@dataclass(frozen=True)
class Corpus:
    """Examples end to end; example i is [offsets[i], offsets[i + 1])."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        span = slice(self.offsets[index], self.offsets[index + 1])
        return Example(self.ids[span], self.mask[span], self.labels[span])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class Journal(dict[str, Any]):
    """Answers that were paid for, by what was asked: a file of `[key, value]` lines, each on disk before it counts.

    The half line that a killed process leaves is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if path.is_file():
            good = 0
            with path.open("rb") as stream, suppress(ValueError):  # of a line that is half, or none
                for line in stream:
                    key, value = json.loads(line[: line.rindex(b"\n")])
                    super().__setitem__(key, value)
                    good += len(line)
            os.truncate(path, good)
        self._stream = path.open("a", encoding="utf-8")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._stream.write(json.dumps([key, value]) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def corpus_of(examples: Sequence[Example]) -> Corpus:
    """The examples end to end."""
    arrays: dict[str, Any] = {"offsets": np.cumsum([0, *(len(e.ids) for e in examples)], dtype=np.int64)}
    for name, dtype in COLUMNS.items():
        parts = (np.asarray(getattr(example, name), dtype) for example in examples)
        arrays[name] = np.concatenate([np.zeros(0, dtype), *parts])
    return Corpus(**arrays)


def save_corpus(path: Path, examples: Sequence[Example]) -> None:
    """Write the examples as flat arrays."""
    save_file(vars(corpus_of(examples)), path)


def join_corpora(path: Path, parts: Sequence[Path]) -> None:
    """Write the examples of several files into one, through memory maps: no column is in memory as a whole."""
    corpora = [_mapped(part) for part in parts]
    offsets = np.cumsum(np.concatenate([[0], *(corpus.lengths for corpus in corpora)]), dtype=np.int64)
    with TemporaryDirectory(dir=path.parent) as scratch:
        arrays = {"offsets": offsets}
        for name, dtype in COLUMNS.items():
            with (Path(scratch) / name).open("wb") as column:  # writing into a map would be a signal on a full disk
                for corpus in corpora:
                    column.write(getattr(corpus, name))
            arrays[name] = np.memmap(column.name, dtype, "r") if offsets[-1] else np.zeros(0, dtype)
        save_file(arrays, path)


def load_corpus(folder: Path, split: str) -> Corpus:
    """The `train` or `dev` sequences of a prepared folder, memory-mapped. Raises ValueError when they are not whole."""
    path = folder / f"{split}.safetensors"
    try:
        return _mapped(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is missing or damaged: delete {folder} and run the command again") from error


def _mapped(path: Path) -> Corpus:
    """The arrays of a file where they lie: torch's, since safetensors copies those that it makes for numpy."""
    with safe_open(path, "pt") as file:
        return Corpus(**{name: file.get_tensor(name).numpy() for name in (*COLUMNS, "offsets")})


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that this project wrote. Raises ValueError when it is damaged or lacks a key."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and set(keys) <= set(found):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise ValueError(f"{path} is damaged: delete {path.parent} and run the command again")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The account of a prepared folder; None where it is not (or not completely) prepared."""
    path = folder / "manifest.json"
    return read_object(path, "read", "used", "rejected", "train") if path.is_file() else None


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of a file that `write_jsonl` wrote. Raises ValueError when it is not whole."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged: delete its folder and run the command again") from error
