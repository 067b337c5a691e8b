"""Several requests at once, drafting as much as pays: no token depends on it, and what does not pay is not done."""

from collections import deque
from contextlib import closing

import numpy as np
import pytest
from drafting import HEADS, Whims, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.request import requests_of
from ctcdraft.model.decode.step import EagerStep
from ctcdraft.model.draft.budget import chain_of

pytestmark = pytest.mark.slow
KINDS = pytest.mark.parametrize("config", [*HEADS, None], ids=lambda config: "none" if config is None else config.kind)
SETTINGS = [{}, {"temperature": 0.8, "repetition_penalty": 1.2}]


def decoder_of(base, config, **options):
    head = None if config is None else random_head(config, base)
    return Decoder(base, head, DraftConfig(nodes=12, budget="measured", **options))


def joined(decoder, waiting, rows):
    """Requests as they come: each takes the place of one that has ended, at once."""
    step, waiting = decoder.eager_step(rows, 90 + 40 + 13), deque(waiting)
    while waiting or step.active:
        while waiting and len(step.active) < rows:
            step.admit(waiting.popleft())
        decoder.advance(step)
        for row in reversed(range(len(step.active))):
            while row < len(step.active) and step.active[row].out.finish:
                if waiting:
                    step.admit(waiting.popleft(), row)
                else:
                    step.drop(row)


@KINDS
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_whatever_rests_and_is_cut_no_token_changes(base, config, settings):
    asked, limits = prompts(9, seed=60), [3, 40, 12, 25, 7, 30, 18, 5, 22]
    asked[1] = asked[5] = [*range(2, 92)]  # one is read while another is about to end
    seeds = list(range(9))
    whole = Decoder(base).generate(asked, max(limits), seed=seeds, eos=[], **settings)
    plain = [out.tokens[:limit] for out, limit in zip(whole, limits, strict=True)]
    for seed in range(3):
        decoder = decoder_of(base, config)
        decoder.lengths, decoder.cold = Whims(seed), 0
        requests = [
            requests_of(base, [p], n, seed=s, eos=[], **settings)[0]
            for p, n, s in zip(asked, limits, seeds, strict=True)
        ]
        joined(decoder, requests, 4)
        assert [request.tokens for request in requests] == plain
        assert config is None or sum(sum(request.out.nodes) for request in requests) > 30


@pytest.mark.parametrize("config", HEADS, ids=lambda config: config.kind)
def test_behind_a_rest_a_head_drafts_what_it_drafts_without_one(base, config):
    """At every place of these texts, as one that drafts at each and has nothing accepted."""

    def drafted(lengths):
        found, make = {}, decoder._propose

        def propose(request, one):
            tree = make(request, one)
            if len(tree):
                found[request.seed, request.length] = tree
            return tree

        decoder._propose, decoder.lengths, decoder.cold = propose, lengths, 0
        decoder.generate(prompts(4, seed=61), 30, seed=[0, 1, 2, 3], eos=[])
        decoder._propose = make
        return found

    decoder = decoder_of(base, config, prompt_lookup=0)
    always = Whims(rests=0.0)
    always.cut = lambda trees, *_: [tree.first(0) for tree in trees]
    want, got = drafted(always), drafted(Whims(1, rests=0.7))
    assert 10 < len(got) < len(want)
    for place, tree in got.items():
        assert np.array_equal(tree.tokens, want[place].tokens)
        assert np.allclose(tree.psi, want[place].psi, atol=1e-6)


class Time:
    """Of a machine on which a forward of the base takes `row` a row and 1 besides, and a draft of the head `draft`."""

    def __init__(self, monkeypatch, head, row, draft):
        self.now, self.drafts = 0.0, 0
        hidden, drafts = Base.hidden, getattr(head, "drafts", None)
        monkeypatch.setattr("ctcdraft.model.decode.step.time.perf_counter", lambda: self.now)

        def forward(base, ids_BL, mask=None, **named):
            self.now += 1 + row * ids_BL.numel()
            return hidden(base, ids_BL, mask, **named)

        def drafting(*given, **named):
            self.now, self.drafts = self.now + draft, self.drafts + 1
            return drafts(*given, **named)

        monkeypatch.setattr(Base, "hidden", forward)
        if head is not None:
            monkeypatch.setattr(head, "drafts", drafting)


