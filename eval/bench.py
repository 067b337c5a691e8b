"""Questions to decode: chats of one or more turns, code to complete, or prompts cut from texts.

Asked as the field asks (FastChat's llm_judge, Spec-Bench, EAGLE): the question itself is the user's turn, with no
instruction and no examples before it, and follow-up turns come after the model's own answer. Rows are conversations
in any form (data/records.py), the `turns` of those projects among them.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ctcdraft.data.end_of_turn import warn_of_template
from ctcdraft.data.generated import TOY
from ctcdraft.data.messages import encodable, filled
from ctcdraft.data.prompts import Lengths, cut_prompts, prompt_lengths, question_ids
from ctcdraft.data.records import Conversation, record_of, text_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.data.store import read_jsonl
from ctcdraft.data.template import answer_message, prompt_ids
from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.sampling import Sampling

NEED_PATH = ("mt_bench", "spec_bench", "gsm8k", "humaneval", "text")
FUNCTION_ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # as Chen et al. 2021 stop
IDS = ("question_id", "task_id", "prompt_id", "id")
ONE_TURN = ("gsm8k", "humaneval")
NAMED = ("mt_bench", *ONE_TURN)  # a row's category, where it has none
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen: greedily (temperature 0) or sampled with the noise of a seed."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class BenchConfig:
    """kind: `heldout` is what the run's data keeps from training."""

    kind: Literal["heldout", "toy", "mt_bench", "spec_bench", "gsm8k", "humaneval", "text"] = "heldout"
    path: str | None = None  # file, or name on the Hub
    questions: PositiveInt | None = 24  # at most so many, evenly spread; null: all
    # shortest and longest prompt of bench=text
    prompt_tokens: Lengths = field(default_factory=lambda: [32, 140])
    max_new_tokens: PositiveInt = 128  # per answer
    warmups: NonNegativeInt = 3  # untimed generations before the first question
    # each question at each of them; results.json leads with the first
    temperatures: Annotated[list[float], Field(min_length=1)] = field(default_factory=lambda: [0.0])
    seeds: PositiveInt = 3  # of each temperature above 0

    def __post_init__(self) -> None:
        if self.kind in NEED_PATH and self.path is None:
            raise ValueError(f"bench={self.kind} needs bench.path=<file>")
        if self.prompt_tokens[0] > self.prompt_tokens[-1]:
            raise ValueError(f"bench.prompt_tokens={self.prompt_tokens}: give [shortest, longest]")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"bench.temperatures={self.temperatures}: give each once")
        for temperature in self.temperatures:
            Sampling(temperature)

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

    @property
    def asks(self) -> int:
        """How many prompts it has."""
        return len(self.turns) or 1

    def prompt_after(self, base: Base, answers: Sequence[list[int]] = ()) -> list[int]:
        """The tokens that ask its next turn, behind the answers (tokens) to those before. Raises RowError where the
        template refuses it, and where it fills the context."""
        ids = list(self.prompt) or self._rendered(base, answers)
        if len(ids) >= base.context_length:
            raise RowError(f"turn {len(answers) + 1} has {len(ids)} tokens, the context takes {base.context_length}")
        return ids

    def _rendered(self, base: Base, answers: Sequence[list[int]]) -> list[int]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append(answer_message(base, messages, answer, self.tools))
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        return prompt_ids(base.tokenizer, messages, self.tools, base.template_args)

    def problem(self, base: Base) -> str | None:
        """Why it cannot be asked."""
        try:
            ids = self.prompt or question_ids(base, self.turns, self.system, self.tools)
        except RowError as error:
            return str(error)
        return base.unreadable(ids)


