"""Extraction: profiles, orders and meetings, asked for as a list, JSON or CSV."""

import json
import random
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import CITIES, COLOURS, DAYS, JOBS, NAMES, THINGS


def _draw_profile(rng: random.Random) -> dict[str, Any]:
    person = {"name": rng.choice(NAMES), "age": rng.randint(19, 79), "job": rng.choice(list(JOBS))}
    return {**person, "city": rng.choice(list(CITIES)), "thing": rng.choice(THINGS)}


def _derive_profile(rng: random.Random, slots: Slots) -> dict[str, Any]:
    return {"json": json.dumps({field: slots[field] for field in ("name", "age", "job", "city")})}


PROFILE_TEXT = (
    "[{name} is {age} years old and works as {job!a} in {city}. On the desk stands {thing!a}."
    "|In {city} lives {job!a} called {name}, who is {age} years old and owns {thing!a}."
    "|{name}, {age}, has been {job!a} in {city} for a long time and collects every {thing}.]"
)
PROFILE = Template(
    "profile",
    _draw_profile,
    (
        Opening(
            f"[Extract|List] the name, age, job and city from the text: {PROFILE_TEXT}",
            "The text says:\n- Name: {name}\n- Age: {age}\n- Job: {job}\n- City: {city}",
        ),
        Opening(
            f"Read the text and give me the name, age, job and city as JSON. Text: {PROFILE_TEXT}",
            "Here is the JSON:\n{json}\nAll four values are taken from the text.",
        ),
        Opening(
            f"Who is described here, and what do we learn? {PROFILE_TEXT}",
            "The text describes {name}. We learn that {name} is {age} years old, works as {job!a} and "
            "lives in {city}. "
            "The text also mentions {thing!a}.",
        ),
    ),
    (
        Exchange(
            "[Now give|Give] me the same facts as CSV.",
            "Here is the CSV:\nname,age,job,city\n{name},{age},{job},{city}",
        ),
        Exchange(
            "[Which object does the text mention?|Which thing is mentioned in the text?]",
            'The text mentions one object, and it is "{thing}". It belongs to {name}, the {job} from {city}.',
        ),
        Exchange(
            "How old is {name}, and where is the {job} from?",
            "{name} is {age} years old, and the {job} is from {city}. Both facts stand in the text.",
        ),
        Exchange(
            "[Write|Say] it in one sentence.",
            "{name} is {age} years old, lives in {city} and works there as {job!a}.",
        ),
    ),
    _derive_profile,
)


def _draw_order(rng: random.Random) -> dict[str, Any]:
    goods = {"count": rng.randint(2, 19), "colour": rng.choice(COLOURS), "thing": rng.choice(THINGS)}
    return {"name": rng.choice(NAMES), **goods, "city": rng.choice(list(CITIES)), "day": rng.choice(DAYS)}


def _derive_order(rng: random.Random, slots: Slots) -> dict[str, Any]:
    order = {
        "customer": slots["name"],
        "item": slots["thing"],
        "colour": slots["colour"],
        "count": slots["count"],
    }
    return {"json": json.dumps({**order, "city": slots["city"], "day": slots["day"]})}


ORDER_TEXT = (
    "[{name} orders {count} {colour} {thing!p}. Please deliver them to {city} on {day}."
    "|Please send {count} {colour} {thing!p} to {name} in {city}. They are needed on {day}."
    "|On {day} a box with {count} {colour} {thing!p} has to reach {name} in {city}.]"
)
ORDER = Template(
    "purchase",
    _draw_order,
    (
        Opening(
            f"Extract the order as JSON with customer, item, colour, count, city and day: {ORDER_TEXT}",
            "Here is the order as JSON:\n{json}\nThe item is written without the plural ending.",
        ),
        Opening(
            f"[Make|Write] a list of the facts in this order: {ORDER_TEXT}",
            "The order says:\n- Customer: {name}\n- Item: {thing}\n- Colour: {colour}\n- Count: "
            "{count}\n- City: "
            "{city}\n- Day: {day}",
        ),
        Opening(
            f"What is ordered, by whom and for when? {ORDER_TEXT}",
            "{name} orders {count} {thing!p}. Their colour is {colour}, and they go to {city}. The day of "
            "the delivery "
            "is {day}.",
        ),
    ),
    (
        Exchange(
            "[Now as|Give it to me as] CSV, please.",
            "Here is the order as "
            "CSV:\ncustomer,item,colour,count,city,day\n{name},{thing},{colour},{count},{city},"
            "{day}",
        ),
        Exchange(
            "How many {thing!p} are there, and which colour do they have?",
            "There are {count} {thing!p}, and their colour is {colour}. They are meant for {name}.",
        ),
        Exchange(
            "Where and when do they arrive?",
            "They arrive in {city} on {day}. The customer there is {name}, who gets {count} {thing!p}.",
        ),
    ),
    _derive_order,
)


TOPICS = ("budget", "new school", "summer party", "bridge", "garden plan", "book fair", "bus line", "website")


def _draw_meeting(rng: random.Random) -> dict[str, Any]:
    host, guest = rng.sample(NAMES, 2)
    when = {"day": rng.choice(DAYS), "hour": rng.randint(8, 19), "room": rng.randint(101, 399)}
    return {"host": host, "guest": guest, **when, "topic": rng.choice(TOPICS)}


def _derive_meeting(rng: random.Random, slots: Slots) -> dict[str, Any]:
    return {"json": json.dumps({field: slots[field] for field in ("topic", "day", "hour", "room")})}


MEETING_TEXT = (
    "[{host} and {guest} meet on {day} at {hour}:00 in room {room} to talk about the {topic}."
    "|{host} invites {guest} to room {room}. The topic is the {topic}, and the time is {day}, {hour}:00."
    "|The {topic} is discussed in room {room} on {day} at {hour}:00. {host} and {guest} take part.]"
)
MEETING = Template(
    "meeting",
    _draw_meeting,
    (
        Opening(
            f"Extract the topic, day, hour and room as JSON from this [note|text]: {MEETING_TEXT}",
            "Here is the JSON:\n{json}\nThe people of the meeting are {host} and {guest}.",
        ),
        Opening(
            f"[Summarize|Sum up] this [note|text] as a list: {MEETING_TEXT}",
            "The note says:\n- People: {host} and {guest}\n- Topic: {topic}\n- Day: {day}\n- Time: "
            "{hour}:00\n- Room: "
            "{room}",
        ),
        Opening(
            f"Who takes part, and where is the meeting? {MEETING_TEXT}",
            "{host} and {guest} take part. The meeting is in room {room} on {day} at {hour}:00, and its "
            "topic is the "
            "{topic}.",
        ),
    ),
    (
        Exchange(
            "[Now give|Give] me the facts as CSV.",
            "Here is the CSV:\nhost,guest,topic,day,hour,room\n{host},{guest},{topic},{day},{hour},{room}",
        ),
        Exchange(
            "What is the topic, and when do they meet?",
            "The topic is the {topic}. {host} and {guest} meet on {day} at {hour}:00.",
        ),
        Exchange(
            "[Write|Draft] a reminder for {guest}.",
            "Dear {guest}, please remember our meeting about the {topic} on {day} at {hour}:00 in room "
            "{room}. "
            "See you there, {host}",
        ),
    ),
    _derive_meeting,
)

EXTRACTION = (PROFILE, ORDER, MEETING)
