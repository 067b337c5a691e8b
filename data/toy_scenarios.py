"""What the toy corpus talks about: per category of MT-Bench a scenario or two, written from slots."""

import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ctcdraft.data.generated import Drawn

# fmt: off
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor", "Wendy", "Adam", "Bella", "Carl",
)
THINGS = ("lamp", "key", "book", "map", "ring", "bell", "clock", "coin", "mirror", "violin", "kite", "candle")
PLACES = ("forest", "market", "library", "garden", "harbour", "station", "museum", "castle", "bakery", "old mill")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey")
EVENTS = ("meeting", "dinner", "piano lesson", "workshop", "picnic", "chess club", "concert")
REASONS = ("the room is not free", "the train is late", "the roof is leaking", "the weather will be bad")
FIELDS = ("garden", "room", "field", "carpet", "window", "wall", "court", "yard")

# comparative: superlative, its opposite
COMPARISONS = {
    "taller": ("tallest", "shortest"), "older": ("oldest", "youngest"), "faster": ("fastest", "slowest"),
    "stronger": ("strongest", "weakest"), "richer": ("richest", "poorest"),
}

# job: work, tool, advice
JOBS = {
    "baker": ("bake bread before the sun is up", "oven", "let the dough rest for an hour"),
    "gardener": ("plant seeds and cut the roses", "spade", "water the roots and not the leaves"),
    "teacher": ("help children to read and count", "blackboard", "repeat the hard words every day"),
    "doctor": ("listen to hearts and treat the sick", "stethoscope", "sleep well and drink enough water"),
    "pilot": ("fly people across the sea", "compass", "check the weather before you leave"),
    "farmer": ("feed the cows and harvest the wheat", "tractor", "start early and watch the sky"),
    "painter": ("mix colours and paint the hills", "brush", "begin with the light and end with the shadows"),
    "carpenter": ("build tables from oak and pine", "saw", "measure twice and cut once"),
    "sailor": ("steer the ship and mend the sails", "anchor", "respect the wind and tie good knots"),
    "tailor": ("sew coats and mend old shirts", "needle", "use strong thread and small stitches"),
}

# city: sight, dish
CITIES = {
    "Paris": ("the Eiffel Tower", "onion soup"), "Rome": ("the Colosseum", "fresh pasta"),
    "London": ("Tower Bridge", "fish and chips"), "Berlin": ("the Brandenburg Gate", "potato salad"),
    "Madrid": ("the Royal Palace", "warm churros"), "Vienna": ("the State Opera", "apple strudel"),
    "Athens": ("the Acropolis", "cheese pie"), "Lisbon": ("the Belem Tower", "custard tarts"),
    "Cairo": ("the pyramids", "bean stew"), "Oslo": ("the Opera House", "smoked salmon"),
}

# function of a number: what it does, as a clause and as an expression in X and K
FUNCTIONS = {
    "add": ("adds K to X", "X + K"),
    "scale": ("multiplies X by K", "X * K"),
    "subtract": ("takes K away from X", "X - K"),
    "rest": ("divides X by K and returns the rest", "X % K"),
    "divides": ("checks that X can be divided by K", "X % K == 0"),
    "above": ("checks that X is larger than K", "X > K"),
    "limit": ("returns the smaller one of X and K", "min(X, K)"),
    "distance": ("returns how far X is from K", "abs(X - K)"),
}

# topic: what it is, how it works, an example, why it matters
STEM = {
    "gravity": ("a force between masses", "more mass pulls more strongly", "an apple that falls from a tree",
                "it keeps the planets on their way around the sun"),
    "photosynthesis": ("the way in which plants make sugar", "leaves turn light, water and air into food",
                       "grass that grows in the sun", "it makes the oxygen that we breathe"),
    "evaporation": ("the change of a liquid into a gas", "fast molecules leave the surface", "a puddle that dries up",
                    "it brings water from the sea into the clouds"),
    "electricity": ("a flow of charge", "a battery pushes electrons through a wire", "a lamp that you switch on",
                    "it drives our lights, trains and computers"),
    "evolution": ("the slow change of living things", "those that fit their world best have more children",
                  "birds whose beaks fit their food", "it explains why there are so many kinds of animals"),
    "an algorithm": ("a list of clear steps", "each step takes the result of the step before", "a recipe for a cake",
                     "every computer program is made of it"),
}
HUMANITIES = {
    "democracy": ("a form of rule by the people", "citizens vote, and the winners govern for a limited time",
                  "the election of a parliament", "it allows a change of power without war"),
    "inflation": ("a general rise of prices", "too much money meets too few goods", "bread that costs more each year",
                  "it makes savings worth less"),
    "the Renaissance": ("a time of new art in Europe", "artists studied the old books of Greece and Rome",
                        "the paintings of Leonardo", "it opened the way to modern science"),
    "the printing press": ("a machine that copies pages", "movable letters are pressed on paper",
                           "the Bible of Gutenberg", "it made books cheap and spread ideas"),
    "a constitution": ("the highest law of a state", "it divides the power and lists the rights of the people",
                       "the one of the United States", "even the government has to obey it"),
    "a myth": ("an old story about gods and heroes", "people told it again and again to explain the world",
               "the tale of Icarus", "it shows what people feared and hoped"),
}
# fmt: on


