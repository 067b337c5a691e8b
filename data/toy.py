"""The toy corpus: generated conversations in ShareGPT form and two-turn questions in MT-Bench's form.

For tests, and for machines that reach no registry. What is said in it stands in toy.yaml.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

from ctcdraft.data.generated import Drawn, Generator, texts_beside

WORDS = texts_beside(__file__)
NO_SLOTS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Scenario:
    """A kind of conversation: pairs of question and answer that are written from slots.

    slots: what each is drawn from; let: what follows from those that were drawn. Every opening mentions every slot; a
    follow-up may come after any opening.
    """

    category: str
    name: str
    slots: Mapping[str, str]
    openings: Sequence[Sequence[str]]
    follow_ups: Sequence[Sequence[str]] = ()
    let: Mapping[str, str] = field(default_factory=dict)

    def draw(self, rng: random.Random) -> Drawn:
        """One opening and every follow-up, these in a random order: each refers to the slots alone."""
        slots = {slot: rng.choice(list(self._value(pool))) for slot, pool in self.slots.items()}
        follow_ups = list(self.follow_ups)
        rng.shuffle(follow_ups)
        pairs, values = [rng.choice(self.openings), *follow_ups], dict(slots)
        for names, expression in self.let.items():
            value = self._value(expression, values)
            values |= zip(names.split(", "), value, strict=True) if "," in names else {names: value}
        turns, answers = ([self._value(f"f{text!r}", values) for text in side] for side in zip(*pairs, strict=True))
        return Drawn(turns, answers, f"{self.category} {self.name} {slots}")

    def _value(self, expression: str, slots: Mapping[str, Any] = NO_SLOTS) -> Any:
        return eval(_compiled(expression), {**WORDS, "category": self.category, **slots})


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "toy.yaml", "eval")


SCENARIOS = [
    Scenario(category, **scenario) for scenario in WORDS.pop("scenarios") for category in scenario.pop("categories")
]
CATEGORIES = tuple(dict.fromkeys(scenario.category for scenario in SCENARIOS))
TOY = Generator(
    "toy",
    {category: [one.draw for one in SCENARIOS if one.category == category] for category in CATEGORIES},
    exchanges=(1, 2, 2, 2, 2, 2, 3, 3),
    held_out_share=1 / 16,
    sample=400,
)
conversations, questions, fingerprint = TOY.conversations, TOY.questions, cache(TOY.fingerprint)
