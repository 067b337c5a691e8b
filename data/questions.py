"""Questions that a user might put to a chat LLM, drawn from templates and word lists: no answers, those are the base's.

Eight categories, as MT-Bench has them, one to three user turns. A slot `{name}` of a template draws from WORDS; the
same slot has one value throughout a conversation, `{name2}` another one of the same list. It needs no network and is
the same everywhere for a seed. What was drawn decides the split, so no held-out question is ever trained on.
"""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

HELD_OUT = 0.1
QUESTIONS_PER_CATEGORY = 10
FIRST_QUESTION_ID = 81  # MT-Bench counts from here
TURNS = (1, 1, 2, 2, 2, 3)  # how many a conversation has, drawn evenly from these
PATIENCE = 1000  # draws without a new question after which a category counts as exhausted
SLOT = re.compile(r"\{([a-z_]+)(\d?)\}")


def _table(rng: random.Random) -> str:
    """A small table as a user pastes it: with bars, with commas, or as sentences."""
    what, first, second = rng.choice(
        [("city", "visitors", "hotels"), ("product", "price", "stock"), ("student", "maths", "history"),
         ("team", "wins", "losses"), ("month", "rain in mm", "sunny days"), ("branch", "staff", "sales")]
    )  # fmt: skip
    names = rng.sample(ROWS[what], 4)
    rows = [(name, rng.randint(3, 95), rng.randint(2, 60)) for name in names]
    form = rng.choice(["bars", "commas", "prose"])
    if form == "prose":
        return " ".join(f"{name} has {a} for {first} and {b} for {second}." for name, a, b in rows)
    line = "| {} | {} | {} |" if form == "bars" else "{},{},{}"
    return "\n".join(line.format(*row) for row in [(what, first, second), *rows])


def _series(rng: random.Random) -> str:
    start, step, factor = rng.randint(1, 12), rng.randint(2, 9), rng.choice([1, 1, 2, 3])
    found = [start]
    while len(found) < 5:
        found.append(found[-1] * factor + step)
    return ", ".join(map(str, found))


def _numbers(rng: random.Random) -> str:
    return ", ".join(str(rng.randint(1, 60)) for _ in range(rng.randint(5, 8)))


def _ordering(rng: random.Random) -> str:
    """Enough comparisons to put four people in order, shuffled."""
    more, names = rng.choice(["taller", "older", "faster", "richer"]), rng.sample(ROWS["student"], 4)
    clues = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(names)]
    return " ".join(rng.sample(clues, len(clues)))


ROWS = {
    "city": ["Porto", "Graz", "Cork", "Bergen", "Lublin", "Nantes", "Turku", "Izmir"],
    "product": ["desk lamp", "kettle", "rucksack", "headphones", "garden hose", "yoga mat", "toaster"],
    "student": ["Amira", "Jonas", "Wei", "Carla", "Tomasz", "Ngozi", "Elif"],
    "team": ["Harbour United", "North Lions", "Red Kites", "River Rovers", "Mill Town", "Old Oaks"],
    "month": ["January", "March", "May", "June", "August", "October", "December"],
    "branch": ["Market Street", "Airport", "Old Town", "Riverside", "Station Road", "West Park"],
}