@dataclass(frozen=True)
class Talk:
    """What is asked and answered. Every opening mentions every slot; a follow-up may come after any opening."""

    openings: dict[str, str]
    follow_ups: dict[str, str]


@dataclass(frozen=True)
class Scenario:
    """A kind of conversation: the slots to draw, each from its pool, and the text that is written from them."""

    category: str
    name: str
    pools: Mapping[str, Collection[Any]]
    write: Callable[..., Talk]

    def draw(self, rng: random.Random) -> Drawn:
        """One opening and every follow-up, these in a random order: each refers to the slots alone."""
        slots = {slot: rng.choice(list(pool)) for slot, pool in self.pools.items()}
        talk = self.write(**slots)
        follow_ups = list(talk.follow_ups.items())
        rng.shuffle(follow_ups)
        exchanges = [rng.choice(list(talk.openings.items())), *follow_ups]
        return Drawn([ask for ask, _ in exchanges], [answer for _, answer in exchanges], f"{self.name} {slots}")


SCENARIOS: list[Scenario] = []


def scenario(category: str, **pools: Collection[Any]) -> Callable[[Callable[..., Talk]], Callable[..., Talk]]:
    """Register the decorated function as what a scenario writes from these slots."""

    def register(write: Callable[..., Talk]) -> Callable[..., Talk]:
        SCENARIOS.append(Scenario(category, f"{category} {write.__name__}", pools, write))
        return write

    return register


@scenario("writing", name=NAMES[:12], friend=NAMES[12:], job=JOBS, thing=THINGS, place=PLACES)
def story(name: str, friend: str, job: str, thing: str, place: str) -> Talk:
    return Talk(
        openings={
            f"Write a short story about {name}, a {job} who finds a {thing} in the {place} with {friend}.": (
                f"{name} was a {job} who loved quiet mornings. One day, while walking through the {place} with "
                f"{friend}, {name} saw a small {thing} under a bench. They asked every neighbour until an old "
                f"woman said that it was hers. From that day on, {name} and {friend} visited her every Sunday."
            ),
            f"Tell me a story about {name} the {job}, {friend} and a lost {thing} in the {place}.": (
                f"Long ago there lived a {job} called {name}. Every evening {name} walked to the {place} with "
                f"{friend}. One night {friend} saw a light, and under it lay a golden {thing}. They could not "
                f"agree who should keep the {thing}, so they gave it to the school, and the children were happy."
            ),
        },
        follow_ups={
            "Shorten the story to one sentence.": (
                f"{name}, a {job}, found a {thing} in the {place} with {friend}, and they gave it away."
            ),
            "Give the story a title.": (
                f'A good title is "The {thing} in the {place}". It names the object and the place, and it makes '
                f"the reader wonder what {name} and {friend} do with it."
            ),
        },
    )


@scenario("writing", name=NAMES[:12], friend=NAMES[12:], event=EVENTS, day=DAYS[:4], new_day=DAYS[4:], reason=REASONS)
def email(name: str, friend: str, event: str, day: str, new_day: str, reason: str) -> Talk:
    return Talk(
        openings={
            f"Write an email: {name} moves the {event} with {friend} from {day} to {new_day}, because {reason}.": (
                f"Subject: The {event} on {new_day}\n\nDear {friend},\n\nI am sorry, but I cannot come to the "
                f"{event} on {day}, because {reason}. Would {new_day} be possible for you instead? Please let me "
                f"know if that works.\n\nKind regards,\n{name}"
            ),
            f"How does {name} tell {friend} that {reason} and the {event} on {day} is moved to {new_day}?": (
                f"Hi {friend}, I hope that you are well. The {event} cannot take place on {day}, because "
                f"{reason}. Let us meet on {new_day} at the same time. I am sorry for the trouble, and I will "
                f"bring cake for everyone. See you soon, {name}"
            ),
        },
        follow_ups={
            "Can you make it shorter?": (
                f"Dear {friend}, the {event} moves from {day} to {new_day}, because {reason}. I hope that this "
                f"works for you. {name}"
            ),
            "List the main facts of the message.": (
                f"The main facts are:\n- From: {name}\n- To: {friend}\n- Event: {event}\n- Old day: {day}\n- New "
                f"day: {new_day}\n- Reason: {reason}"
            ),
        },
    )


