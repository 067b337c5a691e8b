"""Prepared sequences for the eye: what a head learns from, and what it only reads."""

from typing import Any

from ctcdraft.data.store import Corpus

LABEL, DIFFERENT, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def shown(tokenizer: Any, corpus: Corpus, count: int, *, colour: bool) -> str:
    """The first `count` sequences as text, the masked tokens in green (yellow where the label is another token), or
    without colour between \u27e6 and \u27e7."""
    blocks = []
    for number in range(min(count, len(corpus))):
        ids, mask, labels = (list(map(int, column)) for column in corpus[number])
        title = f"--- sequence {number}: {len(ids)} tokens, {sum(mask)} labels"
        kinds = [(m, bool(m) and label != token) for token, m, label in zip(ids, mask, labels, strict=True)]
        blocks.append(f"{title}\n{_painted(tokenizer, ids, kinds, colour)}")
    return "\n".join(blocks)


def _painted(tokenizer: Any, ids: list[int], kinds: list[tuple[int, bool]], colour: bool) -> str:
    pieces, start = [], 0
    for end in range(1, len(ids) + 1):
        kind = kinds[start] if colour else kinds[start][0]
        if end < len(ids) and (kinds[end] if colour else kinds[end][0]) == kind:
            continue
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if kinds[start][0]:
            text = f"{DIFFERENT if kinds[start][1] else LABEL}{text}{PLAIN}" if colour else f"\u27e6{text}\u27e7"
        pieces.append(text)
        start = end
    return "".join(pieces)
