"""Math: shopping, rectangles, journeys, averages and plain sums, each with its steps."""

import random
from typing import Any

from ctcdraft.data.corpus.template import Exchange, Opening, Slots, Template
from ctcdraft.data.corpus.words import CITIES, NAMES, THINGS


def _draw_shopping(rng: random.Random) -> dict[str, Any]:
    count, price = rng.randint(2, 9), rng.randint(2, 12)
    paid = rng.choice([bill for bill in (20, 50, 100, 120) if bill > count * price])
    scene = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS)}
    return {**scene, "count": count, "price": price, "paid": paid}


def _derive_shopping(rng: random.Random, slots: Slots) -> dict[str, Any]:
    total, more = slots["count"] * slots["price"], slots["count"] + 1
    sums = {
        "total": total,
        "change": slots["paid"] - total,
        "more": more,
        "more_total": more * slots["price"],
    }
    return {**sums, "half": slots["price"] * 2, "double_total": total * 2}


SHOPPING = Template(
    "shopping",
    _draw_shopping,
    (
        Opening(
            "{name} buys {count} {thing!p} for {price} dollars each and pays with {paid} dollars. How "
            "much change does "
            "{name} get?",
            "{name} gets {change} dollars back. First we find the total: {count} x {price} = {total} "
            "dollars. Then we "
            "subtract it from the money: {paid} - {total} = {change}. So the change is {change} dollars.",
        ),
        Opening(
            "One {thing} costs {price} dollars. {name} has {paid} dollars and buys {count} {thing!p}. What is left?",
            "Step 1: {count} {thing!p} cost {count} x {price} = {total} dollars.\nStep 2: {name} had "
            "{paid} dollars, "
            "so {paid} - {total} = {change} dollars are left.\nAnswer: {change} dollars.",
        ),
    ),
    (
        Exchange(
            "And how much would {more} {thing!p} cost?",
            "One {thing} costs {price} dollars, so {more} {thing!p} would cost {more} x {price} = "
            "{more_total} dollars.",
        ),
        Exchange(
            "What if each {thing} cost twice as much?",
            "Then one {thing} would cost {half} dollars, and {count} {thing!p} would cost {count} x {half} = "
            "{double_total} dollars.",
        ),
        Exchange(
            "[Explain|Can you explain] the first step again?",
            "In the first step we multiply. There are {count} {thing!p}, and each of them costs {price} "
            "dollars, so the "
            "total is {count} x {price} = {total} dollars.",
        ),
    ),
    _derive_shopping,
)


def _draw_rectangle(rng: random.Random) -> dict[str, Any]:
    height = rng.randint(2, 9)
    place = rng.choice(("garden", "room", "field", "carpet", "window", "wall", "court", "yard"))
    return {"name": rng.choice(NAMES), "place": place, "width": rng.randint(height + 1, 20), "height": height}


def _derive_rectangle(rng: random.Random, slots: Slots) -> dict[str, Any]:
    width, height = slots["width"], slots["height"]
    sums = {"area": width * height, "sum": width + height, "edge": 2 * (width + height)}
    return {**sums, "wide": 2 * width, "wide_area": 2 * width * height}


RECTANGLE = Template(
    "rectangle",
    _draw_rectangle,
    (
        Opening(
            "The {place} of {name} is {width} metres long and {height} metres wide. What is its area?",
            "The area is {area} square metres. The {place} of {name} is a rectangle, so we multiply its "
            "length by its "
            "width: {width} x {height} = {area}.",
        ),
        Opening(
            "{name} has a {place} of {width} by {height} metres. Find the area [step by step|and explain].",
            "Step 1: The {place} is a rectangle with the sides {width} and {height}.\nStep 2: The area is "
            "length times "
            "width, so {width} x {height} = {area}.\nAnswer: The {place} of {name} has an area of {area} "
            "square metres.",
        ),
    ),
    (
        Exchange(
            "[And what|What] is the perimeter?",
            "The perimeter is {edge} metres. We add the two sides, {width} + {height} = {sum}, and double "
            "the result: "
            "2 x {sum} = {edge}.",
        ),
        Exchange(
            "What is the area when the length is doubled?",
            "When the length is doubled, it is {wide} metres. The new area is {wide} x {height} = "
            "{wide_area} square "
            "metres, which is twice the old area.",
        ),
        Exchange(
            "Why do you multiply?",
            "We multiply because the {place} holds {height} rows of {width} squares, and each square is "
            "one metre wide. "
            "That makes {width} x {height} = {area} squares.",
        ),
    ),
    _derive_rectangle,
)


