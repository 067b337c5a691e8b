"""Writing: stories, emails, reviews, rewritten sentences."""

import random
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import DAYS, JOBS, NAMES, PLACES, THINGS


def _two_names(rng: random.Random) -> dict[str, Any]:
    name, friend = rng.sample(NAMES, 2)
    return {"name": name, "friend": friend}


def _draw_story(rng: random.Random) -> dict[str, Any]:
    scene = {"job": rng.choice(list(JOBS)), "thing": rng.choice(THINGS), "place": rng.choice(PLACES)}
    return {**_two_names(rng), **scene}


STORY = Template(
    "story",
    _draw_story,
    (
        Opening(
            "Write a [short|little|brief] story about {name}, {job!a} who finds {thing!a} in the {place} "
            "with {friend}.",
            "{name} was {job!a} who loved quiet mornings. One day, while walking through the {place} with "
            "{friend}, {name} saw [an old|a small|a golden] {thing} lying [in the grass|under a bench|by the "
            "wall]. {name} picked it up and wondered who had lost it. They asked every neighbour until an "
            "old "
            "woman smiled and said that it was hers. From that day on, {name} and {friend} visited her every "
            "Sunday.",
            "returned it to the old woman who had lost it",
        ),
        Opening(
            "Tell me a story about {name} the {job}, {friend} and a lost {thing} in the {place}.",
            "Long ago there lived {job!a} called {name}. Every evening {name} walked to the {place} with "
            "{friend}. One night {friend} saw a light, and under it lay [a shiny|a broken|a strange] "
            "{thing}. "
            "They could not agree who should keep the {thing}, so they gave it to the school. The children "
            "were [delighted|happy], and {name} and {friend} laughed all the way home.",
            "gave it to the children of the school",
        ),
        Opening(
            "I need a very short story. Hero: {name} the {job}. Friend: {friend}. Object: {thing}. Setting: "
            "the {place}.",
            "It was [raining|snowing|late] when {name} the {job} came to the {place}. {friend} was already "
            'waiting there with {thing!a}. "Where did you get that {thing}?" asked {name}. "It was a gift," '
            'said {friend}, "but I think that you need it more." {name} took the {thing} home, and it stayed '
            "on the kitchen table for many years.",
            "learned that a gift is best when it is shared",
        ),
    ),
    (
        Exchange(
            "[Now shorten|Please shorten|Shorten] the story to one sentence.",
            "{name}, {job!a}, found {thing!a} in the {place} together with {friend}, and in the end they {gist}.",
        ),
        Exchange(
            "[List|Please list|Can you list] the people, the place and the object of the story[.|, one per line.]",
            "Here is the list:\n- Hero: {name}, the {job}\n- Friend: {friend}\n- Place: the {place}\n- "
            "Object: "
            "the {thing}\n- Ending: they {gist}",
        ),
        Exchange(
            "Give the story a title and [explain it|say why you chose it].",
            'A good title is "The {thing!c} in the {place!c}". It names the object and the place, and it '
            "makes "
            "the reader wonder how {name} and {friend} {gist}.",
        ),
        Exchange(
            "[Change|Rewrite] the ending so that it is [sad|a surprise].",
            "In the new ending, {name} looks for the {thing} once more, but it is gone. {friend} has "
            "taken it "
            "to the {place} and left only a note. {name} reads the note, sits down and is silent for a long "
            "time.",
        ),
    ),
)


EVENTS = ("meeting", "dinner", "piano lesson", "workshop", "picnic", "chess club", "interview", "concert")
REASONS = (
    "the room is not free",
    "the train is late",
    "the roof is leaking",
    "the office is closed",
    "the weather will be bad",
)


def _draw_email(rng: random.Random) -> dict[str, Any]:
    day, new_day = rng.sample(DAYS, 2)
    event = {"event": rng.choice(EVENTS), "reason": rng.choice(REASONS)}
    return {**_two_names(rng), "day": day, "new_day": new_day, **event}


EMAIL = Template(
    "email",
    _draw_email,
    (
        Opening(
            "Write a polite email from {name} to {friend} that moves the {event} from {day} to {new_day} "
            "because {reason}.",
            "Subject: {event!c} on {new_day}\n\nDear {friend},\n\nI am sorry, but I cannot come to the "
            "{event} on "
            "{day}, because {reason}. Would {new_day} be possible for you instead? Please let me know if "
            "that works. I am looking forward to it.\n\nKind regards,\n{name}",
        ),
        Opening(
            "{name} has to tell {friend} that the {event} on {day} is moved to {new_day}, because {reason}. "
            "Write a [short|friendly] message.",
            "Hi {friend}, I hope that you are well. The {event} cannot take place on {day}, because "
            "{reason}. "
            "Let us meet on {new_day} at the same time. I am sorry for the [trouble|late notice], and I will "
            "bring cake for everyone. See you soon, {name}",
        ),
    ),
    (
        Exchange(
            "[Make it shorter.|Shorten the message, please.|Can you make it shorter?]",
            "Dear {friend}, the {event} moves from {day} to {new_day}, because {reason}. I hope that this "
            "works "
            "for you. {name}",
        ),
        Exchange(
            "[Now write|Write] the answer of {friend}.",
            "Dear {name}, thank you for your message. {new_day} is fine for me, so I will see you at the "
            "{event} then. I am sorry to hear that {reason}. Best wishes, {friend}",
        ),
        Exchange(
            "[List|Give me] the main facts of the message as a list.",
            "The main facts are:\n- From: {name}\n- To: {friend}\n- Event: {event}\n- Old day: {day}\n- New "
            "day: {new_day}\n- Reason: {reason}",
        ),
    ),
)


