"""Conversations drawn from templates: no network, and the same text everywhere for a seed.

What was drawn decides the split, so no held-out question is ever trained on.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

QUESTIONS_PER_CATEGORY = 10
FIRST_QUESTION_ID = 81  # MT-Bench counts from here
PATIENCE = 1000  # draws without anything new, after which a category is exhausted
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times as fast where it was built


def texts_beside(module: str) -> dict[str, Any]:
    """What the YAML file of a module's name holds."""
    return yaml.load(Path(module).with_suffix(".yaml").read_text(encoding="utf-8"), LOADER)


@dataclass(frozen=True)
class Drawn:
    """As many turns as a conversation may have, with their answers, if there are any; key: what decides the split."""

    turns: list[str]
    answers: list[str]
    key: str


@dataclass(frozen=True)
class Generator:
    """drawers: for each category the kinds of conversation in it; exchanges: how many a conversation has, drawn evenly
    from these; held_out_share: of the keys; sample: how many conversations the fingerprint looks at."""

    name: str
    drawers: Mapping[str, Sequence[Callable[[random.Random], Drawn]]]
    exchanges: tuple[int, ...]
    held_out_share: float
    sample: int

    def conversations(self, count: int, seed: int = 0, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
        """Yield `count` conversations of the training split (or of the held-out one), the categories in turn.

        Each is `{"id", "category"}` with `"conversations": [{"from": "human" | "gpt", "value"}, ...]`, or, where there
        are no answers, `"turns": [str, ...]`. No two start with the same question. Raises ValueError when a category
        has no more.
        """
        split = "held-out" if held_out else "train"
        rng = random.Random(f"{split} {seed}")
        sources = {category: self._distinct(category, rng, held_out) for category in self.drawers}
        for number, category in zip(range(count), itertools.cycle(self.drawers)):
            drawn, size = next(sources[category]), rng.choice(self.exchanges)
            row = {"id": f"{self.name}-{split}-{seed}-{number}", "category": category}
            said = itertools.chain.from_iterable(zip(drawn.turns[:size], drawn.answers, strict=False))
            speakers = itertools.cycle(("human", "gpt"))
            chat = [{"from": speaker, "value": value} for speaker, value in zip(speakers, said, strict=False)]
            yield row | ({"conversations": chat} if chat else {"turns": drawn.turns[:size]})

    def questions(self) -> list[dict[str, Any]]:
        """The 80 held-out questions, ten per category: `{"question_id", "category", "turns": [str, str]}`."""
        rng = random.Random("questions")
        drawn = [
            (category, found.turns[:2])
            for category in self.drawers
            for found in itertools.islice(self._distinct(category, rng, held_out=True), QUESTIONS_PER_CATEGORY)
        ]
        return [
            {"question_id": number, "category": category, "turns": turns}
            for number, (category, turns) in enumerate(drawn, FIRST_QUESTION_ID)
        ]

    def fingerprint(self) -> str:
        """Twelve hex digits that change when what is generated changes."""
        sample = [*self.conversations(self.sample), *self.conversations(80, held_out=True), *self.questions()]
        return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:12]

    def _distinct(self, category: str, rng: random.Random, held_out: bool) -> Iterator[Drawn]:
        """What is drawn of one split, the drawers in turn, until nothing new is found."""
        seen: set[str] = set()
        for draw in itertools.cycle(self.drawers[category]):
            for _ in range(PATIENCE):
                drawn = draw(rng)
                if self._is_held_out(drawn.key) == held_out and drawn.turns[0] not in seen:
                    break
            else:
                raise ValueError(f"data={self.name} has only {len(seen)} conversations of category {category!r}")
            seen.add(drawn.turns[0])
            yield drawn

    def _is_held_out(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.held_out_share * 2**64
