"""Role play: people at work, guides and forgotten things that speak."""

import random
from collections.abc import Mapping
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import CITIES, JOBS, NAMES, PLACES, THINGS


def _draw_job(rng: random.Random) -> dict[str, Any]:
    return {"name": rng.choice(NAMES), "job": rng.choice(list(JOBS)), "city": rng.choice(list(CITIES))}


def _derive_job(rng: random.Random, slots: Slots) -> dict[str, Any]:
    return {**_job(slots["job"]), **_city(slots["city"])}


def _job(job: str) -> Mapping[str, str]:
    work, tool, advice = JOBS[job]
    return {"work": work, "tool": tool, "advice": advice}


def _city(city: str) -> Mapping[str, str]:
    country, sight, dish = CITIES[city]
    return {"country": country, "sight": sight, "dish": dish}


SPEAKER = Template(
    "speaker",
    _draw_job,
    (
        Opening(
            "[Pretend|Imagine] that you are {job!a} in {city}. {name} asks you about your day.",
            "Good morning, {name}! I am {job!a} here in {city}, and I {work}. My {tool} is always [with "
            "me|at my "
            "side], and I could not work without it. After work I walk past {sight} and eat {dish}. It is a "
            "hard job, but I would not change it for any other.",
        ),
        Opening(
            "You are {name}, {job!a} from {city}. Introduce yourself.",
            "My name is {name}, and I am {job!a} from {city} in {country}. I {work}, and I have done so for "
            "[ten|twelve|twenty] years. If you visit me, I will show you my {tool} and tell you my secret: "
            "{advice}. On my free days I sit near {sight} with a plate of {dish}.",
        ),
        Opening(
            "[Act|Speak] as {job!a} who lives in {city}, and give {name} some advice.",
            "Listen, {name}. I have lived in {city} all my life, and I {work}. Here is my advice: {advice}. "
            "Take good care of your {tool}, be patient, and learn from your mistakes. If you do that, you "
            "will "
            "become a good {job} too.",
        ),
    ),
    (
        Exchange(
            "[Stay in your role.|Still in your role:] What is your most important tool, and why?",
            "My most important tool is the {tool}. I use it every day, because I {work}. Without it I "
            "would not "
            "be {job!a}.",
        ),
        Exchange(
            "What would you tell a [young person|beginner] who wants your job?",
            "I would say this: {advice}. Start small, ask many questions and do not give up. One day you "
            "will "
            "be a fine {job} too.",
        ),
        Exchange(
            "What should I see and eat in your city?",
            "In {city} you should see {sight} first. Then sit down and try {dish}, which is loved by all "
            "of us "
            "in {country}.",
        ),
        Exchange(
            "[Say the same|Now say it] in one sentence.",
            "I am {job!a} in {city}, I {work}, and my advice is simple: {advice}.",
        ),
    ),
    _derive_job,
)


def _draw_guide(rng: random.Random) -> dict[str, Any]:
    name, friend = rng.sample(NAMES, 2)
    return {"name": name, "friend": friend, "city": rng.choice(list(CITIES)), "days": rng.randint(2, 9)}


def _derive_guide(rng: random.Random, slots: Slots) -> dict[str, Any]:
    return {**_city(slots["city"]), "place": rng.choice(PLACES), "more": slots["days"] + 1}


GUIDE = Template(
    "guide",
    _draw_guide,
    (
        Opening(
            "Act as a tour guide. {name} and {friend} are in {city} for {days} days. [Welcome them.|Greet them.]",
            "Welcome to {city}, {name} and {friend}! You have {days} days in {country}, so let us use "
            "them well. "
            "We will start at {sight}, which every visitor should see. At noon we will eat {dish} in a small "
            "restaurant. In the evening we will walk through the old streets and listen to music.",
        ),
        Opening(
            "You are a hotel owner in {city}. {name} and {friend} want to stay for {days} days. [Greet "
            "them.|What "
            "do you say?]",
            "Good evening, {name} and {friend}, and welcome to my hotel in {city}. Your room is ready for "
            "all "
            "{days} days, and from the window you can see {sight}. Breakfast is at eight, and for dinner we "
            "serve {dish}. If you need anything, just ring the bell.",
        ),
    ),
    (
        Exchange(
            "They want to stay one day longer. [Answer them.|What do you say?]",
            "One day longer is a fine idea! Then you will have {more} days in {city} instead of {days}, "
            "and we "
            "can visit {sight} again in the morning light.",
        ),
        Exchange(
            "[Turn|Change] your plan into a list.",
            "Here is the plan for {name} and {friend}:\n1. Visit {sight}\n2. Eat {dish}\n3. Walk through the "
            "streets of {city}\n4. Rest for the next of the {days} days",
        ),
        Exchange(
            "{friend} is tired. [Suggest|Propose] something quiet.",
            "Do not worry, {friend}. We can sit down in a garden near {sight}, drink some tea and watch the "
            "people of {city}. Later I will bring you {dish}.",
        ),
    ),
    _derive_guide,
)


def _draw_object(rng: random.Random) -> dict[str, Any]:
    return {"name": rng.choice(NAMES), "thing": rng.choice(THINGS), "place": rng.choice(PLACES)}


OBJECT = Template(
    "object",
    _draw_object,
    (
        Opening(
            "You are an old {thing} in the {place}, and {name} has found you. [Tell your story.|Speak!]",
            "Hello, {name}! I am only an old {thing}, but I have seen a lot. For many years I lay here in "
            "the "
            "{place} and listened to the people who passed by. Nobody saw me until you came. Please clean "
            "me, "
            "{name}, and take me to a warm room.",
        ),
        Opening(
            "Pretend that you are the {thing} of {name}, forgotten in the {place}. [How do you feel?|What "
            "do you "
            "think?]",
            "I am the {thing} of {name}, and I feel alone. Yesterday we came to the {place} together, and "
            "then "
            "{name} went home without me. It is dark and cold in the {place}. I hope that {name} "
            "remembers me "
            "tomorrow and comes back.",
        ),
    ),
    (
        Exchange(
            "What do you wish for?",
            "I wish for a quiet home with {name}. {thing!A} belongs to people and not to the dust of the {place}.",
        ),
        Exchange(
            "{name} [wants to sell|will sell] you. [What do you say?|Answer.]",
            "Please do not sell me, {name}! I may be an old {thing}, but I know every stone of the "
            "{place}, and "
            "I will serve you well for many more years.",
        ),
        Exchange(
            "[Say it again|Repeat that] in one sentence.",
            "I am {thing!a} from the {place}, and all that I want is to go home with {name}.",
        ),
    ),
)

ROLEPLAY = (SPEAKER, GUIDE, OBJECT)
