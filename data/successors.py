"""What follows a token in the answers: a table of bigrams, for the shortlists of a transition."""

import numpy as np
from numpy.typing import NDArray

from ctcdraft.data.store import Corpus

READ = 1 << 24  # tokens: more of them change little of the most frequent


def successors_of(corpus: Corpus, vocab: int, count: int, drafted: int | None = None) -> NDArray[np.int32]:
    """The `count` tokens that most often follow each token as part of an answer, most frequent first: [V, count] token
    ids, all below `drafted` if that is given, -1 where there are fewer. From the first 16.8 million tokens."""
    before, after = corpus.ids[:READ][:-1].astype(np.int64), corpus.labels[:READ][1:]
    answered = (corpus.mask[:READ][1:] > 0) & (after < (vocab if drafted is None else drafted))
    starts = corpus.offsets[1:-1]
    answered[starts[starts < len(corpus.ids[:READ])] - 1] = False  # what comes before is of another sequence
    pairs, counts = np.unique((before * vocab + after)[answered], return_counts=True)
    tokens, nexts = np.divmod(pairs, vocab)
    order = np.lexsort((nexts, -counts, tokens))
    tokens, nexts = tokens[order], nexts[order]
    places = np.arange(len(tokens)) - np.searchsorted(tokens, tokens)
    table, kept = np.full((vocab, count), -1, np.int32), places < count
    table[tokens[kept], places[kept]] = nexts[kept]
    return table
