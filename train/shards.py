"""What is prepared, read as a stream of shards: rows that are worked on together."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from ctcdraft.data import questions, toy
from ctcdraft.data.duplicates import NearDuplicates
from ctcdraft.data.features import FORMATS
from ctcdraft.data.records import Conversation, Record, Text, record_of
from ctcdraft.data.sources import RowError, read_mixture, read_rows
from ctcdraft.data.template import TURNS
from ctcdraft.train.options import MAY_DIFFER
from ctcdraft.train.regenerate import RegenerateConfig

KINDS = ("toy", "prompts", "sharegpt", "text", "mixed")
GENERATED = {"toy": toy, "prompts": questions}
GENERATED_ROWS = 1800
LABELS = ("rewrite", "argmax", "given")
SPLITS = ("train", "dev", "heldout")
ASKED_CHARACTERS = 4000  # of a row's user turns, kept to be compared with the evaluation questions


@dataclass(frozen=True)
class DataConfig:
    """kind: `toy` or `prompts` (both generated), `sharegpt` (conversations, any form), `text`, or `mixed` (both);
    path: file, glob or Hub name, or a list of them, with `weights` mixed row by row in these shares until one ends.

    labels: `rewrite`: the base rewrites every answer, as `regenerate` says; `argmax`: the given answers stay, with the
    base's argmax at each position as labels; `given`: the given answers are the base's own, and their own labels.
    limit: use at most so many rows. holdout: share of rows kept for development and for questions, half
    and half. dedupe: drop rows of equal content. keep_out: questions (a file) whose near-duplicates are dropped.
    turns: `each` answer is learned, or the `last` alone. template_args: what the chat template gets beside the
    messages, as {"enable_thinking": False}; the trained head keeps it. prompt_tokens and samples_per_text: how texts
    are cut, which the base always continues. max_new_tokens per answer. shard_rows: rows worked on, and lost by
    nobody, at a time.
    features: the base's hidden states are stored, in this format, and training reads them; None: the base makes them
    at each step. show: so many sequences are printed after preparing.
    """

    kind: str = "toy"
    path: str | list[str] | None = None
    labels: str = "rewrite"
    weights: list[float] | None = None
    limit: int | None = None
    holdout: float = 0.1
    dedupe: bool = True
    keep_out: str | None = None
    turns: str = "each"
    template_args: dict[str, Any] | None = None
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    prompt_tokens: list[int] = field(default_factory=lambda: [8, 140])
    samples_per_text: int = 4
    max_new_tokens: int = 192
    batch_size: int = field(default=64, metadata=MAY_DIFFER)
    shard_rows: int = 2048
    features: str | None = None
    show: int = field(default=0, metadata=MAY_DIFFER)

    def __post_init__(self) -> None:
        low_high = self.prompt_tokens
        for name, known in (("kind", KINDS), ("labels", LABELS), ("turns", TURNS)):
            if getattr(self, name) not in known:
                raise ValueError(f"data.{name}={getattr(self, name)!r} is unknown: choose one of {known}")
        if self.kind not in GENERATED and not self.paths:
            raise ValueError(f"data={self.kind} needs data.path=<file, glob or Hub name>")
        if self.kind == "text" and self.labels != "rewrite":
            raise ValueError(
                f"data.labels={self.labels}: the base continues every text: leave it at rewrite for data=text"
            )
        if self.weights is not None and (len(self.weights) != len(self.paths) or min(self.weights) <= 0):
            raise ValueError(f"data.weights={self.weights}: give one above 0 for each of {len(self.paths)} paths")
        if len(low_high) != 2 or not 1 <= low_high[0] <= low_high[1]:
            raise ValueError(f"data.prompt_tokens={low_high}: give [shortest, longest], 1 or more")
        if not 0.0 < self.holdout < 0.9:
            raise ValueError(f"data.holdout={self.holdout} must lie between 0 and 0.9")
        counts = ("samples_per_text", "max_new_tokens", "batch_size", "shard_rows")
        if min(*(getattr(self, name) for name in counts), 1 if self.limit is None else self.limit) < 1:
            raise ValueError(f"data.{', '.join(counts)} and limit must be at least 1")
        if self.features is not None and self.features not in FORMATS:
            raise ValueError(f"data.features={self.features!r} is unknown: choose one of {tuple(FORMATS)}, or null")
        if self.show < 0:
            raise ValueError(f"data.show={self.show} must not be negative")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])


@dataclass
class Account:
    """What became of rows: how many were read, which were rejected and why, what became of the turns that were asked,
    and how often what rows hold was not read; errors: why turns got no answer that may get one another time."""

    read: int = 0
    rejects: list[dict[str, Any]] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def reject(self, row: str, reason: object) -> None:
        self.rejects.append({"row": row, "reason": str(reason)})


@dataclass(frozen=True)
class Shard:
    """Rows that are worked on together: what can be used of them, by split, and their account so far."""

    number: int
    splits: dict[str, list[Record]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    account: Account = field(default_factory=Account)


def read_shards(config: DataConfig, seed: int) -> Iterator[Shard]:
    """The source as shards. Equal rows are dropped, and the split goes by a hash of the opening: rows that open
    alike land together."""
    seen: dict[bytes, str] = {}
    keep_out = NearDuplicates(_keep_out(config.keep_out)) if config.keep_out else None
    shard = Shard(0)
    for index, (name, row) in enumerate(tqdm(_rows(config, seed), "reading", unit="row", mininterval=1)):
        if config.limit is not None and index >= config.limit:
            break
        if shard.account.read == config.shard_rows:
            yield shard
            shard = Shard(shard.number + 1)
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
            shard.splits[_split(record, config.holdout)].append(replace(record, id=name))
            shard.account.unread.update(record.unread)
    yield shard


def _rows(config: DataConfig, seed: int) -> Iterator[tuple[str, Any]]:
    if config.paths:
        return read_mixture(config.paths, config.weights)
    made = GENERATED[config.kind].conversations(config.limit or GENERATED_ROWS, seed)
    return ((str(number), row) for number, row in enumerate(made))


def _split(record: Record, holdout: float) -> str:
    draw = int.from_bytes(hashlib.sha256(record.opening.encode()).digest()[:8], "big") / 2**64
    return "dev" if draw < holdout / 2 else "heldout" if draw < holdout else "train"


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