def _draw_journey(rng: random.Random) -> dict[str, Any]:
    vehicle = rng.choice(("train", "bus", "car", "boat", "truck"))
    speed, city = rng.choice((20, 30, 40, 50, 60, 70, 80, 90)), rng.choice(list(CITIES))
    return {
        "name": rng.choice(NAMES),
        "vehicle": vehicle,
        "speed": speed,
        "hours": rng.randint(2, 9),
        "city": city,
    }


def _derive_journey(rng: random.Random, slots: Slots) -> dict[str, Any]:
    more = slots["hours"] + 1
    distance = slots["speed"] * slots["hours"]
    return {"distance": distance, "more": more, "more_distance": more * slots["speed"], "back": 2 * distance}


JOURNEY = Template(
    "journey",
    _draw_journey,
    (
        Opening(
            "{name} travels to {city} by {vehicle} for {hours} hours at {speed} km per hour. How far is it?",
            "It is {distance} km. The distance is speed times time. The {vehicle} drives {speed} km in "
            "one hour, so in "
            "{hours} hours {name} travels {speed} x {hours} = {distance} km.",
        ),
        Opening(
            "A {vehicle} with {name} on board needs {hours} hours to {city}. Its speed is {speed} km per "
            "hour. Compute "
            "the distance.",
            "We use the rule: distance = speed x time.\nThe speed is {speed} km per hour and the time is "
            "{hours} "
            "hours.\n{speed} x {hours} = {distance}\nSo the way of {name} to {city} is {distance} km long.",
        ),
    ),
    (
        Exchange(
            "How far would it be in {more} hours?",
            "In {more} hours the {vehicle} would travel {speed} x {more} = {more_distance} km, because "
            "its speed stays "
            "the same.",
        ),
        Exchange(
            "How far is it there and back?",
            "There and back the way is twice as long: 2 x {distance} = {back} km. The way back from "
            "{city} is also "
            "{distance} km.",
        ),
        Exchange(
            "[Explain the rule.|Which rule did you use?]",
            "The rule is distance = speed x time. The speed says how many km the {vehicle} travels in one "
            "hour, and we "
            "take it {hours} times, which gives {distance} km.",
        ),
    ),
    _derive_journey,
)


def _draw_average(rng: random.Random) -> dict[str, Any]:
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    third = rng.choice([number for number in range(1, 21) if (first + second + number) % 3 == 0])
    return {"name": rng.choice(NAMES), "first": first, "second": second, "third": third}


def _derive_average(rng: random.Random, slots: Slots) -> dict[str, Any]:
    numbers = (slots["first"], slots["second"], slots["third"])
    spread = {"low": min(numbers), "high": max(numbers), "range": max(numbers) - min(numbers)}
    order = ", ".join(map(str, sorted(numbers)))
    return {
        "sum": sum(numbers),
        "mean": sum(numbers) // 3,
        **spread,
        "order": order,
        "median": sorted(numbers)[1],
    }


AVERAGE = Template(
    "average",
    _draw_average,
    (
        Opening(
            "{name} scored {first}, {second} and {third} points. What is the average?",
            "The average is {mean} points. We add the three results of {name}: {first} + {second} + "
            "{third} = {sum}. "
            "Then we divide the sum by 3, and {sum} / 3 = {mean}.",
        ),
        Opening(
            "Find the mean of the numbers {first}, {second} and {third} for {name}.",
            "Here is how it works, {name}:\n1. Add the numbers: {first} + {second} + {third} = {sum}\n2. "
            "Divide by the "
            "count: {sum} / 3 = {mean}\nSo the mean is {mean}.",
        ),
    ),
    (
        Exchange(
            "What is the median?",
            "The median is {median}. In order the numbers are {order}, and the one in the middle is {median}.",
        ),
        Exchange(
            "What is the difference between the largest and the smallest number?",
            "The largest number is {high} and the smallest is {low}, so the difference is {high} - {low} = {range}.",
        ),
        Exchange(
            "[Sort the numbers.|Put the numbers in order.]",
            "In order the numbers are {order}. The smallest is {low}, and the largest is {high}.",
        ),
    ),
    _derive_average,
)

MATH = (SHOPPING, RECTANGLE, JOURNEY, AVERAGE)