def decoded(decoder, clock):
    """Steps, and their time, of six requests that end by and by."""
    asked = [requests_of(decoder.base, [p], 70 + 10 * i, eos=[])[0] for i, p in enumerate(prompts(6, seed=62))]
    began = None
    with closing(decoder._steps(asked)) as steps:
        for _ in steps:
            began = clock.now if began is None else began
    return max(request.out.steps for request in asked), clock.now - began


@pytest.mark.parametrize(("row", "draft"), [(1.0, 0.5), (0.02, 20.0)], ids=["dear rows", "a dear head"])
def test_where_nothing_pays_the_head_is_hardly_run(base, monkeypatch, row, draft):
    decoder = decoder_of(base, HEADS[1], prompt_lookup=0)
    clock = Time(monkeypatch, decoder.head, row, draft)
    plain, seconds = decoded(Decoder(base), clock)
    assert (plain, clock.drafts) == (119, 0)
    decoded(decoder, clock)  # the first two steps compile, and tell nothing
    first, (steps, with_head) = clock.drafts, decoded(decoder, clock)
    assert 1 <= first <= 8
    assert clock.drafts - first <= 4
    assert steps > 110
    assert with_head < 1.05 * seconds


def scripted(decoder, asked, right):
    """Whatever its head believes, six nodes that are what the base says next, or not."""
    truth = [out.tokens for out in Decoder(decoder.base).generate(asked, 40, eos=[])]

    def propose(request, one):
        at = len(request.tokens)
        tokens = [token if right else (token + 1) % 260 for token in truth[request.seed][at : at + 6][: request.room]]
        return chain_of(tokens, 0.8)

    decoder._propose = propose


@pytest.mark.parametrize("config", [HEADS[1], None], ids=["head", "copies"])
def test_all_is_drafted_where_it_is_right_and_costs_nothing_and_little_where_it_is_wrong_and_dear(
    base, monkeypatch, config
):
    asked = prompts(4, seed=63)
    plain = [out.tokens for out in Decoder(base).generate(asked, 40, eos=[])]
    for row, right in ((0.0, True), (1.0, False)):
        decoder = decoder_of(base, config)
        scripted(decoder, asked, right)
        clock = Time(monkeypatch, decoder.head, row, 0.0)
        for _ in range(3):
            outs = decoder.generate(asked, 40, seed=[0, 1, 2, 3], eos=[])
        assert [out.tokens for out in outs] == plain
        nodes = [out.nodes for out in outs]
        if right:
            assert all(sum(n == 6 for n in own[:-1]) >= len(own) - 2 for own in nodes)
        else:
            assert np.mean(nodes) < 0.3
        assert config is None or (clock.drafts > 10) == right
        monkeypatch.undo()


def test_one_sequence_alone_keeps_to_its_table(base):
    decoder = decoder_of(base, HEADS[1])
    decoder.generate(prompts(1)[0], 10)
    assert decoder.budget is not None
    assert not decoder.lengths
    decoder.generate(prompts(5), 10)
    assert 3 in decoder.lengths  # of four to seven
    fixed = Decoder(base, decoder.head, DraftConfig(nodes=6, budget="fixed"))
    outs = fixed.generate(prompts(2), 12, eos=[])
    assert not fixed.lengths
    assert all(set(out.nodes[:-5]) == {6} for out in outs)


def test_steps_that_compile_are_not_timed(base, monkeypatch):
    """The first with nodes and the first without take a hundred times as long; what is learnt is that nothing costs."""
    decoder, asked = decoder_of(base, HEADS[1]), prompts(4, seed=64)
    scripted(decoder, asked, True)
    clock = Time(monkeypatch, decoder.head, 0.0, 0.0)
    verify, seen = EagerStep.verify, set()

    def compiling(step, drafts):
        kind = max(map(len, drafts)) > 0
        clock.now += 0 if kind in seen else 100
        seen.add(kind)
        return verify(step, drafts)

    monkeypatch.setattr(EagerStep, "verify", compiling)
    decoder.generate(asked, 40, seed=[0, 1, 2, 3], eos=[])
    assert seen == {True, False}
    assert decoder.lengths.of(4).plain.at(4) < 2
    assert decoder.lengths.of(4).drafted.at(28) < 2


def test_copies_of_a_decoder_without_a_head_are_their_own(base):
    decoder = decoder_of(base, None)
    loops = [[5, 6, 7, 8] * 5, [9, 10, 11] * 6]
    decoder.generate(loops, 30, eos=[])
    lengths = decoder.lengths.of(2)
    assert len(lengths._alone) > 5
    assert not lengths._latest
    assert not lengths.worth[True].seen_3K.any()
