"""Prepared sequences for the eye: what a head learns from, and what it only reads."""

from itertools import groupby
from operator import itemgetter
from typing import Any

from .store import Corpus

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def shown(tokenizer: Any, corpus: Corpus, count: int, *, colour: bool) -> str:
    """The first `count` sequences as text, the masked tokens in green, or without colour between \u27e6 and \u27e7."""
    before, behind = (GREEN, PLAIN) if colour else ("\u27e6", "\u27e7")
    blocks = []
    for number in range(min(count, len(corpus))):
        ids, mask, _ = corpus[number]
        text = f"--- sequence {number}: {len(ids)} tokens, {sum(mask)} labels\n"
        for masked, run in groupby(zip(mask, ids, strict=True), key=itemgetter(0)):
            piece = tokenizer.decode([int(token) for _, token in run], skip_special_tokens=False)
            text += f"{before}{piece}{behind}" if masked else piece
        blocks.append(text)
    return "\n".join(blocks)
