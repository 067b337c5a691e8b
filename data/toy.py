"""The toy corpus: generated conversations in ShareGPT form and two-turn questions in MT-Bench's form.

For tests, and for machines that reach no registry. What is said in it stands in toy.yaml.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .generated import Drawn, Generator, texts_beside

TEXTS = texts_beside(__file__)
WORDS = TEXTS["words"]
TABLES = {
    name: {row: dict(zip(table["columns"], cells, strict=True)) for row, cells in table["rows"].items()}
    for name, table in TEXTS["tables"].items()
}
NAMES, THINGS, DAYS = WORDS["names"], WORDS["things"], WORDS["days"]
JOBS, CITIES = TABLES["jobs"], TABLES["cities"]


@dataclass(frozen=True)
class Scenario:
    """A kind of conversation: pairs of question and answer, whose slots are filled.

    pools: what each slot is drawn from; the columns of a table's row are slots too. derived: further slots, from those
    that were drawn. Every opening mentions every slot that is drawn; a follow-up may come after any opening.
    """

    category: str
    name: str
    pools: Mapping[str, Collection[Any]]
    openings: Sequence[Sequence[str]]
    follow_ups: Sequence[Sequence[str]] = ()
    derived: Callable[..., Mapping[str, object]] = dict

    def draw(self, rng: random.Random) -> Drawn:
        """One opening and every follow-up, these in a random order: each refers to the slots alone."""
        drawn = {slot: rng.choice(list(pool)) for slot, pool in self.pools.items()}
        follow_ups = list(self.follow_ups)
        rng.shuffle(follow_ups)
        pairs = [rng.choice(self.openings), *follow_ups]
        slots = dict(drawn)
        for slot, pool in self.pools.items():
            slots |= pool[drawn[slot]] if isinstance(pool, Mapping) else {}
        slots |= self.derived(**slots)
        turns, answers = ([text.format(**slots) for text in side] for side in zip(*pairs, strict=True))
        return Drawn(turns, answers, f"{self.category} {self.name} {drawn}")


def _bill(count: int, price: int, paid: int, **_: object) -> Mapping[str, object]:
    total = count * price
    bill = {"total": total, "change": paid - total, "more": count + 1, "more_total": total + price}
    return bill | {"double_price": 2 * price, "double_total": 2 * total}


def _measures(width: int, height: int, **_: object) -> Mapping[str, object]:
    area, half = width * height, width + height
    return {"area": area, "half": half, "perimeter": 2 * half, "double_width": 2 * width, "double_area": 2 * area}


def _calls(does: str, expression: str, argument: str, constant: int, value: int, **_: object) -> Mapping[str, object]:
    does, expression = (text.format(argument=argument, constant=constant) for text in (does, expression))
    result, following = (eval(expression, {argument: number}) for number in (value, value + 1))
    code = {"does": does, "expression": expression}
    return code | {"result": result, "next_value": value + 1, "following": following}


def _scenario(category: str, talk: str, derived: Any = dict, /, **pools: Collection[Any]) -> Scenario:
    return Scenario(category, talk, pools, derived=derived, **TEXTS["talks"][talk])


# fmt: off
SCENARIOS = (
    _scenario("writing", "story", name=NAMES[:12], friend=NAMES[12:], job=JOBS, thing=THINGS, place=WORDS["places"]),
    _scenario("writing", "email", name=NAMES[:12], friend=NAMES[12:], event=WORDS["events"], day=DAYS[:4],
              new_day=DAYS[4:], reason=WORDS["reasons"]),
    _scenario("roleplay", "worker", name=NAMES, job=JOBS, city=CITIES),
    _scenario("reasoning", "order", first=NAMES[:8], second=NAMES[8:16], third=NAMES[16:], more=TABLES["comparisons"]),
    _scenario("math", "shopping", _bill, name=NAMES, thing=THINGS, count=range(2, 10), price=range(2, 12),
              paid=(100, 120, 150)),
    _scenario("math", "rectangle", _measures, name=NAMES, field=WORDS["fields"], width=range(10, 21),
              height=range(2, 10)),
    _scenario("coding", "function_of_a_number", _calls, function=TABLES["functions"], argument=("n", "x", "number"),
              constant=range(2, 31), value=range(2, 31)),
    _scenario("extraction", "purchase", name=NAMES, count=range(2, 20), colour=WORDS["colours"], thing=THINGS,
              city=CITIES, day=DAYS),
    _scenario("stem", "explanation", topic=TABLES["stem"], name=NAMES, age=range(9, 20)),
    _scenario("humanities", "explanation", topic=TABLES["humanities"], name=NAMES, age=range(9, 20)),
)
# fmt: on
CATEGORIES = tuple(dict.fromkeys(scenario.category for scenario in SCENARIOS))
TOY = Generator(
    "toy",
    {category: [one.draw for one in SCENARIOS if one.category == category] for category in CATEGORIES},
    exchanges=(1, 2, 2, 2, 2, 2, 3, 3),
    held_out_share=1 / 16,
    sample=400,
)
conversations, questions, fingerprint = TOY.conversations, TOY.questions, cache(TOY.fingerprint)
