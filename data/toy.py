"""The toy corpus: generated ShareGPT-form conversations and MT-Bench-form questions.

It needs no network, is the same everywhere for a seed, and its training and held-out splits cannot
share a first question (see `ctcdraft.data.corpus.template.Item`).
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from ctcdraft.data.corpus.coding import CODING
from ctcdraft.data.corpus.extraction import EXTRACTION
from ctcdraft.data.corpus.lessons import HUMANITIES, STEM
from ctcdraft.data.corpus.maths import MATH
from ctcdraft.data.corpus.reasoning import REASONING
from ctcdraft.data.corpus.roleplay import ROLEPLAY
from ctcdraft.data.corpus.template import Item
from ctcdraft.data.corpus.writing import WRITING

TEMPLATES = {
    "writing": WRITING,
    "roleplay": ROLEPLAY,
    "reasoning": REASONING,
    "math": MATH,
    "coding": CODING,
    "extraction": EXTRACTION,
    "stem": STEM,
    "humanities": HUMANITIES,
}
CATEGORIES: tuple[str, ...] = tuple(TEMPLATES)
QUESTIONS_PER_CATEGORY = 10
FIRST_QUESTION_ID = 81  # MT-Bench counts from here
EXCHANGES = (1, 2, 2, 2, 2, 2, 3, 3)  # how many a conversation has, drawn evenly from these
PATIENCE = 1000  # draws without a new item after which a category counts as exhausted


def conversations(count: int, seed: int = 0, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations of the training split (or of the held-out one), the categories in turn.

    Each is `{"id", "category", "conversations": [{"from": "human" | "gpt", "value"}, ...]}` with one to
    three exchanges. No two start with the same question. Raises ValueError when a category has no more.
    """
    split = "held-out" if held_out else "train"
    rng = random.Random(f"{split} {seed}")
    fresh = {category: _distinct(category, rng, held_out) for category in CATEGORIES}
    for number, category in zip(range(count), itertools.cycle(CATEGORIES)):
        item = next(fresh[category])
        exchanges = (item.first, *item.follow_ups)[: rng.choice(EXCHANGES)]
        yield {
            "id": f"toy-{split}-{seed}-{number}",
            "category": category,
            "conversations": [
                {"from": speaker, "value": value}
                for exchange in exchanges
                for speaker, value in zip(("human", "gpt"), exchange, strict=True)
            ],
        }


def questions() -> list[dict[str, Any]]:
    """The 80 held-out questions, ten per category: `{"question_id", "category", "turns": [str, str]}`."""
    rng = random.Random("questions")
    drawn = [
        (category, item)
        for category in CATEGORIES
        for item in itertools.islice(_distinct(category, rng, held_out=True), QUESTIONS_PER_CATEGORY)
    ]
    return [
        {"question_id": number, "category": category, "turns": [item.first.ask, item.follow_ups[0].ask]}
        for number, (category, item) in enumerate(drawn, FIRST_QUESTION_ID)
    ]


@cache
def fingerprint() -> str:
    """Twelve hex digits that change when what is generated changes."""
    sample = [*conversations(400), *conversations(80, held_out=True), *questions()]
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:12]


def _distinct(category: str, rng: random.Random, held_out: bool) -> Iterator[Item]:
    """Items of one split, the templates in turn, until nothing new is found."""
    seen: set[str] = set()
    for template in itertools.cycle(TEMPLATES[category]):
        for _ in range(PATIENCE):
            item = template.item(rng)
            if item.held_out == held_out and item.first.ask not in seen:
                break
        else:
            raise ValueError(f"the toy corpus has only {len(seen)} conversations of category {category!r}")
        seen.add(item.first.ask)
        yield item
