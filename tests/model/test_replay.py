"""Counting along known answers is counting while decoding."""

from itertools import chain

import numpy as np
import pytest
from drafting import HEADS, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.replay import Transcript, drafts_along, replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def conversations(talking):
    """By the most tokens of an answer, six conversations of two turns: the tokens, with which of them are answers; and
    the prompt of each turn, with what plain decoding says behind it."""
    plain, found = Decoder(talking), {}
    for limit in (7, 40):
        tokens, said, turns = [[]] * 6, [[]] * 6, []
        for asked in (prompts(6, seed=1), prompts(6, seed=2, longest=9)):
            begun = [[*before, *prompt] for before, prompt in zip(tokens, asked, strict=True)]
            turns.append([*zip(begun, plain.generate(begun, limit), strict=True)])
            tokens = [[*prompt, *out.tokens] for prompt, out in turns[-1]]
            said = [
                [*before, *[False] * len(prompt), *[True] * len(out.tokens)]
                for before, prompt, (_, out) in zip(said, asked, turns[-1], strict=True)
            ]
        known = [Transcript(np.array(row), np.array(own)) for row, own in zip(tokens, said, strict=True)]
        found[limit] = known, [*chain(*zip(*turns, strict=True))]
    return found


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
def test_sampled_answers_are_counted_too(talking, config):
    """Drafts that look at the noise, and drafts that do not."""
    head, sampling, limit = random_head(config, talking), Sampling(0.9), 30
    drafts = {
        "best": DraftConfig(nodes=9, budget="fixed"),
        "shared": DraftConfig(nodes=9, proposal="shared", budget="fixed"),
    }
    decoders = {label: Decoder(talking, head, draft) for label, draft in drafts.items()}
    prompts = [[5, 6, 7, 8], [9, 8, 7]]
    for label, decoder in decoders.items():
        wanted = decoder.generate(prompts, limit, temperature=0.9, seed=[3, 4])
        rows = []
        for seed, prompt, out in zip((3, 4), prompts, wanted, strict=True):
            tokens = np.array(prompt + out.tokens)
            rows.append(Transcript(tokens, np.arange(len(tokens)) >= len(prompt), sampling, seed))
        counted = [one.generation() for one in chain(*replay(talking, {label: decoder}, rows)[label])]
        assert [(got.steps, got.accepted) for got in counted] == [(want.steps, want.accepted) for want in wanted]


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
def test_trees_and_chains_of_one_head_are_counted_side_by_side(talking, conversations, config):
    """A head that takes a pass per depth drafts otherwise for a chain, whichever comes first."""
    head, (known, _) = random_head(config, talking), conversations[40]
    kinds = {kind: DraftConfig(kind, 9, prompt_lookup=0, budget="fixed") for kind in ("tree", "chain")}
    decoders = {kind: Decoder(talking, head, draft) for kind, draft in kinds.items()}
    drafted = {
        kind: [[len(tree), *tree.tokens] for _, _, tree in drafts_along(talking, {kind: one}, known, progress=False)]
        for kind, one in decoders.items()
    }
    for order in (kinds, [*kinds][::-1]):
        together = {kind: [] for kind in kinds}
        for kind, _, tree in drafts_along(talking, {kind: decoders[kind] for kind in order}, known, progress=False):
            together[kind].append([len(tree), *tree.tokens])
        assert together == drafted


@pytest.mark.parametrize("kind", ["tree", "chain"])
@pytest.mark.parametrize("config", [None, *HEADS], ids=lambda c: c.kind if c else "lookup")
def test_a_replay_counts_what_decoding_counts(talking, conversations, config, kind):
    head = None
    if config is not None:
        head = random_head(config, talking)
    decoders = {
        "both": Decoder(talking, head, DraftConfig(kind, 9, prompt_lookup=7, budget="fixed")),
        "head": Decoder(talking, head, DraftConfig(kind, 4, prompt_lookup=0, budget="fixed")),
        **({} if head else {"plain": Decoder(talking)}),
    }
    for limit, (known, turns) in conversations.items():
        found = replay(talking, decoders, known)
        asked, plain = zip(*turns, strict=True)
        for label, decoder in decoders.items():
            wanted = plain if label == "plain" else decoder.generate(asked, limit)
            counted = [one.generation() for one in chain(*found[label])]
            for got, want in zip(counted, wanted, strict=True):
                assert (got.tokens, got.steps, got.accepted) == (want.tokens, want.steps, want.accepted)
                assert got.accepted_from == want.accepted_from
                assert got.expected == pytest.approx(want.expected, abs=1e-3)
            assert sum(len(one.sources) for one in chain(*found[label])) == sum(len(out.tokens) - 1 for out in wanted)
        assert head or {one.generation().tokens_per_step for one in chain(*found["plain"])} == {1.0}
    assert any(sources for one in chain(*found["both"]) for sources in one.sources)


def test_a_sequence_that_is_all_answer_is_drafted_for_behind_its_first_token(talking):
    decoder = Decoder(talking, random_head(HEADS[1], talking), DraftConfig(nodes=6, budget="fixed"))
    tokens, longer = np.arange(5, 25), Transcript(np.arange(4, 44), np.arange(40) > 0)
    wanted = replay(talking, {"": decoder}, [Transcript(tokens, np.arange(20) > 0)])[""]
    found = replay(talking, {"": decoder}, [Transcript(tokens, np.ones(20, bool)), longer])[""]
    assert found[0][0].sources == wanted[0][0].sources
    assert np.allclose(found[0][0].expected, wanted[0][0].expected)
    assert Transcript(tokens[:1], np.ones(1, bool)).answers() == []
