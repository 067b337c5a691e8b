"""Coding: small Python functions, what they do, an example call, and small changes to them."""

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template

NUMBERS, TEXTS, LISTS = (
    ("n", "x", "value", "number"),
    ("text", "word", "s", "line"),
    ("items", "numbers", "data", "xs"),
)
WORDS = ("apple", "banana", "river", "window", "summer", "paper", "kitten", "sunset")


@dataclass(frozen=True)
class Program:
    """A function body over the argument `X` and the constant `K`, its meaning, and the same as a callable."""

    task: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    body: str
    how: str
    run: Callable[[Any, int], Any]

    def write(self, name: str, argument: str, constant: int) -> str:
        body = self.insert(self.body, argument, constant)
        return f"def {name}({argument}):\n{textwrap.indent(body, '    ')}"

    @staticmethod
    def insert(text: str, argument: str, constant: int) -> str:
        return text.replace("X", argument).replace("K", str(constant))


PROGRAMS = (
    Program(
        "adds K to a number",
        ("add", "plus", "increase"),
        NUMBERS,
        "return X + K",
        "adds K to X and returns the sum",
        lambda x, k: x + k,
    ),
    Program(
        "multiplies a number by K",
        ("multiply", "times", "scale"),
        NUMBERS,
        "return X * K",
        "multiplies X by K and returns the product",
        lambda x, k: x * k,
    ),
    Program(
        "tells whether a number is larger than K",
        ("is_large", "is_big", "above"),
        NUMBERS,
        "return X > K",
        "compares X with K and returns True or False",
        lambda x, k: x > k,
    ),
    Program(
        "tells whether a number can be divided by K",
        ("divides", "is_multiple", "can_divide"),
        NUMBERS,
        "return X % K == 0",
        "checks that the rest of X divided by K is zero",
        lambda x, k: x % k == 0,
    ),
    Program(
        "limits a number to at most K",
        ("limit", "cap", "at_most"),
        NUMBERS,
        "if X > K:\n    return K\nreturn X",
        "returns K when X is larger than K, and X itself otherwise",
        lambda x, k: min(x, k),
    ),
    Program(
        "repeats a text K times",
        ("repeat", "copy_text", "again"),
        TEXTS,
        "return X * K",
        "writes X K times in a row and returns the result",
        lambda x, k: x * k,
    ),
    Program(
        "returns the first K letters of a text",
        ("first_letters", "start", "prefix"),
        TEXTS,
        "return X[:K]",
        "cuts X after K letters and returns the start",
        lambda x, k: x[:k],
    ),
    Program(
        "tells whether a text has more than K letters",
        ("is_long", "longer", "too_long"),
        TEXTS,
        "return len(X) > K",
        "compares the length of X with K and returns True or False",
        lambda x, k: len(x) > k,
    ),
    Program(
        "reverses a text and repeats it K times",
        ("mirror", "reverse", "backwards"),
        TEXTS,
        "turned = X[::-1]\nreturn turned * K",
        "reads X from the end to the start and repeats that K times",
        lambda x, k: x[::-1] * k,
    ),
    Program(
        "sums the numbers of a list that are larger than K",
        ("sum_large", "add_big", "total"),
        LISTS,
        "result = 0\nfor item in X:\n    if item > K:\n        result += item\nreturn result",
        "goes through X and adds every item that is larger than K",
        lambda x, k: sum(item for item in x if item > k),
    ),
    Program(
        "counts the numbers of a list that are smaller than K",
        ("count_small", "count_below", "how_many"),
        LISTS,
        "count = 0\nfor item in X:\n    if item < K:\n        count += 1\nreturn count",
        "goes through X and counts every item that is smaller than K",
        lambda x, k: sum(item < k for item in x),
    ),
    Program(
        "adds K to every number of a list",
        ("add_all", "shift", "raise_all"),
        LISTS,
        "return [item + K for item in X]",
        "builds a new list with every item of X plus K",
        lambda x, k: [item + k for item in x],
    ),
    Program(
        "keeps the numbers of a list that are larger than K",
        ("keep_large", "filter_big", "select"),
        LISTS,
        "return [item for item in X if item > K]",
        "builds a new list with the items of X that are larger than K",
        lambda x, k: [item for item in x if item > k],
    ),
    Program(
        "returns the largest number of a list plus K",
        ("largest", "top", "maximum"),
        LISTS,
        "best = X[0]\nfor item in X:\n    if item > best:\n        best = item\nreturn best + K",
        "looks for the largest item of X and adds K to it",
        lambda x, k: max(x) + k,
    ),
)


