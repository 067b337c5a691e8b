"""Near-duplicates of evaluation questions: most of a question's word 5-grams, said in one conversation."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WORDS = re.compile(r"\w+")
SIZE = 5
SHARE = 0.8
FEWEST = 9  # letters: what is shorter stands in many texts


class NearDuplicates:
    """An index over questions: `of` tells which one a text repeats, nearly or wholly.

    A question is repeated when SHARE of its n-grams (of SIZE words, lower case, punctuation left out) occur in
    the text; one of fewer words, when all of them stand there in order, and one of fewer than FEWEST letters, as
    "continue", when the text says nothing else.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        self._sizes: list[int] = []
        self._index: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._short: dict[tuple[str, ...], int] = {}
        for number, question in enumerate(questions):
            words = WORDS.findall(question.lower())
            if words and sum(map(len, words)) < FEWEST:
                self._short.setdefault(tuple(words), number)
                words = []
            grams = _grams(words, min(SIZE, len(words))) if words else set()
            self._sizes.append(len(grams))
            for gram in grams:
                self._index[gram].append(number)
        self._lengths = {len(gram) for gram in self._index}

    def of(self, text: str) -> int | None:
        """The number of the question that the text repeats most of; None where it repeats none."""
        words = WORDS.findall(text.lower())
        if (short := self._short.get(tuple(words))) is not None:
            return short
        grams = {gram for size in self._lengths for gram in _grams(words, size)}
        found = Counter(number for gram in grams & self._index.keys() for number in self._index[gram])
        shares = {number: count / self._sizes[number] for number, count in found.items()}
        best = max(shares, key=lambda number: (shares[number], -number), default=None)
        return best if best is not None and shares[best] >= SHARE else None


def _grams(words: list[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