@scenario("roleplay", name=NAMES, job=JOBS, city=CITIES)
def worker(name: str, job: str, city: str) -> Talk:
    work, tool, advice = JOBS[job]
    sight, dish = CITIES[city]
    return Talk(
        openings={
            f"Pretend that you are a {job} in {city}. {name} asks you about your day.": (
                f"Good morning, {name}! I am a {job} here in {city}, and I {work}. My {tool} is always at my "
                f"side, and I could not work without it. After work I walk past {sight} and eat {dish}. It is a "
                "hard job, but I would not change it for any other."
            ),
            f"You are {name}, a {job} from {city}. Introduce yourself.": (
                f"My name is {name}, and I am a {job} from {city}. I {work}, and I have done so for twenty years. "
                f"If you visit me, I will show you my {tool} and tell you my secret: {advice}. On my free days I "
                f"sit near {sight} with a plate of {dish}."
            ),
        },
        follow_ups={
            "What would you tell a beginner who wants your job?": (
                f"I would say this: {advice}. Start small, ask many questions and do not give up. One day you "
                f"will be a fine {job} too."
            ),
            "What should I see and eat in your city?": (
                f"In {city} you should see {sight} first. Then sit down and try {dish}, which we all love."
            ),
        },
    )


@scenario("reasoning", first=NAMES[:8], second=NAMES[8:16], third=NAMES[16:], more=COMPARISONS)
def order(first: str, second: str, third: str, more: str) -> Talk:
    most, least = COMPARISONS[more]
    return Talk(
        openings={
            f"{first} is {more} than {second}. {second} is {more} than {third}. Who is the {most}?": (
                f"{first} is the {most}. We know that {first} is {more} than {second}, and that {second} is "
                f"{more} than {third}. The order is {first}, {second}, {third}."
            ),
            f"{second} is {more} than {third}, but {first} is {more} than {second}. Who is the {least}?": (
                f"The {least} is {third}. Both {first} and {second} are {more} than {third}: the text says it of "
                f"{second}, and {first} is even {more}. From the {most} to the {least} the order is {first}, "
                f"{second}, {third}."
            ),
        },
        follow_ups={
            "Who is in the middle?": (
                f"{second} is in the middle. {first} is {more} than {second}, and {second} is {more} than {third}."
            ),
            f"List them from the {least} to the {most}.": (
                f"From the {least} to the {most}:\n1. {third}\n2. {second}\n3. {first}"
            ),
        },
    )


@scenario("math", name=NAMES, thing=THINGS, count=range(2, 10), price=range(2, 12), paid=(100, 120, 150))
def shopping(name: str, thing: str, count: int, price: int, paid: int) -> Talk:
    total = count * price
    return Talk(
        openings={
            f"{name} buys {count} {thing}s for {price} dollars each and pays with {paid}. What is the change?": (
                f"The change is {paid - total} dollars. First we find the total: {count} x {price} = {total} "
                f"dollars. Then we subtract it from the money: {paid} - {total} = {paid - total}. So {name} gets "
                f"{paid - total} dollars back."
            ),
            f"One {thing} costs {price} dollars. {name} has {paid} dollars and buys {count} of them. What is left?": (
                f"Step 1: {count} {thing}s cost {count} x {price} = {total} dollars.\nStep 2: {name} had {paid} "
                f"dollars, so {paid} - {total} = {paid - total} dollars are left.\nAnswer: {paid - total} dollars."
            ),
        },
        follow_ups={
            f"And how much would {count + 1} {thing}s cost?": (
                f"One {thing} costs {price} dollars, so {count + 1} {thing}s would cost {count + 1} x {price} = "
                f"{total + price} dollars."
            ),
            f"What if each {thing} cost twice as much?": (
                f"Then one {thing} would cost {2 * price} dollars, and {count} {thing}s would cost {count} x "
                f"{2 * price} = {2 * total} dollars."
            ),
        },
    )