def _draw(rng: random.Random) -> dict[str, Any]:
    program = rng.choice(PROGRAMS)
    argument, constant = rng.choice(program.arguments), rng.randint(2, 20)
    if program.arguments is TEXTS:
        constant = rng.randint(2, 6)
    task = program.insert(program.task, argument, constant)
    return {"task": task, "function": rng.choice(program.names), "argument": argument}


def _derive(rng: random.Random, slots: Slots) -> dict[str, Any]:
    program, constant = _find(slots["task"])
    function, argument = slots["function"], slots["argument"]
    other, example = constant + 1, _example(rng, program.arguments)
    renamed = next(name for name in program.arguments if name != argument)
    return {
        "code": program.write(function, argument, constant),
        "how": program.insert(program.how, argument, constant),
        "constant": constant,
        "other": other,
        "other_code": program.write(function, argument, other),
        "renamed": renamed,
        "renamed_code": program.write(function, renamed, constant),
        "example": repr(example),
        "result": repr(program.run(example, constant)),
    }


def _find(task: str) -> tuple[Program, int]:
    constant = next(int(word) for word in task.split() if word.isdigit())
    return next((p, constant) for p in PROGRAMS if p.insert(p.task, "", constant) == task)


def _example(rng: random.Random, arguments: tuple[str, ...]) -> int | str | list[int]:
    if arguments is NUMBERS:
        return rng.randint(2, 30)
    return rng.choice(WORDS) if arguments is TEXTS else rng.sample(range(1, 30), 3)


FUNCTION = Template(
    "function",
    _draw,
    (
        Opening(
            "Write a Python function {function}({argument}) that {task}.",
            "Here is the function:\n```python\n{code}\n```\nThe function {how}.",
        ),
        Opening(
            "[I need|Please write] Python code that {task}. Name the function {function} and its argument {argument}.",
            "This code does it:\n```python\n{code}\n```\nThe name of the function is {function}, and its "
            "argument is "
            "called {argument}. It {how}.",
        ),
        Opening(
            "How do I write a function in Python that {task}? [Use|Take] the names {function} and {argument}.",
            "You can define it like this:\n```python\n{code}\n```\nWhen you call {function}, it {how}. "
            "You can use it "
            "as often as you like.",
        ),
    ),
    (
        Exchange(
            "What does {function}({example}) return?",
            "The call {function}({example}) returns {result}. The reason is simple: the function {how}.",
        ),
        Exchange(
            "[Explain|Can you explain] the code [in one sentence|in words]?",
            "The function {function} takes one argument called {argument}, and it {how}.",
        ),
        Exchange(
            "[Rename|Please rename] the argument to {renamed}.",
            "Here is the function with the new name:\n```python\n{renamed_code}\n```\nOnly the name of "
            "the argument has "
            "changed from {argument} to {renamed}.",
        ),
        Exchange(
            "[Use|Now use] {other} instead of {constant}.",
            "Here is the function with {other} instead of "
            "{constant}:\n```python\n{other_code}\n```\nNothing else has "
            "changed.",
        ),
        Exchange(
            "[Show me|Give me] a test for it.",
            "You can test it like this:\n```python\n{code}\n\nassert {function}({example}) == "
            "{result}\n```\nThe test "
            "passes when the result is {result}.",
        ),
    ),
    _derive,
)

CODING = (FUNCTION,)
