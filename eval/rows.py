"""Rows of a benchmark, from local files or the Hub, and what the user says in them.

Asked as the field asks (FastChat's llm_judge, Spec-Bench, EAGLE): the question itself is the user's turn, with no
instruction and no examples before it, and follow-up turns come after the model's own answer. Files with `turns`, as
those projects write them for every benchmark, are taken everywhere.
"""

from collections.abc import Iterator
from typing import Any

from ctcdraft.data.messages import encodable, filled, read_tools, taken
from ctcdraft.data.records import SYSTEM, TOOLS, turns_of_text
from ctcdraft.data.sources import RowError, check_source, local_files, read_rows, source_hash

FIELDS = {
    "mt_bench": ("turns", "prompt"),
    "gsm8k": ("question", "messages", "turns"),
    "humaneval": ("prompt", "turns"),
}
ONE_TURN = ("gsm8k", "humaneval")
HUB_CONFIGS = {"gsm8k": "main"}  # of the Hub's openai/gsm8k: main, socratic
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def benchmark_rows(kind: str, path: str) -> Iterator[Any]:
    """Raw rows of local files (JSON, JSONL, .gz of them, globs), or of a Hub dataset's test split (its only split where
    there is no test). Raises ValueError, in one sentence, where neither is there."""
    check_source("bench.path", path)
    yield from read_rows(path) if _is_local(path) else _hub_rows(kind, path)


def questions_hash(path: str | None) -> str | None:
    """Of the files that `path` names; a Hub dataset's name stands for itself."""
    return source_hash(path) if path and _is_local(path) else path


def _is_local(path: str) -> bool:
    return any(file.is_file() for file in local_files(path))


def _hub_rows(kind: str, name: str) -> Iterator[Any]:
    import datasets

    try:
        splits = datasets.load_dataset(name, HUB_CONFIGS.get(kind))
        split = splits["test"] if "test" in splits else next(iter(splits.values()))
    except Exception as error:  # whatever the Hub or the network answers
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"bench.path={name}: no such file, and the Hub gave no dataset ({reason})") from error
    yield from split


def user_turns(kind: str, row: Any) -> tuple[str, ...]:
    """What the user says, turn by turn. Raises RowError where the row holds no such thing."""
    if isinstance(row, RowError):
        raise row
    fields = FIELDS.get(kind, ("turns",))
    row = filled(row) if isinstance(row, dict) else {}
    found = next((row[key] for key in fields if key in row), None)
    if isinstance(found, list) and found and all(isinstance(m, dict) for m in found):  # messages: the first question
        found = next((m.get("content") for m in found if m.get("role") == "user"), None)
    turns = [found] if isinstance(found, str) else found
    if "turns" in fields and found is row.get("turns") and isinstance(found, str):
        turns = turns_of_text(found)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RowError(f"no text under {' or '.join(repr(key) for key in fields)}")
    if kind in ONE_TURN and len(turns) > 1:
        raise RowError(f"{len(turns)} turns, where {kind} asks one question")
    return tuple(encodable(turn, "a turn") for turn in turns)


def system_and_tools(row: dict[str, Any]) -> tuple[str | None, list[Any] | None]:
    """What stands before the user's turns. Raises RowError where it is no text, or no list of tools."""
    left = filled(row)
    system = taken(left, SYSTEM)
    if not isinstance(system, str | None):
        raise RowError(f"the system column holds no text but a {type(system).__name__}")
    return encodable(system or "", "the system column") or None, read_tools(taken(left, TOOLS))


def row_id(row: dict[str, Any], number: int) -> str:
    """What the benchmark calls this question, else its number. Raises RowError where that is no text."""
    name = next((row[key] for key in ("question_id", "task_id", "prompt_id", "id") if key in row), number)
    return encodable(str(name), "its id")


def category_of(kind: str, row: dict[str, Any]) -> str:
    """Spec-Bench counts MT-Bench's eight categories as one of its six tasks. Raises RowError where it is no text."""
    category = encodable(str(row.get("category", kind if kind in FIELDS else "chat")), "its category")
    return "mt_bench" if kind == "spec_bench" and category in MT_BENCH else category
