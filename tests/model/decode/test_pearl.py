"""Base and head at the same time: who is done first changes no token, and what fails on one side is one error."""

import threading
import weakref

import numpy as np
import pytest
from architectures import base_of_architecture
from drafting import HEADS, assert_entries_of_a_fresh_prefill, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.decode.pearl import PearlStep
from ctcdraft.model.draft.budget import chain_of
from ctcdraft.model.draft.drafter import Drafter
from ctcdraft.model.heads import CtcConfig

PEARL = {"nodes": 12, "budget": "fixed", "schedule": "pearl"}
SEEDS = {"temperature": 1.0, "seed": [0, 1], "eos": []}
LONG = 60  # seconds that a side waits for the other, before the test fails


class Sides:
    """Wraps both sides of every step; `before` and `after` are called with the side's name."""

    def __init__(self, monkeypatch, before=lambda side: None, after=lambda side: None):
        self.threads = set()
        for name, side in (("_verified", "base"), ("_drafted", "head")):
            monkeypatch.setattr(PearlStep, name, self.wrapped(getattr(PearlStep, name), side, before, after))

    def wrapped(self, run, side, before, after):
        def both(step, given):
            self.threads.add((side, threading.current_thread() is threading.main_thread()))
            before(side)
            found = run(step, given)
            after(side)
            return found

        return both


def knowing(monkeypatch, truths, depth, shift=0):
    """A head that drafts the true continuation of each request, `depth` deep; shift: of another one."""

    def drafted(step, hints):
        found = []
        for request in step.active:
            number = next(n for n, (prompt, _) in enumerate(truths) if prompt == request.prompt)
            at = len(request.tokens)
            found.append(chain_of(truths[(number + shift) % len(truths)][1][at : at + depth], 0.9))
        return found

    monkeypatch.setattr(PearlStep, "_drafted", drafted)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["head", "base", "neither"])
@pytest.mark.parametrize("config", [CtcConfig(slots=5, layers=1, rank=8), HEADS[6], HEADS[8]], ids=lambda c: c.kind)
def test_who_is_done_first_changes_neither_tokens_nor_drafts(base, monkeypatch, config, first):
    """`neither`: each begins once the other has begun, so they do run at the same time."""
    asked, decoder = prompts(2, seed=5), Decoder(base, random_head(config, base), DraftConfig(**PEARL))
    want = [one.tokens for one in Decoder(base).generate(asked, 16, **SEEDS)]
    usual = decoder.generate(asked, 16, **SEEDS)
    done, both = threading.Semaphore(0), threading.Barrier(2)

    def before(side):
        if first == "neither":
            both.wait(LONG)
        elif side != first:
            assert done.acquire(timeout=LONG)

    sides = Sides(monkeypatch, before, lambda side: done.release() if side == first else None)
    got = decoder.generate(asked, 16, **SEEDS)
    assert [one.tokens for one in got] == want
    assert [(one.nodes, one.accepted) for one in got] == [(one.nodes, one.accepted) for one in usual]
    assert sides.threads == {("base", True), ("head", False)}


@pytest.mark.parametrize("failing", [("head",), ("base",), ("head", "base")], ids="-".join)
def test_what_fails_on_a_side_reaches_the_caller_as_one_error_and_no_thread_is_left(base, monkeypatch, failing):
    decoder, threads = Decoder(base, random_head(HEADS[0], base), DraftConfig(**PEARL)), threading.active_count()
    want, calls = decoder.generate([5, 6, 7], 12).tokens, []

    def before(side):
        calls.append(side)
        if side in failing and calls.count(side) == 3:
            raise RuntimeError(f"the {side} fell over")

    with monkeypatch.context() as patch:
        Sides(patch, before)
        with pytest.raises(RuntimeError, match=f"the {min(failing)} fell over") as caught:
            decoder.generate([5, 6, 7], 12)
    assert caught.value.__cause__ is None
    assert threading.active_count() == threads
    assert decoder.generate([5, 6, 7], 12).tokens == want


def test_what_the_head_expected_is_verified_a_step_later(base, monkeypatch):
    """Six tokens are drafted behind each root. A step in which nothing is pending gives one; the five behind it are the
    next draft, and what stood behind those five and the base's own was not drafted yet."""
    truths = [(prompt, Decoder(base).generate(prompt, 40, eos=[]).tokens) for prompt in prompts(1, seed=6)]
    knowing(monkeypatch, truths, depth=6)
    draft = DraftConfig(**PEARL, prompt_lookup=0)
    out = Decoder(base, random_head(HEADS[0], base), draft).generate(truths[0][0], 29, eos=[])
    assert out.tokens == truths[0][1][:29]
    assert out.nodes == out.accepted == [0, 5, 0, 5, 0, 5, 0, 5]


