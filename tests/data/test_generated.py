"""What is drawn is deterministic, its splits are disjoint, and what the toy corpus says is true."""

import ast
import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from ctcdraft.data.generated import PROMPTS, SCENARIOS, TABLES, TOY, Scenario
from ctcdraft.data.records import conversation_of

COMPARISONS = {word: (word, *others.values()) for word, others in TABLES["comparisons"].items()}

SAMPLE = list(TOY.conversations(2400, seed=3))


def exchanges(category):
    """(first question, question, answer) for every exchange of the sample in this category."""
    for row in SAMPLE:
        turns = [turn["value"] for turn in row["conversations"]]
        if row["category"] == category:
            yield from ((turns[0], ask, answer) for ask, answer in zip(turns[::2], turns[1::2], strict=True))


def test_same_seed_gives_the_same_conversations_and_another_seed_gives_others():
    first, again, other = ([row["conversations"] for row in TOY.conversations(200, seed=seed)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_seed_gives_the_same_text_on_every_machine():
    """Python's generator and the hash of a split are the same everywhere; a change of this value is a new corpus."""
    assert TOY.fingerprint == "7fc4239ccd06"


def with_math(*scenarios):
    """The corpus with these scenarios of mathematics instead of its own."""
    return replace(TOY, drawers={**TOY.drawers, "math": [scenario.draw for scenario in scenarios]})


def test_fingerprint_follows_the_text():
    assert with_math(*(s for s in SCENARIOS if s.category == "math")).fingerprint == TOY.fingerprint
    assert with_math(*(s for s in SCENARIOS if s.name == "rectangle")).fingerprint != TOY.fingerprint


def test_rows_are_sharegpt_conversations_of_one_to_three_exchanges():
    assert len({row["id"] for row in SAMPLE}) == len(SAMPLE)
    assert {row["category"] for row in SAMPLE} == set(TOY.drawers)
    for row in SAMPLE:
        speakers = [turn["from"] for turn in row["conversations"]]
        assert speakers == ["human", "gpt"] * (len(speakers) // 2)
        assert 1 <= len(speakers) // 2 <= 3
        assert all(turn["value"].isascii() and turn["value"].strip() for turn in row["conversations"])


def test_answers_are_neither_empty_nor_endless():
    words = [len(answer.split()) for category in TOY.drawers for _, _, answer in exchanges(category)]
    assert min(words) >= 5
    assert max(words) <= 120
    assert 25 <= sum(words) / len(words) <= 60


def test_there_are_enough_conversations_for_the_base_and_none_starts_as_one_of_the_other_split():
    train = [row["conversations"][0]["value"] for row in TOY.conversations(12_000)]
    held_out = [row["conversations"][0]["value"] for row in TOY.conversations(400, held_out=True)]
    assert len(set(train)) == len(train)
    assert not set(train) & {*held_out, *(question["turns"][0] for question in TOY.questions())}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.category} {scenario.name}")
@pytest.mark.parametrize("opening", [0, 1])
def test_every_opening_mentions_every_slot(scenario, opening):
    """Otherwise two conversations of different slots, and so of two splits, could start with the same question."""
    rng, scenario = random.Random(0), replace(scenario, openings=[scenario.openings[opening]])
    for _ in range(20):
        drawn = scenario.draw(rng)
        slots = ast.literal_eval(drawn.key.removeprefix(f"{scenario.category} {scenario.name} "))
        assert slots.keys() == scenario.pools.keys()
        for value in slots.values():
            assert any(word in drawn.turns[0] for word in COMPARISONS.get(value, (str(value),))), drawn.turns[0]


def test_an_exhausted_category_says_so():
    only_one = Scenario("math", "one", {"x": [1]}, [("Ask", "Answer")])
    with pytest.raises(ValueError, match="conversations of category 'math'"):
        list(with_math(only_one).conversations(1000))


def test_questions_are_eighty_in_two_turns_and_ten_per_category():
    assert [question["question_id"] for question in TOY.questions()] == list(range(81, 161))
    assert [question["category"] for question in TOY.questions()] == [c for c in TOY.drawers for _ in range(10)]
    assert all(len(question["turns"]) == 2 and all(question["turns"]) for question in TOY.questions())
    assert len({question["turns"][0] for question in TOY.questions()}) == 80
    assert TOY.questions() == TOY.questions()


def test_every_equation_holds():
    answers = " \n".join(answer for _, _, answer in exchanges("math"))
    equations = re.findall(r"(\d[\d x/+-]*) = (\d+)", answers)
    assert len(equations) > 100
    assert all(eval(left.replace("x", "*")) == int(right) for left, right in equations)


def test_shopping_answers_follow_from_the_question():
    asked = re.compile(r"buys (\d+) \w+ for (\d+) dollars each and pays with (\d+)\.")
    found = [(asked.search(ask), answer) for first, ask, answer in exchanges("math") if first == ask]
    found = [(tuple(map(int, match.groups())), answer) for match, answer in found if match]
    assert len(found) > 10
    for (count, price, paid), answer in found:
        assert f"The change is {paid - count * price} dollars" in answer


def test_the_tallest_is_whoever_no_clue_puts_below():
    asked = re.compile(r"(\w+) is \w+ than (\w+)\. (\w+) is \w+ than (\w+)\. Who is the \w+\?")
    found = [(asked.match(ask), answer) for first, ask, answer in exchanges("reasoning") if first == ask]
    found = [(match.groups(), answer) for match, answer in found if match]
    assert len(found) > 10
    for (high, low, second_high, second_low), answer in found:
        top = ({high, second_high} - {low, second_low}).pop()
        assert answer.startswith(f"{top} is the ")


def test_extracted_facts_stand_in_the_text():
    found = 0
    for first, _, answer in exchanges("extraction"):
        facts = re.findall(r"^- \w+: (.*)$", answer, re.M)
        facts += [v for line in answer.splitlines() if line.startswith("{") for v in json.loads(line).values()]
        facts += answer.splitlines()[-1].split(",") if "CSV" in answer else []
        assert all(str(fact) in first for fact in facts), (first, answer)
        found += len(facts)
    assert found > 1000


def test_code_blocks_run_and_calls_return_what_is_said():
    calls = 0
    for first, _, answer in exchanges("coding"):
        own_answer = next(a for f, ask, a in exchanges("coding") if f == ask == first)
        code = re.search(r"```python\n(.*?)```", first + own_answer, re.S)[1]
        function = {}
        exec(code, function)
        for call, value in re.findall(r"The call (\S+) returns (\w+|-\d+)[.,]", answer):
            assert eval(call, function) == eval(value)
            calls += 1
    assert calls > 200


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
