"""Reasoning: who is tallest, who sits where, how old, and which word does not belong."""

import random
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import GROUPS, NAMES

# comparative: (superlative, opposite superlative)
COMPARISONS = {
    "taller": ("tallest", "shortest"),
    "older": ("oldest", "youngest"),
    "faster": ("fastest", "slowest"),
    "stronger": ("strongest", "weakest"),
    "richer": ("richest", "poorest"),
}


def _draw_order(rng: random.Random) -> dict[str, Any]:
    first, second, third = rng.sample(NAMES, 3)
    return {"first": first, "second": second, "third": third, "more": rng.choice(list(COMPARISONS))}


def _derive_order(rng: random.Random, slots: Slots) -> dict[str, Any]:
    most, least = COMPARISONS[slots["more"]]
    return {"most": most, "least": least}


ORDER = Template(
    "order",
    _draw_order,
    (
        Opening(
            "{first} is {more} than {second}. {second} is {more} than {third}. Who is the {most}?",
            "{first} is the {most}. We know that {first} is {more} than {second}, and that {second} is "
            "{more} than "
            "{third}. So {first} is also {more} than {third}, and nobody is {more} than {first}. The "
            "order is "
            "{first}, {second}, {third}.",
        ),
        Opening(
            "{second} is {more} than {third}, but {first} is {more} than {second}. Who is the {least}?",
            "The {least} is {third}. Both {first} and {second} are {more} than {third}: the text says it of "
            "{second}, and {first} is even {more} than {second}. From the {most} to the {least} the order is "
            "{first}, {second}, {third}.",
        ),
        Opening(
            "[Put|Bring] {first}, {second} and {third} in order, when {second} is {more} than {third} and "
            "{first} is "
            "{more} than {second}.",
            "The order from the {most} to the {least} is:\n1. {first}\n2. {second}\n3. {third}\n{second} "
            "stands in "
            "the middle, because {first} is {more} than {second} and {second} is {more} than {third}.",
        ),
    ),
    (
        Exchange(
            "Who is in the middle?",
            "{second} is in the middle. {first} is {more} than {second}, and {second} is {more} than {third}.",
        ),
        Exchange(
            "Is {third} {more} than {first}?",
            "No, {third} is not {more} than {first}. It is the other way round, because {first} is the "
            "{most} and "
            "{third} is the {least}.",
        ),
        Exchange(
            "[List|Write] them from the {least} to the {most}.",
            "From the {least} to the {most}:\n1. {third}\n2. {second}\n3. {first}",
        ),
    ),
    _derive_order,
)


def _draw_ages(rng: random.Random) -> dict[str, Any]:
    name, friend = rng.sample(NAMES, 2)
    return {"name": name, "friend": friend, "age": rng.randint(6, 30), "gap": rng.randint(2, 12)}


def _derive_ages(rng: random.Random, slots: Slots) -> dict[str, Any]:
    years, old = rng.randint(2, 9), slots["age"] + slots["gap"]
    return {
        "old": old,
        "years": years,
        "then": slots["age"] + years,
        "old_then": old + years,
        "sum": slots["age"] + old,
    }


AGES = Template(
    "ages",
    _draw_ages,
    (
        Opening(
            "{friend} is {age} years old, and {name} is {gap} years older. How old is {name}?",
            "{name} is {old} years old. {friend} is {age}, and {name} is {gap} years older, so we add the "
            "two "
            "numbers: {age} + {gap} = {old}.",
        ),
        Opening(
            "{name} is {gap} years older than {friend}, who is {age}. [What is the age of {name}?|Find "
            "the age of "
            "{name}.]",
            "We start with the age of {friend}, which is {age}. {name} is {gap} years older, so we "
            "compute {age} + "
            "{gap} = {old}. Therefore {name} is {old} years old.",
        ),
    ),
    (
        Exchange(
            "How old will {friend} be in {years} years?",
            "In {years} years {friend} will be {then} years old, because {age} + {years} = {then}. {name} "
            "will be "
            "{old_then} by then.",
        ),
        Exchange(
            "What is the sum of their ages?",
            "The sum of their ages is {sum}, because {friend} is {age}, {name} is {old}, and {age} + {old} = {sum}.",
        ),
        Exchange(
            "Who is younger, and by how much?",
            "{friend} is younger. The difference is {gap} years, because {old} - {age} = {gap}.",
        ),
    ),
    _derive_ages,
)