WORDS: dict[str, list[str] | range | Callable[[random.Random], str]] = {
    "person": ["Amira", "Jonas", "Wei", "Carla", "Tomasz", "Ngozi", "Elif", "Ravi", "Sofia", "Kenji", "Mara", "Pedro",
               "Hannah", "Omar", "Lucia", "Dmitri", "Aisha", "Bruno", "Ingrid", "Malik"],
    "job": ["nurse", "baker", "civil engineer", "high school teacher", "bus driver", "librarian", "farmer", "tailor",
            "software tester", "museum guide", "carpenter", "vet", "journalist", "chef", "lighthouse keeper", "pilot",
            "translator", "beekeeper", "social worker", "violin maker", "firefighter", "postman"],
    "place": ["a harbour town", "a mountain hut", "a night train", "an old library", "a space station", "a market hall",
              "a desert camp", "a small island", "a greenhouse", "a flooded valley", "a theatre cellar", "a hospital",
              "a fishing boat", "an abandoned factory", "a school yard", "a crowded airport"],
    "thing": ["a broken compass", "a letter without a name", "a red umbrella", "a borrowed bicycle", "a silver key",
              "a music box", "an unfinished map", "a lost dog", "a jar of honey", "an old camera", "a winter coat",
              "a chess piece", "a paper boat", "a clock that runs backwards", "a locked suitcase"],
    "theme": ["forgiveness", "moving house", "the first snow", "growing old", "learning to swim", "homesickness",
              "a promise kept too late", "friendship between rivals", "fear of the dark", "the end of summer",
              "telling the truth", "a second chance", "silence", "waiting", "a family recipe"],
    "kind": ["short story", "poem", "diary entry", "monologue", "fairy tale", "newspaper article", "song lyric",
             "dialogue", "speech", "radio play scene", "fable", "postcard"],
    "mood": ["hopeful", "melancholic", "funny", "suspenseful", "calm", "bitter", "dreamy", "warm", "dry", "solemn"],
    "product": ["a solar phone charger", "a folding kayak", "a silent alarm clock", "reusable lunch boxes",
                "a plant sensor",
                "a language app", "an electric cargo bike", "a noise meter", "bamboo toothbrushes", "a standing desk",
                "a bird feeder with a camera", "a sleeping mask", "a board game about trade", "a budget planner"],
    "event": ["a neighbourhood clean-up", "a retirement party", "a job fair", "a charity run", "a science day",
              "a book club evening", "a cooking course", "a wedding", "a town meeting", "a chess tournament",
              "a school reunion", "a flea market", "a film night"],
    "trouble": ["a parcel that came damaged", "a noisy neighbour", "a late refund", "a cancelled flight",
                "a heating that fails",
                "a wrong invoice", "a missed deadline", "a lost library book", "a double booking", "a broken lift"],
    "audience": ["a ten-year-old", "a new colleague", "my grandmother", "a busy manager", "a group of students",
                 "someone who hates jargon", "a curious neighbour", "first-year students", "a sceptical customer"],
    "figure": ["a ship's captain in a storm", "a retired detective", "a medieval herbalist",
               "a robot that learns to cook",
               "a strict piano teacher", "a time traveller from 2150", "a friendly dragon", "a tired train conductor",
               "a wise old tortoise", "a nervous job applicant", "an ambitious mayor", "a talking lighthouse",
               "a sports commentator", "a fortune teller", "a polar explorer", "a ghost in a hotel", "a museum statue"],
    "manner": ["in short sentences", "with a lot of sea metaphors", "politely but impatiently", "as if whispering",
               "with dry humour", "and end every answer with a question", "and never use the word 'I'",
               "and mention the weather", "with enthusiasm", "like in an old letter"],
    "science": ["photosynthesis", "plate tectonics", "the immune system", "electric motors", "black holes", "enzymes",
                "the water cycle", "radioactive decay", "natural selection", "superconductors", "vaccines", "lasers",
                "the greenhouse effect", "batteries", "DNA replication", "tides", "osmosis", "semiconductors",
                "rainbows",
                "friction", "acid rain", "the Doppler effect", "fermentation", "nuclear fusion", "hormones",
                "magnetism",
                "neurons", "sound waves", "convection", "catalysts", "antibiotics", "earthquakes", "gene editing"],
    "past": ["the fall of the Roman Empire", "the printing press", "the Silk Road", "the French Revolution",
             "the Black Death",
             "the Industrial Revolution", "the Suez Crisis", "the abolition of slavery", "the Meiji Restoration",
             "women's suffrage", "the Cold War", "the Great Depression", "the Congress of Vienna", "the Mali Empire",
             "the Hanseatic League", "the Space Race", "the partition of India", "the Marshall Plan",
             "the Ottoman Empire",
             "the Bronze Age collapse", "the Reformation", "the building of the Panama Canal",
             "decolonisation in Africa"],
    "idea": ["utilitarianism", "stoicism", "the social contract", "free will", "inflation", "supply and demand",
             "federalism",
             "opportunity cost", "censorship", "the separation of powers", "cultural heritage", "the trolley problem",
             "universal basic income", "existentialism", "proportional representation", "comparative advantage",
             "propaganda", "minimalism in art", "impressionism", "oral tradition", "urbanisation", "satire"],
    "language": ["Python", "JavaScript", "Java", "C++", "Go", "Rust", "SQL", "Bash", "TypeScript", "Ruby"],
    "task": ["reverses the words of a sentence", "counts the vowels in a string", "merges two sorted lists",
             "checks a palindrome",
             "finds the second largest number of a list", "removes duplicates but keeps the order",
             "converts Roman numerals",
             "computes the running average of a list", "validates an email address", "flattens a nested list",
             "groups words by their first letter", "finds the longest word in a text", "rotates a matrix by 90 degrees",
             "counts lines in a file", "parses a date such as 2024-03-17", "finds the primes up to n", "zips two lists",
             "shuffles a deck of cards", "turns a CSV line into a dictionary", "computes the greatest common divisor",
             "sorts people by age and then by name", "finds anagrams in a list", "implements a stack with push and pop",
             "draws a triangle of stars", "converts Celsius to Fahrenheit", "simulates rolling two dice"],
    "code": ["def mean(xs):\n    return sum(xs) / len(xs)",
             "for i in range(1, 10):\n    if i % 3 == 0:\n        print(i)",
             "def fact(n):\n    if n == 0:\n        return 0\n    return n * fact(n - 1)",
             "def last(xs):\n    return xs[len(xs)]", "total = 0\nwhile total < 10:\n    print(total)",
             "const add = (a, b) => a + b;\nconsole.log(add('2', 3));",
             "def add(item, box=[]):\n    box.append(item)\n    return box",
             "SELECT name, COUNT(*) FROM orders WHERE total > 50;",
             "words = open('a.txt').read().split()\nprint(len(set(words)))",
             "int sum = 0;\nfor (int i = 0; i <= n; i++) sum += a[i];",
             "def swap(a, b):\n    a = b\n    b = a\n    return a, b",
             "squares = [x * x for x in range(20) if x % 2]", "grep -c error log.txt | sort | uniq",
             "def is_even(n):\n    if n % 2 = 0:\n        return True"],
    "concept": ["recursion", "a hash table", "unit tests", "an API", "version control", "a race condition",
                "Big-O notation",
                "a linked list", "object-oriented programming", "a database index", "caching", "a regular expression",
                "memory leaks", "binary search", "dependency injection",
                "the difference between a process and a thread"],
    "passage": [
        "The bakery on Mill Lane was opened in 1954 by Rosa Klein. Her son Peter took over in 1987 and added a café. "
        "Since "
        "2019 it has been run by two sisters, Ida and Lene Voss, who employ nine people and sell 400 loaves a day.",
        "On Tuesday the council approved a new cycle path of 12 kilometres between Alton and Marley. It will cost 3.4 "
        "million "
        "euros, two thirds of it paid by the region. Work begins in April and should end before winter.",
        "Dear team, the workshop moves from Monday 9 June to Thursday 12 June, 10:00 to 15:30, in room B204. Please "
        "send your "
        "slides to Dana Ortiz (dana@example.org) by Friday. Lunch is provided; tell Sam about allergies.",
        "The snow leopard lives at 3,000 to 4,500 metres. It weighs 22 to 55 kilograms, hunts at dawn and dusk, and "
        "can leap "
        "nine metres. Fewer than 7,000 are thought to live in the wild, in twelve countries.",
        "I bought the vacuum cleaner in March. The suction is great and it is quiet, but the battery lasts only 18 "
        "minutes and "
        "the bin is too small. Customer service answered within a day. I would give it three stars.",
        "Flight KQ112 leaves Nairobi at 23:55 and lands in Amsterdam at 06:50. Passengers to Oslo change to KL1141 at "
        "08:20, "
        "gate D12. Two bags of 23 kg are included; a third costs 90 euros.",
        "Marta Lindqvist, born in Umeå in 1931, studied chemistry in Uppsala and joined a glass works in 1957. She "
        "patented a "
        "heat-resistant enamel in 1964, founded a company two years later, and retired to Gotland in 1996.",
        "For the soup, fry two onions in butter, add 500 g of carrots and 30 g of ginger, pour in a litre of stock "
        "and simmer for "
        "25 minutes. Blend it, season it with salt and lime, and serve it with coriander for four people.",
        "The museum opens from Wednesday to Sunday, 10 to 18, on Fridays until 21. Adults pay 9 euros, students 5, "
        "children "
        "nothing. Guided tours start at 11 and 15. The tower is closed for repairs until 1 May.",
        "In the survey, 62% of 1,200 commuters said that they drive alone, 21% take the bus and 9% cycle. Asked what "
        "would change "
        "their habit, most named cheaper tickets, then safer cycle lanes, then working from home.",
    ],
    "field": ["all names of people", "all numbers with what they count", "the dates and times", "the places",
              "who does what",
              "the main facts", "the prices or amounts", "everything that a calendar entry needs"],
    "form": ["a JSON object", "a bulleted list", "a table with two columns", "CSV lines", "one line per fact", "YAML"],
    "sentence": ["The train leaves at seven.", "I would like two coffees, please.", "Where is the nearest pharmacy?",
                 "My sister lives near the sea.", "We will meet again on Sunday.", "The book is on the table.",
                 "It has been raining since morning.", "Can you help me carry this box?",
                 "The soup is too hot to eat."],
    "tongue": ["French", "Spanish", "German", "Italian", "Portuguese", "Latin"],
    "skill": ["bake bread", "repot a plant", "change a bicycle tyre", "write a CV", "learn to juggle",
              "plan a hiking trip",
              "clean a keyboard", "prepare for an interview", "start a vegetable garden", "fold a paper crane",
              "brew good tea",
              "organise a small kitchen", "memorise a speech", "save money for a holiday", "train a puppy",
              "paint a room"],
    "choice": ["renting and buying a flat", "trains and planes", "paper books and e-readers", "cats and dogs as pets",
               "working at home and in an office", "gas and induction stoves", "running and swimming",
               "summer and winter holidays",
               "learning alone and in a class", "small towns and big cities", "coffee and tea"],
    "goods": ["apples", "notebooks", "tickets", "tiles", "lamps", "bottles", "seeds", "stamps", "bricks", "cupcakes"],
    "n": range(3, 13), "m": range(12, 60), "big": range(70, 900, 10), "percent": range(5, 65, 5),
    "unit": ["miles into kilometres", "kilograms into pounds", "litres into gallons", "hours into seconds",
             "square metres into square feet", "degrees Celsius into Fahrenheit", "inches into centimetres"],
    "riddle": ["a farmer must cross a river with a goat, a wolf and a cabbage in a boat for two",
               "two doors have two guards, one of whom always lies", "three boxes all carry wrong labels",
               "you have a 3-litre and a 5-litre jug and need 4 litres", "two ropes burn for an hour each, unevenly",
               "one of eight coins is lighter and the scales may be used twice"],
    "words": ["fifty", "eighty", "100", "120", "150", "200"],
    "table": _table, "series": _series, "numbers": _numbers, "ordering": _ordering,
}  # fmt: skip

