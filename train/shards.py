"""What is prepared, read as a stream of shards: rows that are worked on together."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from tqdm import tqdm

from ctcdraft.data.duplicates import NearDuplicates
from ctcdraft.data.generated import GENERATED
from ctcdraft.data.records import Conversation, Record, Text, record_of
from ctcdraft.data.sources import RowError, read_mixture, read_rows

GENERATED_ROWS = 1800
LEARNT = ("train", "dev")
SPLITS = (*LEARNT, "heldout")
ASKED_CHARACTERS = 4000  # of a row's user turns, kept to be compared with the evaluation questions


@dataclass(frozen=True)
class RowsConfig:
    """kind: `toy` or `prompts` (both generated), `sharegpt` (conversations, any form), `text`, or `mixed` (both)."""

    kind: Literal["toy", "prompts", "sharegpt", "text", "mixed"] = "toy"
    path: str | list[str] | None = None  # file, glob or Hub name, or a list of them
    # several paths: their shares, row by row, until one ends; null: all of each
    weights: list[PositiveFloat] | None = None
    limit: PositiveInt | None = None  # rows that are read, or generated; null: all
    # share kept from training: half to choose the best head by, half for bench=heldout
    holdout: Annotated[float, Field(gt=0, lt=0.9)] = 0.1
    dedupe: bool = True  # drop rows of equal content
    keep_out: str | None = None  # a file of evaluation questions: rows that nearly repeat one are dropped
    shard_rows: PositiveInt = 2048  # rows worked on at a time, by one process

    def __post_init__(self) -> None:
        if self.kind not in GENERATED and not self.paths:
            raise ValueError(f"data={self.kind} needs data.path=<file, glob or Hub name>")
        if self.kind in GENERATED and self.paths:
            raise ValueError(
                f"data={self.kind} generates its rows: data.path={self.path} goes with data=sharegpt, text or mixed"
            )
        if self.weights is not None and len(self.weights) != len(self.paths):
            raise ValueError(f"data.weights={self.weights}: give one above 0 for each of {len(self.paths)} paths")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    def rows(self, seed: int) -> Iterator[tuple[str, Any]]:
        """(name, raw row) of all that is there, or is generated."""
        if self.paths:
            return read_mixture(self.paths, self.weights)
        made = GENERATED[self.kind].conversations(self.limit or GENERATED_ROWS, seed)
        return ((str(number), row) for number, row in enumerate(made))


@dataclass
class Account:
    """What became of rows: how many were read, which were rejected and why, what became of the turns that were asked,
    and how often what rows hold was not read; errors: why turns got no answer that may get one another time; heldout:
    rows as questions; asked: what the rows for training ask."""

    read: int = 0
    rejects: list[dict[str, Any]] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    heldout: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)

    def reject(self, row: str, reason: object) -> None:
        self.rejects.append({"row": row, "reason": str(reason)})


@dataclass(frozen=True)
class Shard:
    """Rows that are worked on together: what can be used of them, by split, and their account so far."""

    splits: dict[str, list[Record]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    account: Account = field(default_factory=Account)


def read_shards(config: RowsConfig, seed: int) -> Iterator[Shard]:
    """The source as shards. Equal rows are dropped, and the split goes by a hash of the opening: rows that open
    alike land together."""
    seen: dict[bytes, str] = {}
    keep_out = NearDuplicates(_keep_out(config.keep_out)) if config.keep_out else None
    shard = Shard()
    for name, row in tqdm(islice(config.rows(seed), config.limit), "reading", unit="row", mininterval=1):
        if shard.account.read == config.shard_rows:
            yield shard
            shard = Shard()
        shard.account.read += 1
        try:
            record = record_of(row, name, "sharegpt" if config.kind in GENERATED else config.kind)
            if config.dedupe and (first := seen.setdefault(record.digest, name)) != name:
                raise RowError(f"the same as row {first}")
            near = keep_out.of(asked_text(record)) if keep_out else None
            if near is not None:
                raise RowError(f"nearly question {near} of {config.keep_out}")
        except RowError as error:
            shard.account.reject(name, error)
        else:
            place = int.from_bytes(hashlib.sha256(record.opening.encode()).digest()[:8], "big") / 2**64
            asked = place < config.holdout and config.kind not in GENERATED  # whose questions are others
            split = "dev" if place < config.holdout / 2 else "heldout" if asked else "train"
            shard.splits[split].append(replace(record, id=name))
            shard.account.unread.update(record.unread)
    yield shard


def asked_text(record: Record) -> str:
    """What a row asks, to be compared with evaluation questions."""
    if isinstance(record, Conversation):
        return "\n".join(m["content"] for m in record.messages if m["role"] == "user")[:ASKED_CHARACTERS]
    return record.text[:ASKED_CHARACTERS] if isinstance(record, Text) else ""


def _keep_out(path: str) -> list[str]:
    """The first turns of a file of evaluation questions. Raises ValueError where a row is none."""
    found = []
    for number, row in enumerate(read_rows(path, "data.keep_out")):
        try:
            found.append(record_of(row, str(number), "mixed").opening)
        except RowError as error:
            raise ValueError(f"data.keep_out={path}: row {number}: {error}") from error
    return found