def _draw_row(rng: random.Random) -> dict[str, Any]:
    return dict(zip(("one", "two", "three", "four"), rng.sample(NAMES, 4), strict=True))


ROW = Template(
    "row",
    _draw_row,
    (
        Opening(
            "Four friends stand in a row. {one} is first. {two} is right behind {one}, {three} is right "
            "behind {two}, "
            "and {four} is last. Who is third?",
            "{three} is third. {one} is first and {two} is right behind, so {two} is second. {three} "
            "follows {two}, and "
            "{four} is last. The row is {one}, {two}, {three}, {four}.",
        ),
        Opening(
            "In a queue, {one} stands before {two}, {two} before {three} and {three} before {four}. Who is at the end?",
            "At the end of the queue is {four}. The text gives the order step by step: {one} before "
            "{two}, {two} before "
            "{three}, and {three} before {four}. Nobody stands behind {four}.",
        ),
    ),
    (
        Exchange(
            "Who stands between {one} and {three}?",
            "{two} stands between {one} and {three}, because {two} is right behind {one} and right before {three}.",
        ),
        Exchange(
            "[Now {one} leaves.|{one} goes home.] Who is first then?",
            "When {one} leaves, {two} is first. The new row is {two}, {three}, {four}, and it has three people.",
        ),
        Exchange(
            "[List|Write] the row [from the back to the front|backwards].",
            "From the back to the front the row is:\n1. {four}\n2. {three}\n3. {two}\n4. {one}",
        ),
    ),
)


def _draw_odd(rng: random.Random) -> dict[str, Any]:
    group, other = rng.sample(list(GROUPS), 2)
    words = [*rng.sample(GROUPS[group], 3), rng.choice(GROUPS[other])]
    rng.shuffle(words)
    return {"words": ", ".join(words)}


def _derive_odd(rng: random.Random, slots: Slots) -> dict[str, Any]:
    words = slots["words"].split(", ")
    group = next(group for group, members in GROUPS.items() if sum(word in members for word in words) == 3)
    stranger = next(word for word in words if word not in GROUPS[group])
    first, second, third = (word for word in words if word != stranger)
    return {
        "group": group,
        "other": next(other for other, members in GROUPS.items() if stranger in members),
        "stranger": stranger,
        "first": first,
        "second": second,
        "third": third,
        "extra": next(word for word in GROUPS[group] if word not in words),
        "sorted": ", ".join(sorted((first, second, third))),
    }


ODD_ONE = Template(
    "odd one",
    _draw_odd,
    (
        Opening(
            "Which word does not belong to the others: {words}?",
            'The word that does not belong is "{stranger}". The words {first}, {second} and {third} are '
            "all names for "
            "{group!a}, but {stranger} is {other!a}. So {stranger} is the odd one out.",
        ),
        Opening(
            "Find the odd one out and explain: {words}.",
            'The odd one out is "{stranger}", because it is {other!a}. The other words belong '
            "together:\n- {first} is "
            "{group!a}\n- {second} is {group!a}\n- {third} is {group!a}",
        ),
    ),
    (
        Exchange(
            "[Name|Give me] one more word that belongs to the group.",
            'One more word is "{extra}". It is {group!a}, just like {first}, {second} and {third}.',
        ),
        Exchange(
            "What is the name of the group?",
            'The group is called "{group}". Its members here are {first}, {second} and {third}, while '
            "{stranger} is "
            "{other!a}.",
        ),
        Exchange(
            "[Sort|Put] the words of the group [by the alphabet|in alphabetical order].",
            "In alphabetical order the words of the group are {sorted}. The word {stranger} is left out, "
            "because it is "
            "{other!a}.",
        ),
    ),
    _derive_odd,
)


REASONING = (ORDER, AGES, ROW, ODD_ONE)
