"""A small knowledge base: what each topic is, how it shows itself, an example, and why it matters."""

from typing import NamedTuple


class Fact(NamedTuple):
    """Four clauses that continue "It is", "It happens that", "One example is" and "It matters because"."""

    what: str
    how: str
    example: str
    why: str


STEM = {
    "gravity": Fact(
        "the force that pulls masses toward each other",
        "the more mass a body has, the stronger it pulls",
        "an apple that falls from a tree",
        "it keeps the planets on their way around the sun",
    ),
    "photosynthesis": Fact(
        "the way in which plants make sugar from light",
        "leaves take in water and carbon dioxide and give off oxygen",
        "grass that grows in the sun",
        "it makes the oxygen that we breathe",
    ),
    "evaporation": Fact(
        "the change of a liquid into a gas",
        "fast molecules leave the surface of the liquid",
        "a puddle that dries on a warm day",
        "it brings water from the sea into the clouds",
    ),
    "friction": Fact(
        "the force that slows things which rub against each other",
        "small bumps on both surfaces catch on each other",
        "the brake of a bicycle",
        "without it we could not walk or stop a car",
    ),
    "electricity": Fact(
        "the flow of electric charge",
        "a battery pushes electrons through a wire",
        "a lamp that shines when you press a switch",
        "it drives our lights, trains and computers",
    ),
    "magnetism": Fact(
        "a force between magnets and iron",
        "equal poles push each other away and different poles attract",
        "a compass needle that points north",
        "motors and generators are built on it",
    ),
    "evolution": Fact(
        "the slow change of living things over generations",
        "those that fit their world best have more children",
        "birds whose beaks fit their food",
        "it explains why there are so many kinds of animals",
    ),
    "the water cycle": Fact(
        "the journey of water between sea, air and land",
        "the sun lifts vapour into the air, and it comes back as rain",
        "a cloud that forms over the ocean",
        "it fills our rivers and wells with fresh water",
    ),
    "a cell": Fact(
        "the smallest unit of life",
        "a thin wall holds a core and many small parts together",
        "a red blood cell",
        "every plant and every animal is built from it",
    ),
    "sound": Fact(
        "a wave of pressure that travels through matter",
        "a moving body pushes the air, and the air pushes our ears",
        "the string of a guitar",
        "it lets us speak and hear music",
    ),
    "light": Fact(
        "a wave that our eyes can see",
        "it moves in straight lines until something bends or stops it",
        "a rainbow after the rain",
        "it brings the energy of the sun to the earth",
    ),
    "a vaccine": Fact(
        "a medicine that trains the body against an illness",
        "it shows the body a harmless part of a germ",
        "the injection against measles",
        "it protects people before they get sick",
    ),
    "an algorithm": Fact(
        "a list of clear steps that solves a problem",
        "each step takes the result of the step before",
        "a recipe for a cake",
        "every computer program is made of it",
    ),
    "a fraction": Fact(
        "a number that names parts of a whole",
        "the lower number counts the parts, and the upper one those we take",
        "half of a pizza",
        "it helps us to share and to measure",
    ),
    "recycling": Fact(
        "the use of old material for new things",
        "waste is sorted, cleaned and melted or pressed again",
        "a bottle made of old glass",
        "it saves energy and keeps the land clean",
    ),
    "a volcano": Fact(
        "an opening in the ground that lets out melted rock",
        "hot gas pushes the rock up until it breaks out",
        "Mount Etna in Italy",
        "its ash makes the soil rich",
    ),
}

HUMANITIES = {
    "democracy": Fact(
        "a form of rule in which the people decide",
        "citizens vote, and the winners govern for a limited time",
        "an election of a parliament",
        "it allows a change of power without war",
    ),
    "inflation": Fact(
        "a general rise of prices",
        "too much money meets too few goods",
        "bread that costs more each year",
        "it makes savings worth less",
    ),
    "the Renaissance": Fact(
        "a time of new art and learning in Europe",
        "artists and scholars studied the old books of Greece and Rome",
        "the paintings of Leonardo da Vinci",
        "it opened the way to modern science",
    ),
    "the printing press": Fact(
        "a machine that copies pages quickly",
        "movable letters are covered with ink and pressed on paper",
        "the Bible that Gutenberg printed",
        "it made books cheap and spread ideas",
    ),
    "a constitution": Fact(
        "the highest law of a state",
        "it divides the power and lists the rights of the people",
        "the one that the United States wrote in 1787",
        "even the government has to obey it",
    ),
    "the Silk Road": Fact(
        "a net of trade routes between China and Europe",
        "caravans carried goods from town to town",
        "silk that was sold in Rome",
        "it spread goods, faiths and inventions",
    ),
    "a metaphor": Fact(
        "a picture made of words",
        "one thing is named in place of another that is like it",
        'the phrase "time is money"',
        "it makes a text lively and easy to remember",
    ),
    "philosophy": Fact(
        "the love of wisdom and the study of big questions",
        "thinkers ask, doubt and give reasons",
        "the talks of Socrates in Athens",
        "it teaches us to think clearly",
    ),
    "a myth": Fact(
        "an old story about gods and heroes",
        "people told it again and again to explain the world",
        "the tale of Icarus",
        "it shows what people feared and hoped",
    ),
    "trade": Fact(
        "the exchange of goods and services",
        "each side gives what it has and gets what it needs",
        "a market where fish is sold for money",
        "it lets people do what they can do best",
    ),
    "a museum": Fact(
        "a house that collects and shows things of value",
        "experts keep the objects safe and explain them",
        "the Louvre in Paris",
        "it keeps the memory of the past alive",
    ),
    "taxation": Fact(
        "the way in which a state collects money",
        "people and firms pay a part of what they earn or spend",
        "the tax that is added to the price of a shirt",
        "it pays for schools and roads",
    ),
    "the Roman Empire": Fact(
        "a large state that once ruled the lands around the Mediterranean",
        "legions, roads and laws held its lands together",
        "the Colosseum in Rome",
        "its law and its language still shape Europe",
    ),
    "a symphony": Fact(
        "a long piece of music for an orchestra",
        "it has several parts, some slow and some fast",
        "the fifth symphony of Beethoven",
        "it shows how many voices can become one",
    ),
    "the alphabet": Fact(
        "a set of letters that stand for sounds",
        "a few signs are joined to form every word",
        "the Greek letters alpha and beta",
        "it makes reading and writing easy to learn",
    ),
    "justice": Fact(
        "the idea that everyone gets what is right",
        "rules are the same for all, and judges listen to both sides",
        "a fair trial",
        "people can only live in peace when they trust it",
    ),
}