@scenario("math", name=NAMES, field=FIELDS, width=range(10, 21), height=range(2, 10))
def rectangle(name: str, field: str, width: int, height: int) -> Talk:
    area, half = width * height, width + height
    return Talk(
        openings={
            f"The {field} of {name} is {width} metres long and {height} metres wide. What is its area?": (
                f"The area is {area} square metres. The {field} of {name} is a rectangle, so we multiply its "
                f"length by its width: {width} x {height} = {area}."
            ),
            f"{name} has a {field} of {width} by {height} metres. Find the area step by step.": (
                f"Step 1: The {field} is a rectangle with the sides {width} and {height}.\nStep 2: The area is "
                f"length times width, so {width} x {height} = {area}.\nAnswer: The {field} of {name} has an area "
                f"of {area} square metres."
            ),
        },
        follow_ups={
            "And what is the perimeter?": (
                f"The perimeter is {2 * half} metres. We add the two sides, {width} + {height} = {half}, and "
                f"double the result: 2 x {half} = {2 * half}."
            ),
            "What is the area when the length is doubled?": (
                f"When the length is doubled, it is {2 * width} metres. The new area is {2 * width} x {height} = "
                f"{2 * area} square metres, which is twice the old area."
            ),
        },
    )


@scenario("coding", function=FUNCTIONS, argument=("n", "x", "number"), constant=range(2, 31), value=range(2, 31))
def function_of_a_number(function: str, argument: str, constant: int, value: int) -> Talk:
    does, expression = (text.replace("X", argument).replace("K", str(constant)) for text in FUNCTIONS[function])
    code = f"```python\ndef {function}({argument}):\n    return {expression}\n```"
    result, following = (eval(expression, {argument: number}) for number in (value, value + 1))
    return Talk(
        openings={
            f"What does {function}({value}) return?\n{code}": (
                f"The call {function}({value}) returns {result}. The function {does}, and here {argument} is {value}."
            ),
            f"Write {function}({argument}) in Python, so that it {does}, and call it with {value}.": (
                f"Here is the code:\n{code}\nThe call {function}({value}) returns {result}, because it {does}."
            ),
        },
        follow_ups={
            f"And what does {function}({value + 1}) return?": (
                f"The call {function}({value + 1}) returns {following}. Again the function {does}, and now "
                f"{argument} is {value + 1}."
            ),
            "Explain the code in one sentence.": f"The function {function} takes {argument} and {does}.",
        },
    )


@scenario("extraction", name=NAMES, count=range(2, 20), colour=COLOURS, thing=THINGS, city=CITIES, day=DAYS)
def purchase(name: str, count: int, colour: str, thing: str, city: str, day: str) -> Talk:
    text = f"{name} orders {count} {colour} {thing}s. Please deliver them to {city} on {day}."
    fields = {"customer": name, "item": thing, "colour": colour, "count": count, "city": city, "day": day}
    return Talk(
        openings={
            f"Extract the order as JSON: {text}": (
                f"Here is the order as JSON:\n{json.dumps(fields)}\nThe item is written without the plural ending."
            ),
            f"Make a list of the facts in this order: {text}": (
                f"The order says:\n- Customer: {name}\n- Item: {thing}\n- Colour: {colour}\n- Count: {count}\n- "
                f"City: {city}\n- Day: {day}"
            ),
        },
        follow_ups={
            "Give it to me as CSV, please.": (
                f"Here is the order as CSV:\n{','.join(fields)}\n{','.join(map(str, fields.values()))}"
            ),
            "Where and when do they arrive?": (
                f"They arrive in {city} on {day}. The customer there is {name}, who gets {count} {thing}s."
            ),
        },
    )


@scenario("stem", topic=STEM, name=NAMES, age=range(9, 20))
@scenario("humanities", topic=HUMANITIES, name=NAMES, age=range(9, 20))
def explanation(topic: str, name: str, age: int) -> Talk:
    what, how, example, why = (STEM | HUMANITIES)[topic]
    return Talk(
        openings={
            f"Explain {topic} to {name}, who is {age} years old.": (
                f"Hello, {name}! We call it {topic}, and it is {what}. It works like this: {how}. One example is "
                f"{example}. It is important, because {why}. With {age} years you can understand it well."
            ),
            f"{name} is {age} and has to give a talk about {topic}. List the main points.": (
                f"Here are the main points for {name}:\n1. We talk about {topic}, which is {what}.\n2. It works "
                f"like this: {how}.\n3. One example is {example}.\n4. It matters, because {why}."
            ),
        },
        follow_ups={
            "Shorten your answer to one sentence.": f"In short, {topic} is {what}, and it is important, because {why}.",
            "Can you give me an example?": (
                f"A good example of {topic} is {example}. There you can see what it means: {how}."
            ),
        },
    )
