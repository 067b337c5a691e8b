import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctcdraft.data.duplicates import NearDuplicates

QUESTIONS = [
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences.",
    "Who are you?",
    "Imagine you are writing a blog post comparing two popular smartphone models.",
]


def test_a_question_is_found_whatever_surrounds_and_punctuates_it():
    index = NearDuplicates(QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        assert index.of(question) == number
        assert index.of(f"Hello! {question.upper().replace(',', ' --')} Thanks a lot.") == number
    assert index.of(QUESTIONS[0].replace("recent", "late")) is None  # five of its ten 5-grams are others
    assert index.of(QUESTIONS[0].replace("cultural experiences", "its beaches")) == 0


def test_what_only_resembles_a_question_is_none():
    index = NearDuplicates(QUESTIONS)
    for text in ("", "Who is he?", "Write a blog post about a trip.", "you are who"):
        assert index.of(text) is None
    assert NearDuplicates([]).of("anything") is None


@pytest.mark.parametrize("question", ["Hi!", "continue", "Hi there", "继续"])
def test_a_word_that_stands_in_many_texts_is_repeated_by_itself_alone(question):
    index = NearDuplicates([QUESTIONS[0], question])
    assert index.of(f" {question.upper()}\n") == 1
    assert index.of(f"{question} Write a poem about the sea.") is None
    assert index.of(f"{question} {QUESTIONS[0]}") == 0


@pytest.mark.slow
@given(st.lists(st.text(max_size=30), max_size=4), st.text(max_size=40))
def test_any_text_is_answered(questions, text):
    found = NearDuplicates(questions).of(text)
    assert found is None or 0 <= found < len(questions)
