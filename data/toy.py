"""The toy corpus: generated conversations in ShareGPT form and two-turn questions in MT-Bench's form.

For tests, and for machines that reach no registry. A seed gives the same text everywhere, and no first question stands
in both splits. What is said in it: `ctcdraft.data.toy_scenarios`.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from ctcdraft.data.toy_scenarios import SCENARIOS, Scenario

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
QUESTIONS_PER_CATEGORY = 10
FIRST_QUESTION_ID = 81  # as in MT-Bench
HELD_OUT_SHARE = 1 / 16
EXCHANGES = (1, 2, 2, 2, 2, 2, 3, 3)  # how many a conversation has, drawn evenly from these
PATIENCE = 1000  # draws without anything new, after which a category is exhausted

Exchange = tuple[str, str]  # what the user asks, what the assistant answers


def conversations(count: int, seed: int = 0, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations of the training split (or of the held-out one), the categories in turn.

    Each is `{"id", "category", "conversations": [{"from": "human" | "gpt", "value"}, ...]}` of one to three
    exchanges. No two start with the same question. Raises ValueError when a category has no more.
    """
    split = "held-out" if held_out else "train"
    rng = random.Random(f"{split} {seed}")
    sources = {category: _distinct(category, rng, held_out) for category in CATEGORIES}
    for number, category in zip(range(count), itertools.cycle(CATEGORIES)):
        exchanges = next(sources[category])[: rng.choice(EXCHANGES)]
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
        (category, exchanges)
        for category in CATEGORIES
        for exchanges in itertools.islice(_distinct(category, rng, held_out=True), QUESTIONS_PER_CATEGORY)
    ]
    return [
        {"question_id": number, "category": category, "turns": [first, second]}
        for number, (category, ((first, _), (second, _), *_)) in enumerate(drawn, FIRST_QUESTION_ID)
    ]


@cache
def fingerprint() -> str:
    """Twelve hex digits that change when what is generated changes."""
    sample = [*conversations(400), *conversations(80, held_out=True), *questions()]
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:12]


def _distinct(category: str, rng: random.Random, held_out: bool) -> Iterator[list[Exchange]]:
    """Whole conversations of one split, its scenarios in turn, until nothing new is found."""
    seen: set[str] = set()
    for scenario in itertools.cycle(s for s in SCENARIOS if s.category == category):
        for _ in range(PATIENCE):
            slots = scenario.draw(rng)
            exchanges = _converse(scenario, slots, rng)
            if _is_held_out(scenario, slots) == held_out and exchanges[0][0] not in seen:
                break
        else:
            raise ValueError(f"the toy corpus has only {len(seen)} conversations of category {category!r}")
        seen.add(exchanges[0][0])
        yield exchanges


def _converse(scenario: Scenario, slots: dict[str, Any], rng: random.Random) -> list[Exchange]:
    """One opening and every follow-up, these in a random order: each refers to the slots alone."""
    talk = scenario.write(**slots)
    follow_ups = list(talk.follow_ups.items())
    rng.shuffle(follow_ups)
    return [rng.choice(list(talk.openings.items())), *follow_ups]


def _is_held_out(scenario: Scenario, slots: dict[str, Any]) -> bool:
    """A stable function of the slots, all of which every opening mentions: its rewordings are in the same split."""
    digest = hashlib.sha256(f"{scenario.name} {slots}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32
