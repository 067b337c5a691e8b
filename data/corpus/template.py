"""A conversation template: what it draws, what it says, and to which split a drawn item belongs.

Texts are format strings. `[now|please]` picks one alternative, `{thing}` fills a slot, `{thing!a}` puts
the article before it, `{thing!A}` a capital one, `{thing!c}` capitalises it, `{thing!p}` makes a plural.
"""

import hashlib
import random
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HELD_OUT_SHARE = 1 / 16
ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")

Slots = Mapping[str, Any]


class Opening(NamedTuple):
    """The first exchange; `gist` is what follow-ups may say of this answer, as the slot `{gist}`."""

    ask: str
    answer: str
    gist: str = ""


class Exchange(NamedTuple):
    """One question and its answer."""

    ask: str
    answer: str


@dataclass(frozen=True)
class Item:
    """One generated conversation. Items with the same first question have the same key."""

    key: str
    first: Exchange
    follow_ups: tuple[Exchange, ...]

    @property
    def held_out(self) -> bool:
        """Whether the item belongs to the held-out split: a stable function of the key alone."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def nothing_more(rng: random.Random, slots: Slots) -> dict[str, Any]:
    """The default `derive`: all that is said was drawn."""
    return {}


@dataclass(frozen=True)
class Template:
    """A family of items.

    `draw` gives the slots that every opening question must mention: they are the key, so that an item in
    the training split and one in the held-out split can never ask the same thing. `derive` adds what
    follows from them (sums, code, the answer), and details that only answers and follow-ups mention.
    """

    name: str
    draw: Callable[[random.Random], dict[str, Any]]
    openings: tuple[Opening, ...]
    follow_ups: tuple[Exchange, ...]
    derive: Callable[[random.Random, Slots], dict[str, Any]] = field(default=nothing_more)

    def item(self, rng: random.Random) -> Item:
        """Draw one item; its follow-ups come in a random order, each refers to the first answer alone."""
        drawn = self.draw(rng)
        slots = {**drawn, **self.derive(rng, drawn)}
        opening = rng.choice(self.openings)
        slots["gist"] = fill(opening.gist, slots, rng)
        key = "|".join([self.name, *(f"{name}={drawn[name]}" for name in sorted(drawn))])
        follow_ups = [_exchange(rng, slots, ask, answer) for ask, answer in self.follow_ups]
        rng.shuffle(follow_ups)
        return Item(key, _exchange(rng, slots, opening.ask, opening.answer), tuple(follow_ups))


def fill(text: str, slots: Slots, rng: random.Random) -> str:
    """Pick every alternative, innermost first, then fill the slots (whose own brackets are left alone)."""
    while match := ALTERNATIVES.search(text):
        chosen = rng.choice(match[1].split("|"))
        text = text[: match.start()] + chosen + text[match.end() :]
    return _FORMATTER.vformat(text, (), slots)


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


class _Formatter(string.Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "a":
            return article(value)
        if conversion in ("A", "c"):
            text = article(value) if conversion == "A" else value
            return text[:1].upper() + text[1:]
        if conversion == "p":
            return plural(value)
        return super().convert_field(value, conversion)  # type: ignore[arg-type]


_FORMATTER = _Formatter()


def _exchange(rng: random.Random, slots: Slots, ask: str, answer: str) -> Exchange:
    return Exchange(fill(ask, slots, rng), fill(answer, slots, rng))