def test_a_draft_from_another_request_loses_acceptance_and_no_token(base, monkeypatch):
    truths = [(prompt, Decoder(base).generate(prompt, 30, eos=[]).tokens) for prompt in prompts(3, seed=7)]
    asked, accepted = [prompt for prompt, _ in truths], []
    for shift in (0, 1):
        knowing(monkeypatch, truths, 8, shift)
        draft = DraftConfig(**PEARL, prompt_lookup=0)
        outs = Decoder(base, random_head(HEADS[0], base), draft).generate(asked, 30, eos=[])
        assert [one.tokens for one in outs] == [tokens for _, tokens in truths]
        accepted.append(sum(sum(one.accepted) for one in outs))
    assert accepted[1] < 0.1 * accepted[0]


def test_the_caches_of_both_sides_are_those_of_reading_anew(base, monkeypatch):
    """Rows of unequal lengths, whose drafts are accepted in part; the head's own cache is a serial decoder's."""
    truths = [(prompt, Decoder(base).generate(prompt, 40, eos=[]).tokens) for prompt in prompts(2, seed=9)]
    head, serial, seen = random_head(HEADS[6], base), {}, []
    real, asked = PearlStep._drafted, [prompt for prompt, _ in truths]

    class Kept(Decoder):
        def advance(self, step):
            super().advance(step)
            self.keep(step)

    def keep_serial(step):
        for b, request in enumerate(step.active):
            length = int(step.own_cache.lengths[b])
            keys, values = step.own_cache.committed(0)
            serial[tuple(request.prompt)] = keys[b, :, :length].clone(), values[b, :, :length].clone()

    def compare(step):
        for b, request in enumerate(step.active):
            seen.append(assert_entries_of_a_fresh_prefill(base, step.cache, request.read.tolist(), b))
            length = int(step.own_cache.lengths[b])
            for made, want in zip(step.own_cache.committed(0), serial[tuple(request.prompt)], strict=True):
                most = min(length, want.shape[1])
                assert np.allclose(made[b, :, :most], want[:, :most], atol=1e-10)

    decoder = Kept(base, head, DraftConfig(nodes=12, budget="fixed"))
    decoder.keep = keep_serial
    decoder.generate(asked, 40, eos=[])
    knowing(monkeypatch, truths, depth=6)
    scripted = PearlStep._drafted
    monkeypatch.setattr(PearlStep, "_drafted", lambda step, hints: (real(step, hints), scripted(step, hints))[1])
    decoder = Kept(base, head, DraftConfig(**PEARL))
    decoder.keep = compare
    outs = decoder.generate(asked, 40, eos=[])
    assert [one.tokens for one in outs] == [tokens for _, tokens in truths]
    assert max(max(one.accepted) for one in outs) == 5
    assert len(seen) > 10


def test_what_both_sides_look_at_is_made_by_the_base_and_lasts_until_both_are_done(base, monkeypatch):
    """On a GPU the head has a stream of its own: noise that it made would not be there yet for the base, and memory of
    states that nobody holds would be written to before the head has read them."""
    real, drafted, makers, alive = Drafter.hints, PearlStep._drafted, set(), []

    def hints(self, *given):
        makers.add(threading.current_thread() is threading.main_thread())
        return real(self, *given)

    def beside(step, given):
        states = [weakref.ref(piece) for request in step.active for piece in request.hidden]
        found = drafted(step, given)
        alive.extend(state() is not None for state in states)
        return found

    monkeypatch.setattr(Drafter, "hints", hints)
    monkeypatch.setattr(PearlStep, "_drafted", beside)
    asked, draft = prompts(2, seed=5), DraftConfig(**PEARL, proposal="shared")
    got = Decoder(base, random_head(HEADS[1], base), draft).generate(asked, 12, **SEEDS)
    assert [one.tokens for one in got] == [one.tokens for one in Decoder(base).generate(asked, 12, **SEEDS)]
    assert makers == {True}
    assert len(alive) > 10
    assert all(alive)


def test_without_a_head_there_is_nothing_beside_the_base(base):
    prompt = prompts(1, seed=3)[0]
    alone = [Decoder(base, None, DraftConfig(**PEARL | {"schedule": kind})) for kind in ("serial", "pearl")]
    want, got = (decoder.generate(prompt, 20) for decoder in alone)
    assert (got.tokens, got.nodes) == (want.tokens, want.nodes)


def test_what_pearl_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"draft.schedule=pearl takes no draft.budget=measured, which times one part"):
        DraftConfig(schedule="pearl", budget="measured")
    with pytest.raises(ValueError, match=r"schedule\n  Input should be 'serial' or 'pearl'"):
        DraftConfig(schedule="both")
    angles = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    moving = base_of_architecture("llama", rope_parameters=angles)
    head = random_head(HEADS[0], moving)
    with pytest.raises(ValueError, match=r"^draft.schedule=pearl: llama sets its rotary angles anew by length, which"):
        Decoder(moving, head, DraftConfig(**PEARL))
    assert not Decoder(moving, None, DraftConfig(**PEARL)).parallel
