"""The toy corpus is deterministic, its splits are disjoint, and what it says is true."""

import csv
import dataclasses
import io
import json
import random
import re

import pytest

from ctcdraft.data.corpus.template import fill
from ctcdraft.data.corpus.words import GROUPS
from ctcdraft.data.toy import CATEGORIES, TEMPLATES, conversations, fingerprint, questions

FIXED_SHOPPING = {"name": "Anna", "thing": "map", "count": 3, "price": 4, "paid": 20}
SAMPLE = list(conversations(2400, seed=3))


def exchanges(category):
    """(first question, question, answer) for every exchange of the sample in this category."""
    for row in SAMPLE:
        turns = [turn["value"] for turn in row["conversations"]]
        if row["category"] == category:
            yield from ((turns[0], ask, answer) for ask, answer in zip(turns[::2], turns[1::2], strict=True))


def test_same_seed_gives_the_same_conversations_and_another_seed_gives_others():
    first, again, other = ([row["conversations"] for row in conversations(200, seed=seed)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_fingerprint_follows_the_text(monkeypatch):
    before = fingerprint.__wrapped__()
    assert before == fingerprint()
    monkeypatch.setitem(TEMPLATES, "math", TEMPLATES["math"][:1])
    assert fingerprint.__wrapped__() != before


def test_rows_are_sharegpt_conversations_of_one_to_three_exchanges():
    assert len({row["id"] for row in SAMPLE}) == len(SAMPLE)
    assert {row["category"] for row in SAMPLE} == set(CATEGORIES)
    for row in SAMPLE:
        speakers = [turn["from"] for turn in row["conversations"]]
        assert speakers == ["human", "gpt"] * (len(speakers) // 2)
        assert 1 <= len(speakers) // 2 <= 3
        assert all(turn["value"].isascii() and turn["value"].strip() for turn in row["conversations"])


def test_all_slots_and_alternatives_are_filled():
    for row in SAMPLE:
        for turn in row["conversations"]:
            assert not re.search(r"\{\w+(!\w)?\}|\[[^\]]*\|", turn["value"]), turn["value"]


def test_answers_are_neither_empty_nor_endless():
    words = [len(answer.split()) for category in CATEGORIES for _, _, answer in exchanges(category)]
    assert min(words) >= 5
    assert max(words) <= 120
    assert 25 <= sum(words) / len(words) <= 60


def test_first_questions_are_distinct_and_never_in_both_splits():
    train = [row["conversations"][0]["value"] for row in conversations(8000)]
    held_out = [row["conversations"][0]["value"] for row in conversations(400, held_out=True)]
    assert len(set(train)) == len(train)
    assert not set(train) & {*held_out, *(question["turns"][0] for question in questions())}


@pytest.mark.parametrize(
    "template", [template for family in TEMPLATES.values() for template in family], ids=lambda t: t.name
)
def test_every_opening_mentions_its_whole_key(template):
    """Otherwise items of two keys, and so of two splits, could ask the same question."""
    rng = random.Random(0)
    for opening in template.openings * 10:
        drawn = template.draw(rng)
        asked = fill(opening.ask, {**drawn, **template.derive(rng, drawn)}, rng).lower()
        assert all(str(value).lower() in asked for value in drawn.values())


def test_an_exhausted_category_says_so(monkeypatch):
    only_one = dataclasses.replace(TEMPLATES["math"][0], draw=lambda rng: FIXED_SHOPPING)
    monkeypatch.setitem(TEMPLATES, "math", (only_one,))
    with pytest.raises(ValueError, match="conversations of category 'math'"):
        list(conversations(1000))


def test_questions_are_eighty_in_two_turns_and_ten_per_category():
    assert [question["question_id"] for question in questions()] == list(range(81, 161))
    assert [question["category"] for question in questions()] == [c for c in CATEGORIES for _ in range(10)]
    assert all(len(question["turns"]) == 2 and all(question["turns"]) for question in questions())
    assert len({question["turns"][0] for question in questions()}) == 80
    assert questions() == questions()


@pytest.mark.parametrize("category", ["math", "reasoning"])
def test_every_equation_holds(category):
    answers = " \n".join(answer for _, _, answer in exchanges(category))
    equations = re.findall(r"(\d[\d x/+-]*) = (\d+)", answers)
    assert len(equations) > 100
    assert all(eval(left.replace("x", "*")) == int(right) for left, right in equations)


def test_shopping_answers_follow_from_the_question():
    asked = re.compile(r"buys (\d+) \w+ for (\d+) dollars each and pays with (\d+) dollars")
    found = [(asked.search(ask), answer) for first, ask, answer in exchanges("math") if first == ask]
    found = [(tuple(map(int, match.groups())), answer) for match, answer in found if match]
    assert len(found) > 10
    for (count, price, paid), answer in found:
        assert f"the change is {paid - count * price} dollars" in answer


def test_the_tallest_is_whoever_no_clue_puts_below():
    asked = re.compile(r"(\w+) is (\w+) than (\w+)\. (\w+) is \w+ than (\w+)\. Who is the \w+\?")
    found = [(asked.match(ask), answer) for first, ask, answer in exchanges("reasoning") if first == ask]
    found = [(match.groups(), answer) for match, answer in found if match]
    assert len(found) > 10
    for (high, _, low, second_high, second_low), answer in found:
        top = ({high, second_high} - {low, second_low}).pop()
        assert answer.startswith(f"{top} is the ")


def test_the_odd_one_out_is_alone_in_its_group():
    found = 0
    for first, ask, answer in exchanges("reasoning"):
        if first == ask and (match := re.search(r"(?:others|explain): (.*)[?.]$", ask)):
            words = match[1].split(", ")
            groups = [next(group for group, members in GROUPS.items() if word in members) for word in words]
            odd = next(word for word, group in zip(words, groups, strict=True) if groups.count(group) == 1)
            assert f'is "{odd}"' in answer
            found += 1
    assert found > 10


def test_extracted_facts_stand_in_the_text():
    for first, _, answer in exchanges("extraction"):
        facts = [*re.findall(r"^- \w+: (.*)$", answer, re.M), *json_values(answer), *csv_values(answer)]
        for fact in facts:
            assert all(part in first for part in str(fact).split(" and ")), (first, answer)


def json_values(answer):
    return [value for line in answer.splitlines() if line.startswith("{") for value in json.loads(line).values()]


def csv_values(answer):
    rows = list(csv.reader(io.StringIO(answer)))
    header, *values = rows[1:3] if "CSV" in rows[0][0] else ([], [])
    assert all(len(row) == len(header) for row in values)
    return [value for row in values for value in row]


def test_code_blocks_run_and_calls_return_what_is_said():
    blocks = calls = 0
    for first, _, answer in exchanges("coding"):
        function = {}
        for code in re.findall(r"```python\n(.*?)```", answer, re.S):
            exec(code, function)
            blocks += 1
        if match := re.match(r"The call (.*) returns (.*)\. The reason", answer):
            exec(code_of(first), function)
            assert eval(match[1], function) == eval(match[2])
            calls += 1
    assert blocks > 300
    assert calls > 20


def code_of(first):
    """The code of the answer to this first question."""
    answer = next(answer for asked, ask, answer in exchanges("coding") if asked == ask == first)
    return re.search(r"```python\n(.*?)```", answer, re.S)[1]
