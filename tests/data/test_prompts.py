import re
from collections import Counter

from ctcdraft.data.generated import PROMPTS
from ctcdraft.data.records import conversation_of


def test_thousands_of_different_questions_are_drawn_alike_for_a_seed():
    rows = list(PROMPTS.conversations(3000, seed=1))
    assert rows == list(PROMPTS.conversations(3000, seed=1))
    assert len({row["turns"][0] for row in rows}) == 3000
    assert set(Counter(row["category"] for row in rows).values()) == {375}
    assert {len(row["turns"]) for row in rows} == {1, 2, 3}
    for row in rows:
        assert len(conversation_of(row, 0).messages) == len(row["turns"])
        assert not any(re.search(r"\{[a-z_]+\d?\}", turn) for turn in row["turns"])


def test_held_out_questions_of_two_turns_come_from_every_category_and_are_never_trained_on():
    asked = PROMPTS.questions()
    assert Counter(row["category"] for row in asked) == dict.fromkeys(PROMPTS.drawers, 10)
    assert all(len(row["turns"]) == 2 for row in asked)
    trained = {row["turns"][0] for seed in range(3) for row in PROMPTS.conversations(2000, seed)}
    assert not trained & {row["turns"][0] for row in asked}


def test_a_seed_gives_the_same_questions_on_every_machine():
    """A change of this value is a new corpus, and all that was prepared from it is prepared anew."""
    assert PROMPTS.fingerprint == "3f346da96e79"
