"""Prompts: of questions, and cut from texts where a document is left for the base to continue."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from ctcdraft.model.base.llm import Base

from .template import prompt_ids

LEAST_ROOM = 16  # tokens that a prompt leaves for its answer
Lengths = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]  # in tokens: shortest and longest


def prompt_lengths(base: Base, lengths: Sequence[int], option: str) -> tuple[int, int]:
    """[shortest, longest] prompt of a text, as far as the base's context leaves room for an answer. Raises ValueError
    where it leaves none."""
    low, high = lengths[0], min(lengths[1], base.context_length - LEAST_ROOM)
    if low > high:
        raise ValueError(f"{option}={lengths}: {base.name} takes {base.context_length} tokens")
    return low, high


def question_ids(base: Base, turns: Sequence[str], system: str | None, tools: list[Any] | None) -> list[int]:
    """The prompt of a question's first turn, and behind it the tokens of the user's later turns alone: all that a base
    must be able to read before it is asked. Raises RowError where the template refuses it."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": turns[0]})
    ids = prompt_ids(base.tokenizer, messages, tools, base.template_args)
    return ids + [token for turn in turns[1:] for token in base.tokenizer(turn, add_special_tokens=False).input_ids]


def cut_prompts(
    tokenizer: Any, text: str, lengths: tuple[int, int], count: int, seed: tuple[int, ...]
) -> Iterator[list[int]]:
    """`count` prompts of one text, of lengths drawn from `lengths` (both ends included).

    The first starts where the text does, the others anywhere. A text shorter than the drawn length is
    taken up to its last token but one, so that there is something to continue. Nothing for a text of
    fewer tokens than the shortest length.
    """
    marked, ids = tokenizer(text).input_ids, tokenizer(text, add_special_tokens=False).input_ids
    begins = marked[: len(ids) + 1] != ids and marked[:1] == [tokenizer.bos_token_id]
    rng = np.random.default_rng(seed)
    if len(ids) < max(2, lengths[0]):
        return
    for i in range(count):
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        length = max(1, min(length, len(ids) - 1))
        start = 0 if i == 0 else int(rng.integers(0, len(ids) - length))
        yield [*marked[:begins], *ids[start : start + length]]
