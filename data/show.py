"""Prepared sequences for the eye: what a head learns from, and what it only reads."""

from itertools import groupby
from operator import itemgetter
from typing import Any

from .store import Corpus

LABEL, DIFFERENT, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def shown(tokenizer: Any, corpus: Corpus, count: int, *, colour: bool) -> str:
    """The first `count` sequences as text, the masked tokens in green (yellow where the label is another token), or
    without colour between \u27e6 and \u27e7."""
    blocks = []
    for number in range(min(count, len(corpus))):
        ids, mask, labels = (list(map(int, column)) for column in corpus[number])
        text = f"--- sequence {number}: {len(ids)} tokens, {sum(mask)} labels\n"
        kinds = [(m, colour and m and label != token) for token, m, label in zip(ids, mask, labels, strict=True)]
        for (masked, differs), run in groupby(zip(kinds, ids, strict=True), key=itemgetter(0)):
            piece = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
            before, behind = (DIFFERENT if differs else LABEL, PLAIN) if colour else ("\u27e6", "\u27e7")
            text += f"{before}{piece}{behind}" if masked else piece
        blocks.append(text)
    return "\n".join(blocks)
