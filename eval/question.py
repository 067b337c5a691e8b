"""A question of a benchmark, and how it stands in a row (docs/evaluation.md, "How they are asked").

Files with `turns`, as Spec-Bench and EAGLE write them for every benchmark, are taken everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ctcdraft.data.messages import encodable, filled, read_tools, taken
from ctcdraft.data.prompts import question_ids
from ctcdraft.data.records import SYSTEM, TOOLS, turns_of_text
from ctcdraft.data.sources import RowError
from ctcdraft.data.template import answer_message, prompt_ids
from ctcdraft.model.base.llm import Base

FIELDS = {
    "mt_bench": ("turns", "prompt"),
    "gsm8k": ("question", "messages", "turns"),
    "humaneval": ("prompt", "turns"),
}
IDS = ("question_id", "task_id", "prompt_id", "id")
ONE_TURN = ("gsm8k", "humaneval")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


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
        """The tokens that ask its next turn, behind the answers (tokens) to those before."""
        if self.prompt:
            return list(self.prompt)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        tools, args = self.tools, base.template_args
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append(answer_message(base.tokenizer, base.eos_ids, messages, answer, tools, args))
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        return prompt_ids(base.tokenizer, messages, tools, args)

    def problem(self, base: Base) -> str | None:
        """Why it cannot be asked."""
        try:
            ids = self.prompt or question_ids(base.tokenizer, self.turns, self.system, self.tools, base.template_args)
        except RowError as error:
            return str(error)
        return base.unreadable(ids)


def question_of(kind: str, row: Any, number: int) -> Question:
    """What a row asks; without a name of its own it is called by its number. Raises RowError where it holds no text, or
    its other columns are no text and no list of tools."""
    if isinstance(row, RowError):
        raise row
    left, fields = filled(row) if isinstance(row, dict) else {}, FIELDS.get(kind, ("turns",))
    column = next((key for key in fields if key in left), "")
    turns = left.get(column)
    if isinstance(turns, list) and turns and all(isinstance(m, dict) for m in turns):  # messages: the first question
        turns = next((m.get("content") for m in turns if m.get("role") == "user"), None)
    if isinstance(turns, str):
        turns = turns_of_text(turns) if column == "turns" else [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RowError(f"no text under {' or '.join(repr(key) for key in fields)}")
    if kind in ONE_TURN and len(turns) > 1:
        raise RowError(f"{len(turns)} turns, where {kind} asks one question")
    system, tools = taken(left, SYSTEM), read_tools(taken(left, TOOLS))
    if not isinstance(system, str | None):
        raise RowError(f"the system column holds no text but a {type(system).__name__}")
    category = encodable(str(left.get("category", kind if kind in FIELDS else "chat")), "its category")
    return Question(
        encodable(str(next((left[key] for key in IDS if key in left), number)), "its id"),
        "mt_bench" if kind == "spec_bench" and category in MT_BENCH else category,  # one of Spec-Bench's six tasks
        tuple(encodable(turn, "a turn") for turn in turns),
        system=encodable(system or "", "the system column") or None,
        tools=tools,
    )