PRODUCTS = {
    "backpack": ("light and strong", "the zip is stiff"),
    "kettle": ("quick and quiet", "the handle gets hot"),
    "bicycle": ("fast and safe", "the seat is hard"),
    "camera": ("small and sharp", "the battery is weak"),
    "radio": ("clear and simple", "the antenna is short"),
    "tent": ("dry and roomy", "it takes long to build"),
    "chair": ("soft and solid", "it is heavy to carry"),
    "jacket": ("warm and elegant", "the pockets are small"),
}


def _draw_review(rng: random.Random) -> dict[str, Any]:
    return {"name": rng.choice(NAMES), "product": rng.choice(list(PRODUCTS)), "price": rng.randint(12, 98)}


def _derive_review(rng: random.Random, slots: Slots) -> dict[str, Any]:
    good, bad = PRODUCTS[slots["product"]]
    return {"good": good, "bad": bad}


REVIEW = Template(
    "review",
    _draw_review,
    (
        Opening(
            "Write a [short|fair] review of a {product} that {name} bought for {price} dollars.",
            "{name} bought this {product} for {price} dollars and has used it every day for [a month|three "
            "weeks|half a year]. It is {good}, and it looks just like the picture. The only weak point is "
            "that {bad}. For {price} dollars it is still a good choice, and {name} would buy the "
            "{product} again.",
        ),
        Opening(
            "{name} paid {price} dollars for a {product}. [What could the review say?|Write the review.]",
            "My new {product} cost {price} dollars, and I am happy with it. I like that it is {good}. "
            "However, "
            "{bad}, and that is a pity. All in all I give the {product} [four|three] of five stars. "
            "Signed, {name}.",
        ),
    ),
    (
        Exchange(
            "[Turn|Change] the review into a list of good and bad points.",
            "Good points:\n- the {product} is {good}\n- the price of {price} dollars is fair\nBad points:\n- {bad}",
        ),
        Exchange(
            "[Shorten it|Now shorten it|Please shorten it] to one sentence.",
            "The {product} of {name} is {good}, and for {price} dollars it is a good choice, although {bad}.",
        ),
        Exchange(
            "[Write|Add] an answer from the shop.",
            "Dear {name}, thank you for your review of the {product}. We are glad that it is {good}. We are "
            "sorry that {bad}, and we will send you a new one for free.",
        ),
    ),
    _derive_review,
)


VERBS = {
    "walks to": ("walked to", "walk to"),
    "runs to": ("ran to", "run to"),
    "drives to": ("drove to", "drive to"),
    "returns to": ("returned to", "return to"),
}
DEEDS = {
    "buys": ("bought", "buy"),
    "finds": ("found", "find"),
    "draws": ("drew", "draw"),
    "sells": ("sold", "sell"),
    "hides": ("hid", "hide"),
}


def _draw_rewrite(rng: random.Random) -> dict[str, Any]:
    action = {"verb": rng.choice(list(VERBS)), "deed": rng.choice(list(DEEDS))}
    scene = {"place": rng.choice(PLACES), "thing": rng.choice(THINGS), "friend": rng.choice(NAMES[12:])}
    return {"name": rng.choice(NAMES[:12]), **action, **scene}


def _derive_rewrite(rng: random.Random, slots: Slots) -> dict[str, Any]:
    verb_past, verb_base = VERBS[slots["verb"]]
    deed_past, deed_base = DEEDS[slots["deed"]]
    return {"verb_past": verb_past, "verb_base": verb_base, "deed_past": deed_past, "deed_base": deed_base}


REWRITE = Template(
    "rewrite",
    _draw_rewrite,
    (
        Opening(
            "[Rewrite|Put] this [sentence|text] in the past tense: {name} {verb} the {place} and {deed} "
            "{thing!a} for "
            "{friend}.",
            'In the past tense the sentence is: "{name} {verb_past} the {place} and {deed_past} {thing!a} '
            "for "
            '{friend}." The verbs that change are "{verb}", which becomes "{verb_past}", and "{deed}", which '
            'becomes "{deed_past}".',
        ),
        Opening(
            "[Rewrite|Put] this [sentence|text] in the future tense: {name} {verb} the {place} and {deed} "
            "{thing!a} for "
            "{friend}.",
            'In the future tense the sentence is: "{name} will {verb_base} the {place} and {deed_base} '
            '{thing!a} for {friend}." The verbs that change are "{verb}", which becomes "will '
            '{verb_base}", and '
            '"{deed}", which becomes "{deed_base}".',
        ),
    ),
    (
        Exchange(
            "[Now make|Make] it a question.",
            'As a question it is: "Will {name} {verb_base} the {place} and {deed_base} {thing!a} for '
            '{friend}?" '
            "The helping verb moves to the front of the sentence.",
        ),
        Exchange(
            "[Now make|Make] it negative.",
            'The negative sentence is: "{name} does not {verb_base} the {place} and does not {deed_base} '
            '{thing!a} for {friend}." Each verb gets "does not" before it.',
        ),
        Exchange(
            "[List|Name] the nouns of the sentence.",
            "The nouns of the sentence are:\n- {name}, a person\n- {place}, a place\n- {thing}, an object\n- "
            "{friend}, a person",
        ),
    ),
    _derive_rewrite,
)


WRITING = (STORY, EMAIL, REVIEW, REWRITE)
