"""Conversations drawn from templates: no network, and the same text everywhere for a seed.

TOY: conversations with answers and two-turn questions, for tests and for machines that reach no registry; what is said
in it stands in toy.yaml. PROMPTS: questions that a user might put to a chat LLM, of one to three turns and without
answers, which are the base's; questions.yaml has their templates and words. Each has MT-Bench's eight categories. What
was drawn decides the split, so no held-out question is ever trained on.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from string import digits
from typing import Any

import yaml

QUESTIONS_PER_CATEGORY = 10
FIRST_QUESTION_ID = 81  # MT-Bench counts from here
PATIENCE = 1000  # draws without anything new, after which a category is exhausted
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times as fast where it was built
SAID, ASKED = (
    yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), LOADER)
    for name in ("toy.yaml", "questions.yaml")
)


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
            chat = []
            for question, answer in zip(drawn.turns[:size], drawn.answers, strict=False):
                chat += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            yield row | ({"conversations": chat} if chat else {"turns": drawn.turns[:size]})

    def questions(self) -> list[dict[str, Any]]:
        """The 80 held-out questions, ten per category: `{"question_id", "category", "turns": [str, str]}`."""
        rng, asked = random.Random("questions"), list[dict[str, Any]]()
        for category in self.drawers:
            for drawn in itertools.islice(self._distinct(category, rng, held_out=True), QUESTIONS_PER_CATEGORY):
                number = FIRST_QUESTION_ID + len(asked)
                asked.append({"question_id": number, "category": category, "turns": drawn.turns[:2]})
        return asked

    @cached_property
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
                place = int.from_bytes(hashlib.sha256(drawn.key.encode()).digest()[:8], "big")
                if (place < self.held_out_share * 2**64) == held_out and drawn.turns[0] not in seen:
                    break
            else:
                raise ValueError(f"data={self.name} has only {len(seen)} conversations of category {category!r}")
            seen.add(drawn.turns[0])
            yield drawn


# -- the toy corpus -------------------------------------------------------------------------------------------

WORDS = SAID["words"]
TABLES = {
    name: {row: dict(zip(table["columns"], cells, strict=True)) for row, cells in table["rows"].items()}
    for name, table in SAID["tables"].items()
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
    return Scenario(category, talk, pools, derived=derived, **SAID["talks"][talk])


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
TOY = Generator(
    "toy",
    {category: [s.draw for s in SCENARIOS if s.category == category] for category in (s.category for s in SCENARIOS)},
    exchanges=(1, 2, 2, 2, 2, 2, 3, 3),
    held_out_share=1 / 16,
    sample=400,
)

# -- questions without answers ---------------------------------------------------------------------------------


def _table(rng: random.Random) -> str:
    """A small table as a user pastes it: with bars, with commas, or as sentences."""
    what, table = rng.choice(list(ASKED["tables"].items()))
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


def _ordering(rng: random.Random) -> str:
    """Enough comparisons to put four people in order, shuffled."""
    more, names = rng.choice(["taller", "older", "faster", "richer"]), rng.sample(ASKED["tables"]["student"]["rows"], 4)
    clues = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(names)]
    return " ".join(rng.sample(clues, len(clues)))


FILLERS: dict[str, Sequence[str | int] | Callable[[random.Random], str]] = ASKED["words"] | {
    "n": range(3, 13),
    "m": range(12, 60),
    "big": range(70, 900, 10),
    "percent": range(5, 65, 5),
    "table": _table,
    "series": _series,
    "numbers": lambda rng: ", ".join(str(rng.randint(1, 60)) for _ in range(rng.randint(5, 8))),
    "ordering": _ordering,
}


class _Slots(dict[str, str]):
    """The words in slots, drawn when a text first asks for one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        source, value = FILLERS[slot.rstrip(digits)], None
        while value is None or value in self.values():
            value = source(self.rng) if callable(source) else str(self.rng.choice(source))
        self[slot] = value
        return value


def _draw(category: str, template: str, rng: random.Random) -> Drawn:
    """Three turns; what decides their split is the first without its ending."""
    slots, later_slots = _Slots(rng), _Slots(rng)  # a follow-up names things of its own
    first = template.format_map(slots) + rng.choice(ASKED["endings"]).format_map(slots)
    later = [rng.choice(ASKED["own_follow_ups"][category] if rng.random() < 0.5 else ASKED["follow_ups"])]
    later.append(rng.choice([turn for turn in ASKED["follow_ups"] if turn not in later]))
    key = template + json.dumps({f"{{{slot}}}": word for slot, word in slots.items()}, sort_keys=True)
    return Drawn([first, *(turn.format_map(later_slots) for turn in later)], [], key)


PROMPTS = Generator(
    "prompts",
    {category: [partial(_draw, category, one) for one in templates] for category, templates in ASKED["first"].items()},
    exchanges=(1, 1, 2, 2, 2, 3),
    held_out_share=0.1,
    sample=800,
)
GENERATED = {"toy": TOY, "prompts": PROMPTS}
