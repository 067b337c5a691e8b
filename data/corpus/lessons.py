"""STEM and humanities: topics of the knowledge base explained, compared and taught."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from ctcdraft.data.corpus.facts import HUMANITIES as HUMANITIES_FACTS
from ctcdraft.data.corpus.facts import STEM as STEM_FACTS
from ctcdraft.data.corpus.facts import Fact
from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import JOBS, NAMES

Draw = Callable[[random.Random], dict[str, Any]]
Derive = Callable[[random.Random, Slots], dict[str, Any]]

EXPLANATIONS = (
    Opening(
        "[Explain|Please explain] {topic} to {name}, who is {age} years old.",
        "Hello, {name}! {topic!c} is {what}. It works like this: {how}. One example is {example}. [You "
        "will see it more "
        "often, now that you are {age}.|At {age} you can already understand it.] It is important, because "
        "{why}.",
    ),
    Opening(
        "What is {topic}? [I am|My name is] {name}, and I am {age}.",
        "{topic!c} is {what}. [In short|Put simply], {how}. You can think of {example}. We need to know "
        "about it, {name}, "
        "because {why}. With {age} years you are [just the right age|old enough] to learn more.",
    ),
    Opening(
        "{name} is {age} and has to give a talk about {topic}. [Write|Give me] the main points as a list.",
        "Here are the main points for {name}:\n1. {topic!c} is {what}.\n2. {how!c}.\n3. One example is "
        "{example}.\n4. It "
        "matters, because {why}.",
    ),
)
EXPLANATION_FOLLOW_UPS = (
    Exchange(
        "[Shorten|Now shorten|Please shorten] your answer to one sentence.",
        "{topic!c} is {what}, and it is important, because {why}.",
    ),
    Exchange(
        "[Give|Can you give] me an example[.|, please.]",
        "A good example of {topic} is {example}. There you can see what it means: {how}.",
    ),
    Exchange(
        "Why is {topic} important?",
        "{topic!c} is important, because {why}. We should also remember that {how}.",
    ),
    Exchange(
        "[Turn|Change] your answer into a list[.| with three points.]",
        "Here is the answer as a list:\n- What it is: {what}\n- How it works: {how}\n- Example: {example}",
    ),
    Exchange(
        "[Write|Make] a question for a quiz about it, with the answer.",
        "Question: What do we call {what}?\nAnswer: We call it {topic}. A hint for the quiz is {example}.",
    ),
)
COMPARISONS = (
    Opening(
        "{name} asks: [What is|Can you explain] the difference between {topic} and {other}?",
        "The two are not the same, {name}. {topic!c} is {what}, while {other} is {other_what}. An example "
        "of the first is "
        "{example}, and an example of the second is {other_example}.",
    ),
    Opening(
        "Compare {topic} with {other} for {name}.",
        "Here is the comparison for {name}:\n- {topic!c} is {what}.\n- {other!c} is {other_what}.\nThe "
        "first matters, because "
        "{why}. The second matters, because {other_why}.",
    ),
)
COMPARISON_FOLLOW_UPS = (
    Exchange(
        "Give me one example of each.",
        "An example of {topic} is {example}. An example of {other} is {other_example}.",
    ),
    Exchange(
        "[Tell me more|Say more] about the second one.",
        "{other!c} is {other_what}. It works like this: {other_how}. It is important, because {other_why}.",
    ),
    Exchange(
        "[Tell me more|Say more] about the first one.",
        "{topic!c} is {what}. It works like this: {how}. It is important, because {why}.",
    ),
)
CLASSES = (
    Opening(
        "{name} is {job!a} and wants to learn about {topic}. [Where should I start?|How do I begin?]",
        "Start with what {name} knows as {job!a}, and then say that {topic} is {what}. [Next|After that] "
        "show {example}. "
        "{name} will soon see that {how}. At the end explain why it matters: {why}.",
    ),
    Opening(
        "Plan a short lesson about {topic} for {name} the {job}.",
        "The lesson for {name} has three steps:\n1. Ask what {job!a} knows about {topic}.\n2. Explain "
        "that it is {what}.\n3. "
        "Show an example: {example}.\nAt the end {name} should know that {why}.",
    ),
)


def _about(facts: Mapping[str, Fact], topic: str, prefix: str = "") -> dict[str, Any]:
    return {prefix + field: clause for field, clause in facts[topic]._asdict().items()}


def _templates(subject: str, facts: Mapping[str, Fact]) -> tuple[Template, ...]:
    topics = list(facts)

    def draw_explanation(rng: random.Random) -> dict[str, Any]:
        return {"topic": rng.choice(topics), "name": rng.choice(NAMES), "age": rng.randint(9, 19)}

    def draw_comparison(rng: random.Random) -> dict[str, Any]:
        topic, other = rng.sample(topics, 2)
        return {"topic": topic, "other": other, "name": rng.choice(NAMES)}

    def draw_class(rng: random.Random) -> dict[str, Any]:
        return {"topic": rng.choice(topics), "name": rng.choice(NAMES), "job": rng.choice(list(JOBS))}

    def about_one(rng: random.Random, slots: Slots) -> dict[str, Any]:
        return _about(facts, slots["topic"])

    def about_both(rng: random.Random, slots: Slots) -> dict[str, Any]:
        return {**_about(facts, slots["topic"]), **_about(facts, slots["other"], "other_")}

    return (
        Template(f"{subject} explanation", draw_explanation, EXPLANATIONS, EXPLANATION_FOLLOW_UPS, about_one),
        Template(f"{subject} comparison", draw_comparison, COMPARISONS, COMPARISON_FOLLOW_UPS, about_both),
        Template(f"{subject} lesson", draw_class, CLASSES, EXPLANATION_FOLLOW_UPS, about_one),
    )


STEM = _templates("stem", STEM_FACTS)
HUMANITIES = _templates("humanities", HUMANITIES_FACTS)