TEMPLATES = {
    "writing": [
        "Write a {mood} {kind} about {theme}, set in {place}.",
        "Write a {kind} in which a {job} finds {thing} in {place}.",
        "Draft an email to a {job} about {trouble}. Keep it polite and under {words} words.",
        "Write an advertisement for {product}, aimed at {audience}.", "Write an invitation to {event} for {audience}.",
        "Give me a {mood} opening paragraph for a novel about a {job} and {thing}.",
        "I have to give a speech at {event}. Write a {mood} one of about {words} words.",
        "Write a review of {product} by a disappointed {job}.",
        "Translate into {tongue}: \"{sentence}\" Then translate: \"{sentence2}\"",
        "Suggest {n} titles for a {kind} about {theme} and say why each fits.",
        "Rewrite this more formally: \"{passage}\"",
        "How do I {skill}? Write step-by-step instructions for {audience}.",
        "Write a letter of complaint about {trouble}, from {person}.",
        "Brainstorm {n} ideas for {event} on a small budget.",
        "Write a short blog post on the difference between {choice}.",
    ],
    "roleplay": [
        "You are {figure}. Tell me about {theme}, {manner}.", "Pretend to be {figure} and describe {place} to me.",
        "Let's play: you are a {job} and I am a customer with {trouble}. You speak first, {manner}.",
        "Answer as {figure} would: what do you think about {choice}?",
        "Act as {figure} who sells {product}. Convince me, {manner}.",
        "Imagine that you are {thing}. What did you see in {place}?",
        "You are a {job} interviewing {figure}. Write the first {n} questions.",
        "Be my coach. I want to {skill}, but I keep putting it off. Talk to me {manner}.",
        "Play {figure} and explain {science} to {audience}.", "As a {job} in {place}, how would you handle {trouble}?",
        "Speak as {figure}, and give a toast at {event}, {manner}.",
    ],
    "reasoning": [
        "{ordering} Who comes first and who last? Explain.",
        "What comes next in this series: {series}? Say how you found it.",
        "Solve this riddle step by step: {riddle}.", "Compare {choice}. Which is better for a {job}, and why?",
        "If all {goods} in a shop are old and some old things are dear, must some {goods} be dear? Explain.",
        "{person} says that {person2} lies, and {person2} says that {person} tells the truth. Can both be right?",
        "A {job} found {thing} in {place}. Give {n} possible explanations, the likeliest first.",
        "{person} plans {event} but has {trouble}. What should be done first, second and third?",
        "Which of these does not belong with the others, and why: {goods}, {goods2}, {science}, {goods3}?",
        "What would happen if nobody could use {product} for a year? Think of {n} consequences.",
        "{person} left home at {n} o'clock and walked for {m} minutes, rested for {n2} minutes and walked back. When "
        "was that?",
        "Give one argument for and one against this: every {job} should understand {science}.",
    ],
    "math": [
        "{person} buys {n} boxes of {m} {goods} and gives {n2} {goods} to each of {n3} friends. How many are left?",
        "A shop sells {goods} at {n} for {m} euros. What do {big} of them cost?",
        "What is {percent}% of {big}? Show your steps.",
        "Convert {m} {unit}.", "Find the mean, the median and the range of {numbers}.",
        "Solve for x: {n}x + {m} = {big}.",
        "A train goes {big} km in {n} hours. How far does it go in {m} minutes at the same speed?",
        "The price of {product} rises from {big} euros by {percent}% and then falls by {percent2}%. What is it now?",
        "A rectangle is {m} cm long and {n} cm wide. What are its area, perimeter and diagonal?",
        "What is the probability of drawing a red ball twice from {n} red and {m} blue balls, without putting any "
        "back?",
        "Factorise {big} into primes and list its divisors.",
        "{person} is {m} years old, {n} years older than {person2}. How old were "
        "they together {n2} years ago?",
        "If {n} workers lay {big} tiles in a day, how many days do {n2} workers need for {big2} tiles?",
        "What is the sum of the first {m} multiples of {n}?",
        "Simplify ({n}a + {m}b) - ({n2}a - {n3}b) and check it for a = 2, b = 1.",
    ],
    "coding": [
        "Write a {language} function that {task}.",
        "Write a {language} program that {task}, with comments and an example call.",
        "What does this code do?\n\n{code}",
        "This code does not work as I expect. Find the mistake and fix it:\n\n{code}",
        "Rewrite this so that it is easier to read, and say what you changed:\n\n{code}",
        "Explain {concept} to {audience}, with code in {language}.",
        "Write {n} unit tests for a function that {task}.",
        "When would I use {concept}? Give an example from the work of a {job}.",
        "I need a command line tool in {language} that {task}. Sketch its structure first.",
        "Design a small database for {event}: tables, "
        "columns, keys.", "Compare {language} and {language2} for a program that {task}.",
        "Write an HTML page that advertises {product}.",
    ],
    "extraction": [
        "Extract {field} from this text as {form}:\n\n{passage}",
        "Here is a table:\n\n{table}\n\nWhich row has the highest value in each column?",
        "Turn this into {form}:\n\n{table}", "{passage}\n\nSummarise the text in one sentence and list {field}.",
        "Read this and answer with yes or no, with a reason: does it mention a {job}?\n\n{passage}",
        "Find {field} in the following note. Answer with {form}.\n\n{passage}",
        "{table}\n\nWrite two sentences on what these data show.",
        "Give a headline of at most eight words to this text: {passage}",
        "Sort these rows by the last column and return {form}:\n\n{table}",
        "What questions does this text leave open?\n\n{passage}",
        "Which of the two texts holds more numbers?\n\nA: {passage}\n\nB: {passage2}",
        "Classify each sentence as fact, opinion or request:\n\n{passage} {sentence}",
    ],
    "stem": [
        "Explain {science} to {audience}.", "How are {science} and {science2} related?",
        "What are common misconceptions about {science}?",
        "Describe an experiment on {science} for a class, with the material it needs.",
        "Why does {science} matter for a {job}?",
        "Define {science} in one sentence, then in a paragraph.",
        "Who discovered what about {science}? Give a short history.",
        "Write {n} quiz questions about {science}, with answers.", "What is still not understood about {science}?",
        "Compare {science} with {science2} in a table.",
        "Use an analogy from the life of a {job} to explain {science}.",
        "Which quantities would you measure to study {science}, and with which instruments?",
    ],
    "humanities": [
        "What were the main causes of {past}?", "Explain {idea} to {audience}.", "How did {past} change everyday life?",
        "Compare {idea} with {idea2}.", "Write a short essay on {idea} in about {words} words.",
        "What can we learn today from {past}?",
        "Give arguments for and against {idea}.", "Describe {past} from the point of view of a {job}.",
        "List {n} important dates in connection with {past}.",
        "How is {idea} visible in modern life? Give {n} examples.",
        "Which people shaped {past}, and how?", "Plan a lesson on {past} for {audience}.",
        "What is the link between {past} and {idea}?",
    ],
}  # fmt: skip
CATEGORIES = tuple(TEMPLATES)

