"""Prepared data on disk: token sequences with a loss mask and labels, and the account of how they came.

A folder holds train.safetensors and dev.safetensors, heldout.jsonl (questions never trained on),
rejects.jsonl and manifest.json, which is written last: a folder without one is not prepared.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Tokens = Sequence[int] | NDArray[Any]


class Example(NamedTuple):
    """One sequence: token ids, mask (1 where the base itself wrote the token), and labels, the token that
    the base puts at each position (the ids themselves where it wrote them)."""

    ids: Tokens
    mask: Tokens
    labels: Tokens


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


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that becomes `folder` in one rename when the block ends well, and is gone if not.

    A process that is killed leaves nothing of that name; of two at once, the first to end stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"unfinished-{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # a temporary folder is made for its owner alone
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_corpus(path: Path, examples: Sequence[Example]) -> None:
    """Write the examples as flat arrays."""
    ids, mask, labels = (np.concatenate([[], *(np.asarray(e[i]) for e in examples)]) for i in range(3))
    offsets = np.cumsum([0, *(len(e.ids) for e in examples)])
    save_file(
        {
            "ids": ids.astype(np.int32),
            "mask": mask.astype(np.uint8),
            "labels": labels.astype(np.int32),
            "offsets": np.asarray(offsets, np.int64),
        },
        path,
    )


def load_corpus(folder: Path, split: str) -> Corpus:
    """The `train` or `dev` sequences of a prepared folder. Raises ValueError when they are damaged."""
    path = folder / f"{split}.safetensors"
    try:
        return Corpus(**load_file(path))
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} is damaged: delete {folder} and run the command again") from error


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that this project wrote. Raises ValueError when it is damaged or lacks a key."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and set(keys) <= set(found):
            return found
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"{path} is damaged: delete it and run the command again")


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
    """All objects of a file that `write_jsonl` wrote. Raises ValueError when it is damaged."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: delete its folder and run the command again") from error
