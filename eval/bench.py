"""Questions to decode: two-turn chats in MT-Bench's format, or prompts cut from texts."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctcdraft.data import embedded
from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.records import text_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.data.store import read_jsonl
from ctcdraft.data.template import prompt_ids
from ctcdraft.model.base import Base, warn_if_plain

KINDS = ("heldout", "embedded", "mt_bench", "text")


@dataclass(frozen=True)
class BenchConfig:
    """kind: `heldout` (what the run's data keeps from training), `embedded`, `mt_bench`, `text`.

    questions: at most so many; prompt_tokens: [shortest, longest] prompt cut from a text.
    """

    kind: str = "heldout"
    path: str | None = None
    questions: int | None = 80
    prompt_tokens: list[int] = field(default_factory=lambda: [32, 140])
    max_new_tokens: int = 128
    warmups: int = 3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"bench.kind={self.kind!r} is unknown: choose one of {KINDS}")
        if self.kind in ("mt_bench", "text") and self.path is None:
            raise ValueError(f"bench={self.kind} needs bench.path=<file>")
        if self.max_new_tokens < 1 or (self.questions is not None and self.questions < 1):
            raise ValueError("bench.max_new_tokens and bench.questions must be at least 1")
        if self.warmups < 0:
            raise ValueError(f"bench.warmups={self.warmups} must not be negative")
        if len(self.prompt_tokens) != 2 or not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError(f"bench.prompt_tokens={self.prompt_tokens}: give [shortest, longest], 1 or more")


@dataclass(frozen=True)
class Question:
    """Either user turns to be answered in order, or one prompt of tokens."""

    id: str
    category: str
    turns: tuple[str, ...] = ()
    prompt: tuple[int, ...] = ()

    def prompts(self, base: Base) -> Generator[list[int], list[int], None]:
        """Token prompts, one per turn. Send each turn's answer (tokens) back in before the next."""
        if self.prompt:
            yield list(self.prompt)
            return
        messages: list[dict[str, str]] = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn})
            answer = yield prompt_ids(base.tokenizer, messages)
            text = base.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})


def load_questions(config: BenchConfig, base: Base, data_folder: Path | None, seed: int) -> list[Question]:
    """The benchmark's questions. Raises ValueError where there are none, or a row is no question."""
    if config.kind == "heldout":
        if data_folder is None or not (data_folder / "heldout.jsonl").is_file():
            raise ValueError("bench=heldout needs the run's prepared data, which is gone: choose another bench")
        rows: list[Any] = read_jsonl(data_folder / "heldout.jsonl")
    else:
        rows = embedded.questions() if config.path is None else list(read_rows(config.path))
    rows = rows[: config.questions]
    textual = config.kind == "text" or (config.kind == "heldout" and bool(rows) and "text" in rows[0])
    if textual:
        questions = list(_cut(config, base, rows, seed))
    else:
        warn_if_plain(base)
        questions = [_chat(config, row, i) for i, row in enumerate(rows)]
    if not questions:
        raise ValueError(f"bench={config.kind}: no question is left to decode (of {len(rows)} rows)")
    return questions


def _cut(config: BenchConfig, base: Base, rows: list[Any], seed: int) -> Iterator[Question]:
    low, high = config.prompt_tokens
    longest = min(high, base.context_length - 16)
    if low > longest:
        raise ValueError(f"bench.prompt_tokens={config.prompt_tokens}: {base.name} takes {base.context_length} tokens")
    for number, row in enumerate(rows):
        try:
            text = text_of(row, number)
        except RowError as error:
            raise ValueError(f"bench.path={config.path}: row {number}: {error}") from error
        for ids in cut_prompts(base.tokenizer, text.text, (low, longest), 1, (seed, number)):
            yield Question(text.id, "text", prompt=tuple(ids))


def _chat(config: BenchConfig, row: Any, number: int) -> Question:
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"bench.path={config.path}: row {number} has no list of 'turns'")
    return Question(str(row.get("question_id", number)), str(row.get("category", "chat")), tuple(turns))
