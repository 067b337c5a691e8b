"""Vocabularies that several templates share."""

# fmt: off
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor", "Wendy", "Adam", "Bella", "Carl",
)
THINGS = (
    "lamp", "key", "book", "map", "ring", "bell", "clock", "coin", "mirror", "violin", "umbrella", "kite",
)
PLACES = (
    "forest", "market", "library", "garden", "harbour", "station", "museum", "old mill", "village square",
    "castle", "school yard", "bakery",
)
# fmt: on

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey")

# job: (what they do, their tool, their advice)
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
    "cook": ("prepare soup and fresh bread", "knife", "taste the food before you add salt"),
    "nurse": ("care for patients in the night", "thermometer", "wash your hands and stay calm"),
    "engineer": ("plan bridges and test engines", "ruler", "draw a plan before you build"),
    "librarian": ("find books and keep the room quiet", "catalogue", "read a little every evening"),
    "tailor": ("sew coats and mend old shirts", "needle", "use strong thread and small stitches"),
}

# city: (country, a sight, a dish)
CITIES = {
    "Paris": ("France", "the Eiffel Tower", "onion soup"),
    "Rome": ("Italy", "the Colosseum", "fresh pasta"),
    "London": ("England", "Tower Bridge", "fish and chips"),
    "Berlin": ("Germany", "the Brandenburg Gate", "potato salad"),
    "Madrid": ("Spain", "the Royal Palace", "warm churros"),
    "Vienna": ("Austria", "the State Opera", "apple strudel"),
    "Athens": ("Greece", "the Acropolis", "Greek salad"),
    "Lisbon": ("Portugal", "the Belem Tower", "custard tarts"),
    "Cairo": ("Egypt", "the pyramids", "bean stew"),
    "Tokyo": ("Japan", "the Imperial Palace", "noodle soup"),
    "Oslo": ("Norway", "the Opera House", "smoked salmon"),
    "Delhi": ("India", "the Red Fort", "lentil curry"),
}

# group: members
GROUPS = {
    "fruit": ("apple", "pear", "plum", "cherry", "peach", "banana"),
    "animal": ("horse", "rabbit", "tiger", "sheep", "eagle", "whale"),
    "tool": ("hammer", "saw", "drill", "wrench", "axe", "shovel"),
    "instrument": ("piano", "violin", "flute", "drum", "guitar", "harp"),
    "vehicle": ("bus", "train", "bicycle", "ship", "truck", "plane"),
    "colour": ("red", "blue", "green", "yellow", "brown", "white"),
    "vegetable": ("carrot", "onion", "potato", "cabbage", "pea", "spinach"),
    "metal": ("iron", "gold", "silver", "copper", "tin", "zinc"),
}