def load_questions(config: BenchConfig, base: Base, data_folder: Path | None, seed: int) -> list[Question]:
    """The benchmark's questions, but for those that this base cannot be asked, which a warning counts.

    Raises ValueError where there are none, or a row is no question.
    """
    count = sum(1 for _ in _rows(config, data_folder))
    most = min(config.questions or count, count)
    chosen = {place * count // most for place in range(most)}  # by category: the first would be of a few
    questions: list[Question] = []
    for number, row in enumerate(_rows(config, data_folder)):
        if number not in chosen:
            continue
        try:
            questions += _questions_of(config, base, row, number, seed)
        except RowError as error:
            raise ValueError(f"bench.path={config.path}: row {number}: {error}") from error
    if any(question.turns for question in questions):
        warn_of_template(base)
    problems = {question: problem for question in questions if (problem := question.problem(base))}
    if problems:
        first, why = next(iter(problems.items()))
        left_out = f"{len(problems)} of {len(questions)} questions cannot be asked ({first.id}: {why})"
        if len(problems) == len(questions):
            raise ValueError(f"bench={config.kind}: {left_out}")
        warnings.warn(f"bench={config.kind}: {left_out}; they are left out", stacklevel=2)
        questions = [question for question in questions if question not in problems]
    if not questions:
        advice = "; keep some from training (data.holdout) or take another bench" if config.kind == "heldout" else ""
        raise ValueError(f"bench={config.kind}: no question is left to decode (of {most} rows){advice}")
    return questions


def _rows(config: BenchConfig, data_folder: Path | None) -> Iterable[Any]:
    """Raw rows: those kept from training, our own, of files or globs, or of a Hub dataset's test split (its first split
    where there is no test).

    Raises ValueError where there are none of them.
    """
    if config.kind == "heldout":
        if data_folder is None:
            raise ValueError("bench=heldout asks what a run kept from training, and no run was chosen: take another")
        if not (data_folder / "heldout.jsonl").is_file():
            raise ValueError("bench=heldout needs the run's prepared data, which is gone: choose another bench")
        return read_jsonl(data_folder / "heldout.jsonl")
    if config.path is None:
        return TOY.questions()
    return read_rows(config.path, "bench.path", split="test")


def _questions_of(config: BenchConfig, base: Base, row: Any, number: int, seed: int) -> Iterator[Question]:
    """What one row asks. Raises RowError where it is no question."""
    if config.kind == "text" or (config.kind == "heldout" and "text" in row):
        lengths = prompt_lengths(base, config.prompt_tokens, "bench.prompt_tokens")
        text = text_of(row, row.get("question_id", number) if config.kind == "heldout" else number)
        for ids in cut_prompts(base.tokenizer, text.text, lengths, 1, (seed, number)):
            yield Question(text.id, "text", prompt=tuple(ids))
    elif config.kind == "heldout" and "input_ids" in row:
        yield Question(row["question_id"], row["category"], prompt=tuple(row["input_ids"]))
    else:
        question = question_of(config.kind, row, number)
        if config.kind == "humaneval" and base.plain_template:  # no chat model: the code itself is to be continued
            code = tuple(base.tokenizer(question.turns[0]).input_ids)
            question = replace(question, turns=(), prompt=code, stop=FUNCTION_ENDS)
        yield question


def question_of(kind: str, row: Any, number: int) -> Question:
    """What a row asks, in any form of a conversation, whose answers are passed over; number: its name, where it has
    none. Raises RowError where it asks nothing, or several things where one is due."""
    record = record_of(row, str(number), "sharegpt")
    if not isinstance(record, Conversation):
        raise RowError("tokens, where a question is due")
    asked, left = record.question, filled(row)
    if kind in ONE_TURN:
        if len(asked["turns"]) > 1 and all(m["role"] != "assistant" for m in record.messages):
            raise RowError(f"{len(asked['turns'])} turns, where {kind} asks one question")
        asked["turns"] = asked["turns"][:1]
    category = encodable(str(left.get("category", kind if kind in NAMED else "chat")), "its category")
    return Question(
        encodable(str(next((left[key] for key in IDS if key in left), number)), "its id"),
        "mt_bench" if kind == "spec_bench" and category in MT_BENCH else category,  # one of Spec-Bench's six tasks
        tuple(asked["turns"]),
        system=asked.get("system"),
        tools=asked.get("tools"),
    )
