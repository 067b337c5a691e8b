"""Counting along known answers is counting while decoding."""

from itertools import chain

import numpy as np
import pytest
from drafting import HEADS, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.draft.budget import Calibration
from ctcdraft.model.replay import Transcript, replay

pytestmark = pytest.mark.slow


def conversations(base, limit):
    """Two turns each: the tokens, which of them are answers, and the prompts with their answers."""
    plain, rows = Decoder(base), []
    for first, second in zip(prompts(6, seed=1), prompts(6, seed=2, longest=9), strict=True):
        tokens, said, turns = [], [], []
        for prompt in (first, second):
            tokens, said = tokens + prompt, said + [False] * len(prompt)
            answer = plain.generate(tokens, limit).tokens
            turns.append((list(tokens), answer))
            tokens, said = tokens + answer, said + [True] * len(answer)
        rows.append((Transcript(np.array(tokens), np.array(said)), turns))
    return rows


@pytest.mark.parametrize("kind", ["tree", "chain"])
@pytest.mark.parametrize("config", [None, *HEADS], ids=lambda c: c.kind if c else "lookup")
def test_a_replay_counts_what_decoding_counts(talking, config, kind):
    head = None
    if config is not None:
        head = random_head(config, talking)
        head.calibration = Calibration([[0.0, 1.0]], [[0.0, 0.5]])
    decoders = {
        "both": Decoder(talking, head, DraftConfig(kind, 9, prompt_lookup=7, budget="fixed")),
        "head": Decoder(talking, head, DraftConfig(kind, 4, prompt_lookup=0, budget="fixed")),
        "plain": Decoder(talking),
    }
    for limit in (7, 40):
        rows = conversations(talking, limit)
        found = replay(talking, decoders, [known for known, _ in rows])
        for label, decoder in decoders.items():
            wanted = [decoder.generate(prompt, limit) for _, turns in rows for prompt, _ in turns]
            counted = [one.generation() for one in chain(*found[label])]
            for got, want in zip(counted, wanted, strict=True):
                assert (got.tokens, got.steps, got.accepted) == (want.tokens, want.steps, want.accepted)
                assert got.accepted_from == want.accepted_from
                assert got.expected == pytest.approx(want.expected, abs=1e-3)
            assert sum(len(one.sources) for one in chain(*found[label])) == sum(len(out.tokens) - 1 for out in wanted)
        assert {one.generation().tokens_per_step for one in chain(*found["plain"])} == {1.0}
    assert any(sources for one in chain(*found["both"]) for sources in one.sources)
