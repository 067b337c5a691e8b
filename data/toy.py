"""The toy corpus: generated conversations in ShareGPT form and two-turn questions in MT-Bench's form.

For tests, and for machines that reach no registry. What is said in it: `ctcdraft.data.toy_scenarios`.
"""

from functools import cache

from ctcdraft.data.generated import Generator
from ctcdraft.data.toy_scenarios import SCENARIOS

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TOY = Generator(
    "toy",
    {category: [one.draw for one in SCENARIOS if one.category == category] for category in CATEGORIES},
    exchanges=(1, 2, 2, 2, 2, 2, 3, 3),
    held_out_share=1 / 16,
    sample=400,
)
conversations, questions, fingerprint = TOY.conversations, TOY.questions, cache(TOY.fingerprint)