ENDINGS = ("", "", "", " Answer in about {words} words.", " Keep it short.", " Use a list.", " Give an example.",
           " Be precise.",
           " I am a {job}, so use examples that I know.", " Use simple words.",
           " Start with the most important point.")  # fmt: skip
FOLLOW_UPS = [
    "Shorten that to two sentences.", "Can you say that again for {audience}?", "Give me another example.",
    "What did you leave out?",
    "Turn your answer into {form}.", "Why?", "Which part of that is the least certain?", "Now make it sound {mood}.",
    "Explain your second point in more detail.", "Summarise this in {n} bullet points.", "How would a {job} see it?",
    "Rewrite it in about {words} words.", "What should I do next?", "Translate your last sentence into {tongue}.",
]  # fmt: skip
OWN_FOLLOW_UPS = {
    "writing": ["Now end it differently.", "Add {thing} to it.", "Make it rhyme.",
                "Write it from the view of a {job}.", "Move it to {place}."],
    "roleplay": ["Stay in your role: what do you fear most?", "A {job} walks in. What happens?",
                 "Answer again, {manner}.", "Tell me about {thing}."],
    "reasoning": ["Explain step 2 again.", "Does that change if there are {n} of them?", "What did you assume?",
                  "Check your answer."],
    "math": ["Now with {m} instead of the first number.", "Check the result another way.",
             "Explain step 2 for {audience}.", "Write it as a formula."],
    "coding": ["Now in {language}.", "Add error handling.", "What is its time complexity?", "Write a test for it.",
               "Explain line by line."],
    "extraction": ["Now only the first two.", "Sort them by name.", "Return the same as {form}.",
                   "Which of them is a number?"],
    "stem": ["How could one measure that?", "What has this to do with {science}?", "Name {n} uses of it.",
             "Explain the hardest term."],
    "humanities": ["Who disagreed, and why?", "What has this to do with {idea}?", "What came after it?",
                   "Name a book on it."],
}  # fmt: skip


