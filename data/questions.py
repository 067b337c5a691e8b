"""Questions that a user might put to a chat LLM, drawn from the templates and words of questions.yaml: no answers,
those are the base's.

Eight categories, as MT-Bench has them, one to three user turns. A slot `{name}` of a template draws from the words; the
same slot has one value throughout a question, `{name2}` another one of the same list.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from string import digits

from .generated import Drawn, Generator, texts_beside

TEXTS = texts_beside(__file__)


def _table(rng: random.Random) -> str:
    """A small table as a user pastes it: with bars, with commas, or as sentences."""
    what, table = rng.choice(list(TEXTS["tables"].items()))
    first, second = table["columns"]
    names = rng.sample(table["rows"], 4)
    rows = [(name, rng.randint(3, 95), rng.randint(2, 60)) for name in names]
    form = rng.choice(["bars", "commas", "prose"])
    if form == "prose":
        return " ".join(f"{name} has {a} for {first} and {b} for {second}." for name, a, b in rows)
    line = "| {} | {} | {} |" if form == "bars" else "{},{},{}"
    return "\n".join(line.format(*row) for row in [(what, first, second), *rows])


def _series(rng: random.Random) -> str:
    start, step, factor = rng.randint(1, 12), rng.randint(2, 9), rng.choice([1, 1, 2, 3])
    found = [start]
    while len(found) < 5:
        found.append(found[-1] * factor + step)
    return ", ".join(map(str, found))


def _numbers(rng: random.Random) -> str:
    return ", ".join(str(rng.randint(1, 60)) for _ in range(rng.randint(5, 8)))


def _ordering(rng: random.Random) -> str:
    """Enough comparisons to put four people in order, shuffled."""
    more, names = rng.choice(["taller", "older", "faster", "richer"]), rng.sample(TEXTS["tables"]["student"]["rows"], 4)
    clues = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(names)]
    return " ".join(rng.sample(clues, len(clues)))


WORDS: dict[str, Sequence[str | int] | Callable[[random.Random], str]] = TEXTS["words"] | {
    "n": range(3, 13),
    "m": range(12, 60),
    "big": range(70, 900, 10),
    "percent": range(5, 65, 5),
    "table": _table,
    "series": _series,
    "numbers": _numbers,
    "ordering": _ordering,
}


class _Slots(dict[str, str]):
    """The words in slots, drawn when a text first asks for one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        source, value = WORDS[slot.rstrip(digits)], None
        while value is None or value in self.values():
            value = source(self.rng) if callable(source) else str(self.rng.choice(source))
        self[slot] = value
        return value


def _draw(category: str, template: str, rng: random.Random) -> Drawn:
    """Three turns; what decides their split is the first without its ending."""
    slots, later_slots = _Slots(rng), _Slots(rng)  # a follow-up names things of its own
    first = template.format_map(slots) + rng.choice(TEXTS["endings"]).format_map(slots)
    later = [rng.choice(TEXTS["own_follow_ups"][category] if rng.random() < 0.5 else TEXTS["follow_ups"])]
    later.append(rng.choice([turn for turn in TEXTS["follow_ups"] if turn not in later]))
    key = template + json.dumps({f"{{{slot}}}": word for slot, word in slots.items()}, sort_keys=True)
    return Drawn([first, *(turn.format_map(later_slots) for turn in later)], [], key)


CATEGORIES = tuple(TEXTS["first"])
PROMPTS = Generator(
    "prompts",
    {category: [partial(_draw, category, one) for one in templates] for category, templates in TEXTS["first"].items()},
    exchanges=(1, 1, 2, 2, 2, 3),
    held_out_share=0.1,
    sample=800,
)
conversations, questions, fingerprint = PROMPTS.conversations, PROMPTS.questions, cache(PROMPTS.fingerprint)
