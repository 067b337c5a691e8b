"""Questions to decode: chats of one or more turns, code to complete, or prompts cut from texts."""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ctcdraft.data import toy
from ctcdraft.data.end_of_turn import warn_if_no_end
from ctcdraft.data.prompts import cut_prompts, question_ids
from ctcdraft.data.records import text_of
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import read_jsonl
from ctcdraft.data.template import answer_message, prompt_ids
from ctcdraft.eval.rows import benchmark_rows, category_of, row_id, system_and_tools, user_turns
from ctcdraft.model.base import Base, warn_if_plain
from ctcdraft.model.sampling import Sampling

KINDS = ("heldout", "toy", "mt_bench", "spec_bench", "gsm8k", "humaneval", "text")
NEED_PATH = ("mt_bench", "spec_bench", "gsm8k", "humaneval", "text")
FUNCTION_ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # as Chen et al. 2021 stop


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen: greedily (temperature 0) or sampled with the noise of a seed."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class BenchConfig:
    """kind: one of KINDS; `heldout` is what the run's data keeps from training.

    questions: at most so many, evenly spread over the benchmark's rows (None: all); prompt_tokens: [shortest, longest]
    prompt cut from a text. Every question is decoded at each of `temperatures`: once where that is 0, with `seeds`
    seeds where it is above.
    """

    kind: str = "heldout"
    path: str | None = None
    questions: int | None = 24
    prompt_tokens: list[int] = field(default_factory=lambda: [32, 140])
    max_new_tokens: int = 128
    warmups: int = 3
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"bench.kind={self.kind!r} is unknown: choose one of {KINDS}")
        if self.kind in NEED_PATH and self.path is None:
            raise ValueError(f"bench={self.kind} needs bench.path=<file>")
        if self.max_new_tokens < 1 or (self.questions is not None and self.questions < 1):
            raise ValueError("bench.max_new_tokens and bench.questions must be at least 1")
        if self.warmups < 0:
            raise ValueError(f"bench.warmups={self.warmups} must not be negative")
        if len(self.prompt_tokens) != 2 or not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError(f"bench.prompt_tokens={self.prompt_tokens}: give [shortest, longest], 1 or more")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"bench.temperatures={self.temperatures}: give one or more, each once")
        for temperature in self.temperatures:
            Sampling(temperature)
        if self.seeds < 1:
            raise ValueError(f"bench.seeds={self.seeds} must be at least 1")

    def settings(self, seed: int) -> list[Setting]:
        """How each question is decoded; the first temperature is the one that results.json leads with."""
        return [Setting(t, seed + i) for t in self.temperatures for i in range(self.seeds if t else 1)]


@dataclass(frozen=True)
class Question:
    """Either user turns to be answered in order, behind a system turn and with tools where there are such, or one
    prompt of tokens; `stop` are strings that end an answer."""

    id: str
    category: str
    turns: tuple[str, ...] = ()
    prompt: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    system: str | None = None
    tools: list[Any] | None = field(default=None, hash=False)

    def prompts(self, base: Base) -> Generator[list[int], list[int], None]:
        """Token prompts, one per turn. Send each turn's answer (tokens) back in before the next."""
        if self.prompt:
            yield list(self.prompt)
            return
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn})
            answer = yield prompt_ids(base.tokenizer, messages, self.tools, base.template_args)
            said = answer_message(base.tokenizer, base.eos_ids, messages, answer, self.tools, base.template_args)
            messages.append(said)

    def problem(self, base: Base) -> str | None:
        """Why it cannot be asked."""
        try:
            asked = self.turns, self.system, self.tools, base.template_args
            return base.unreadable(self.prompt or question_ids(base.tokenizer, *asked))
        except RowError as error:
            return str(error)


def load_questions(config: BenchConfig, base: Base, data_folder: Path | None, seed: int) -> list[Question]:
    """The benchmark's questions, but for those that this base cannot be asked, which a warning counts.

    Raises ValueError where there are none, or a row is no question.
    """
    if config.kind == "heldout":
        if data_folder is None or not (data_folder / "heldout.jsonl").is_file():
            raise ValueError("bench=heldout needs the run's prepared data, which is gone: choose another bench")
        source: Callable[[], Iterable[Any]] = partial(read_jsonl, data_folder / "heldout.jsonl")
    elif config.path is None:
        source = toy.questions
    else:
        source = partial(benchmark_rows, config.kind, config.path)
    rows = _spread(source, config.questions)
    questions: list[Question] = []
    for number, row in rows:
        try:
            questions += _questions_of(config, base, row, number, seed)
        except RowError as error:
            raise ValueError(f"bench.path={config.path}: row {number}: {error}") from error
    if any(question.turns for question in questions):
        warn_if_plain(base)
        warn_if_no_end(base.tokenizer, base.eos_ids, base.name)
    problems = {question: problem for question in questions if (problem := question.problem(base))}
    if problems:
        first, why = next(iter(problems.items()))
        left_out = f"{len(problems)} of {len(questions)} questions cannot be asked ({first.id}: {why})"
        if len(problems) == len(questions):
            raise ValueError(f"bench={config.kind}: {left_out}")
        warnings.warn(f"bench={config.kind}: {left_out}; they are left out", stacklevel=2)
        questions = [question for question in questions if question not in problems]
    if not questions:
        raise ValueError(f"bench={config.kind}: no question is left to decode (of {len(rows)} rows)")
    return questions


def _spread(source: Callable[[], Iterable[Any]], most: int | None) -> list[tuple[int, Any]]:
    """At most so many rows and their numbers. Benchmarks are ordered by category: the first rows would be of a few."""
    count = 0 if most is None else sum(1 for _ in source())
    if most is None or count <= most:
        return list(enumerate(source()))
    chosen = {place * count // most for place in range(most)}
    return [(number, row) for number, row in enumerate(source()) if number in chosen]


def _questions_of(config: BenchConfig, base: Base, row: Any, number: int, seed: int) -> Iterator[Question]:
    """What one row asks. Raises RowError where it is no question."""
    if config.kind == "text" or (config.kind == "heldout" and "text" in row):
        low, high = config.prompt_tokens
        longest = min(high, base.context_length - 16)
        if low > longest:
            raise ValueError(
                f"bench.prompt_tokens={config.prompt_tokens}: {base.name} takes {base.context_length} tokens"
            )
        text = text_of(row, number)
        for ids in cut_prompts(base.tokenizer, text.text, (low, longest), 1, (seed, number)):
            yield Question(text.id, "text", prompt=tuple(ids))
    elif config.kind == "heldout" and "input_ids" in row:
        yield Question(row["question_id"], row["category"], prompt=tuple(row["input_ids"]))
    else:
        turns = user_turns(config.kind, row)
        name, category = row_id(row, number), category_of(config.kind, row)
        system, tools = system_and_tools(row)
        if config.kind == "humaneval" and base.plain_template:  # no chat model: the code itself is to be continued
            yield Question(name, category, prompt=tuple(base.tokenizer(turns[0]).input_ids), stop=FUNCTION_ENDS)
        else:
            yield Question(name, category, turns, system=system, tools=tools)