def conversations(count: int, seed: int = 0, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations of the training split (or of the held-out one), the categories in turn.

    Each is `{"id", "category", "turns": [str, ...]}` with one to three user turns. No two start with the same
    question. Raises ValueError when a category has no more.
    """
    split = "held-out" if held_out else "train"
    rng = random.Random(f"{split} {seed}")
    fresh = {category: _distinct(category, rng, held_out) for category in CATEGORIES}
    for number, category in zip(range(count), itertools.cycle(CATEGORIES)):
        turns = next(fresh[category])[: rng.choice(TURNS)]
        yield {"id": f"prompts-{split}-{seed}-{number}", "category": category, "turns": turns}


def questions() -> list[dict[str, Any]]:
    """The 80 held-out questions of two turns, ten per category: `{"question_id", "category", "turns": [str, str]}`."""
    rng = random.Random("questions")
    drawn = [
        (category, turns[:2])
        for category in CATEGORIES
        for turns in itertools.islice(_distinct(category, rng, held_out=True), QUESTIONS_PER_CATEGORY)
    ]
    return [
        {"question_id": number, "category": category, "turns": turns}
        for number, (category, turns) in enumerate(drawn, FIRST_QUESTION_ID)
    ]


@cache
def fingerprint() -> str:
    """Twelve hex digits that change when what is generated changes."""
    sample = [*conversations(800), *conversations(80, held_out=True), *questions()]
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:12]


def _distinct(category: str, rng: random.Random, held_out: bool) -> Iterator[list[str]]:
    """Three turns each of one split, the templates in turn, until nothing new is found."""
    seen: set[str] = set()
    for template in itertools.cycle(TEMPLATES[category]):
        for _ in range(PATIENCE):
            turns, drawn = _draw(category, template, rng)
            if _is_held_out(drawn) == held_out and turns[0] not in seen:
                break
        else:
            raise ValueError(f"data=prompts has only {len(seen)} conversations of category {category!r}")
        seen.add(turns[0])
        yield turns


def _draw(category: str, template: str, rng: random.Random) -> tuple[list[str], str]:
    """Three turns, and what decides their split: the first without its ending."""
    values: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        name = match[0]
        if name not in values:
            source = WORDS[match[1]]
            value = source(rng) if callable(source) else str(rng.choice(source))
            while value in values.values():
                value = source(rng) if callable(source) else str(rng.choice(source))
            values[name] = value
        return values[name]

    first = SLOT.sub(fill, template)
    ending = SLOT.sub(fill, rng.choice(ENDINGS))
    drawn, own = values, OWN_FOLLOW_UPS[category]
    values = {}  # a follow-up names things of its own
    later = [rng.choice(own if rng.random() < 0.5 else FOLLOW_UPS)]
    later.append(rng.choice([turn for turn in FOLLOW_UPS if turn not in later]))
    return [first + ending, *(SLOT.sub(fill, turn) for turn in later)], template + json.dumps(drawn, sort_keys=True)


def _is_held_out(drawn: str) -> bool:
    return int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:8], "big") < HELD_OUT * 2**64
