"""The embedded corpus is deterministic, its splits are disjoint, and what it says is true."""

import ast
import csv
import io
import json
import re
from collections import Counter
from itertools import islice

import pytest

from ctcdraft.data.corpus.template import Item
from ctcdraft.data.embedded import CATEGORIES, TEMPLATES, conversations, fingerprint, questions

SAMPLE = list(conversations(2000, seed=3))



def exchanges(category):
    """(first question, question, answer) for every exchange of the sample in this category."""
    for row in SAMPLE:
        turns = [turn["value"] for turn in row["conversations"]]
        if row["category"] == category:
            yield from ((turns[0], ask, answer) for ask, answer in zip(turns[::2], turns[1::2], strict=True))


def test_same_seed_same_conversations_and_another_seed_others():
    assert list(conversations(200, seed=3)) == SAMPLE[:200]
    assert [row["conversations"] for row in conversations(200, seed=4)] != [
        row["conversations"] for row in SAMPLE[:200]
    ]
    assert fingerprint() == fingerprint.__wrapped__()


def test_rows_are_sharegpt_conversations_of_one_to_three_exchanges():
    assert len({row["id"] for row in SAMPLE}) == len(SAMPLE)
    assert {row["category"] for row in SAMPLE} == set(CATEGORIES)
    for row in SAMPLE:
        speakers = [turn["from"] for turn in row["conversations"]]
        assert speakers == ["human", "gpt"] * (len(speakers) // 2)
        assert 1 <= len(speakers) // 2 <= 3
        assert all(turn["value"].isascii() and turn["value"].strip() for turn in row["conversations"])


def test_slots_and_alternatives_are_all_filled():
    for row in SAMPLE:
        for turn in row["conversations"]:
            assert not re.search(r"\{\w+(!\w)?\}|\[[^\]]*\|", turn["value"]), turn["value"]


def test_first_questions_are_distinct():
    assert len({row["conversations"][0]["value"] for row in SAMPLE}) == len(SAMPLE)


def test_answers_have_a_sensible_length():
    words = [len(answer.split()) for category in CATEGORIES for _, _, answer in exchanges(category)]
    assert min(words) >= 5
    assert max(words) <= 120
    assert 25 <= sum(words) / len(words) <= 60


def test_no_first_question_is_in_both_splits():
    train = {row["conversations"][0]["value"] for row in conversations(8000)}
    held_out = {row["conversations"][0]["value"] for row in conversations(400, held_out=True)}
    held_out |= {question["turns"][0] for question in questions()}
    assert not train & held_out


@pytest.mark.parametrize("template", [t for templates in TEMPLATES.values() for t in templates], ids=lambda t: t.name)
def test_every_opening_mentions_the_whole_key(template):
    """Else two items of different keys could ask the same thing, one in each split."""
    import random

    from ctcdraft.data.corpus.template import fill

    rng = random.Random(0)
    for opening in template.openings:
        drawn = template.draw(rng)
        slots = {**drawn, **template.derive(rng, drawn)}
        for _ in range(20):
            asked = fill(opening.ask, slots, rng).lower()
            assert all(str(drawn[name]).lower() in asked for name in drawn if name not in IMPLIED[template.name])


IMPLIED = Counter()
IMPLIED = {t.name: () for templates in TEMPLATES.values() for t in templates}
IMPLIED["odd one"] = ("group", "other", "stranger")  # follow from the four words
