"""A head in a scripted engine drafts what it drafts in our own decoder: every schedule, every place where a draft is
rejected."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import MOE
from bases import write_base
from drafting import HEADS, prompts, random_head, slots_behind
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_engine import PAGE, PagedEngine

from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.model.draft.drafter import Frontier
from ctcdraft.model.export import export_head
from ctcdraft.model.heads import EagleConfig
from ctcdraft.serve.base import base_of
from ctcdraft.serve.state import Pages, ServedHead

CHAIN = DraftConfig("chain", nodes=6, budget="fixed", prompt_lookup=4)
TRAINING = {"objective": "ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
ONE_PASS = HEADS[:5]


@pytest.fixture(scope="module", params=range(len(ONE_PASS)), ids=lambda i: f"{ONE_PASS[i].kind}{i}")
def head(request, base):
    return random_head(ONE_PASS[request.param], base)


@pytest.fixture(scope="module")
def ctc(base):
    return random_head(HEADS[1], base)


def engine(base, head, draft=CHAIN, **options):
    return PagedEngine(base, lambda pages: ServedHead(base, head, draft, pages), head.attended, **options)


def run(served, whole=1000):
    while served.unfinished:
        served.step([(request, whole) for request in served.unfinished])


def test_tokens_steps_and_accepted_are_our_chains(base, head):
    texts = prompts(4, seed=1)
    served = engine(base, head)
    requests = [served.add(text, 24) for text in texts]
    run(served)
    for request, out in zip(requests, Decoder(base, head, CHAIN).generate(texts, 24), strict=True):
        assert request.answer == out.tokens
        assert (request.steps, request.nodes, request.accepted) == (out.steps, out.nodes, out.accepted)
    assert sum(sum(request.nodes) for request in requests) > 0


@pytest.fixture(scope="module")
def expected(base, ctc):
    """What our decoder drafts behind these tokens, once it has read all but the last; room: for so many."""
    decoder = Decoder(base, ctc, CHAIN)

    @cache
    def drafted(tokens, room):
        slots = slots_behind(torch.tensor([tokens]), ctc, base)
        (lattice,) = ctc.candidates(slots, torch.tensor([tokens[-1]]), decoder.vocabulary).lattices()
        return decoder.drafter.tree(lattice, Frontier(np.array(tokens), base.eos_ids, room)).tokens.tolist()

    return drafted


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_drafts_of_the_tokens_read(base, ctc, expected, data):
    """Chunks of any size, requests that wait, move in the batch, come late, are preempted, or share pages."""
    common = [5, 9, 12, 9, 5, 7, 30, 31, 9]
    texts = [common[: data.draw(st.integers(1, 9))] + tail for tail in prompts(3, seed=2, longest=8)]
    served = engine(base, ctc, pages=80, prefix_caching=data.draw(st.booleans()))
    ways = {tuple(text): out for text, out in zip(texts, Decoder(base).generate(texts, 12), strict=True)}
    waiting = [served.add(text, 12) for text in texts]
    for _ in range(data.draw(st.integers(5, 25))):
        if not served.unfinished:
            break
        running = [one for one in served.unfinished if one in waiting[: data.draw(st.integers(1, 3))]]
        running = running or served.unfinished[:1]
        if data.draw(st.integers(0, 5)) == 0:
            served.preempt(data.draw(st.sampled_from(running)))
        served.step([(one, data.draw(st.integers(1, 9))) for one in data.draw(st.permutations(running))])
    run(served)
    for request in waiting:
        assert request.answer == ways[tuple(request.prompt)].tokens
    for tokens, limit, draft in sorted(set(served.seen)):
        prompt = next(len(text) for text in texts if list(tokens[: len(text)]) == text)
        assert list(draft) == expected(tuple(tokens), limit - (len(tokens) - prompt) - 1)


@pytest.mark.parametrize("depth", range(6))
def test_a_draft_may_be_rejected_at_every_depth(base, ctc, expected, depth):
    (text,) = prompts(1, seed=3)
    truth = Decoder(base).generate(text, 40).tokens

    class Scripted(ServedHead):
        """The truth up to a depth, wrong there."""

        def drafts(self, hidden, read, table, rooms):
            (tree,) = super().drafts(hidden, read, table, rooms)
            at = len(read[0]) - len(text)
            spelt = truth[at : at + 6]
            right = [token if d != depth else (token + 7) % 250 + 2 for d, token in enumerate(spelt)][: rooms[0]]
            made.append((read[0].copy(), rooms[0], tree.tokens.tolist()))
            return [replace(tree, tokens=np.array(right, np.int64))]

    made = []
    served = PagedEngine(base, lambda pages: Scripted(base, ctc, CHAIN, pages), ctc.attended)
    request = served.add(text, 40)
    run(served)
    assert request.answer == truth
    assert depth in request.accepted
    for read, room, tokens in made:
        assert tokens == expected(tuple(read.tolist()), room)


def test_samples_whose_prompt_lookup_is_off_are_the_heads_alone(base, ctc):
    alone = replace(CHAIN, prompt_lookup=0)
    (text,) = prompts(1, seed=4)
    served = engine(base, ctc, alone)
    request = served.add(text, 24)
    run(served)
    assert request.steps == Decoder(base, ctc, alone).generate(text, 24).steps


def test_pages_may_lie_in_the_layout_of_a_gpu_engine(ctc, base):
    """FlashAttention's cache in vLLM: keys and values side by side, [P, H, K, 2 W]; views of it, no copies."""
    P, H, W = 8, ctc.attended.heads, ctc.attended.width
    cache = torch.randn(P, H, PAGE, 2 * W, dtype=torch.float64)
    keys, values = cache.transpose(1, 2).split(W, dim=-1)
    pages = Pages({1: (keys, values)})
    table = torch.tensor([[3, 5, 0], [2, 7, 6]])
    pages.show(table, [6, 9])
    got_keys, got_values = pages.committed(1)
    assert got_keys.shape == (2, H, 9, W)
    for b, length in enumerate((6, 9)):
        for position in range(length):
            page, at = int(table[b, position // PAGE]), position % PAGE
            assert torch.equal(got_keys[b, :, position], cache[page, :, at, :W])
            assert torch.equal(got_values[b, :, position], cache[page, :, at, W:])
    pages.write(1, keys[:1, 0] + 1, values[:1, 0] + 1, torch.tensor([2 * PAGE + 3]))
    pages.write(1, keys[:1, 0], values[:1, 0], torch.tensor([-1]))  # padding
    assert torch.equal(cache[2, :, 3], torch.cat([keys[0, 0], values[0, 0]], -1) + 1)


def shifted(served):
    own = served.propose
    served.propose = lambda asked, states: own([(request, row - 1) for request, row in asked], states)


def stale(served):
    """Places that were written once are not written again: after a rejection they hold another token's."""
    own, written = served.write, set()

    def write(layer, keys, values, slots):
        fresh = torch.tensor([int(slot) if (layer, int(slot)) not in written else -1 for slot in slots])
        written.update((layer, int(slot)) for slot in slots)
        own(layer, keys, values, fresh)

    served.write = write


def unturned(served):
    own = served.write
    served.write = lambda layer, keys, values, slots: own(layer, keys.roll(1, dims=-1), values, slots)


def other_weights(served):
    served.drafter.head = random_head(HEADS[1], served.base, seed=5)


def other_tables(served):
    own = served.drafter.drafts
    served.drafter.drafts = lambda hidden, read, table, rooms: own(hidden, read, table.flip(0), rooms)


@pytest.mark.parametrize("plant", [shifted, stale, unturned, other_weights, other_tables])
def test_planted_faults_change_drafts_and_no_token(base, ctc, plant):
    texts = prompts(3, seed=6)
    right, wrong = engine(base, ctc), engine(base, ctc)
    plant(wrong)
    both = [[served.add(text, 24) for text in texts] for served in (right, wrong)]
    run(right)
    run(wrong)
    assert [r.answer for r in both[0]] == [r.answer for r in both[1]]
    assert right.seen != wrong.seen


def test_a_head_of_a_pass_per_depth_is_refused(base):
    head = random_head(EagleConfig(slots=3, width=32, beam=2), base)
    with pytest.raises(ValueError, match="eagle takes a pass per depth"):
        ServedHead(base, head, CHAIN)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3_text", "phi"])
def test_a_base_of_the_engines_tensors_drafts_as_the_whole_base(family, tmp_path):
    base = load_base(str(write_base(tmp_path / family, family, **(MOE if family.endswith("moe") else {}))))
    if base.lm_bias is not None:  # Phi's
        base.lm_bias.normal_()
    head = random_head(replace(HEADS[1], draft_vocab_size=100), base)
    export_head(head, base, tmp_path / "head", TRAINING)
    embedding, lm_head = (
        torch.cat([layer.weight, torch.zeros(12, 32)])  # padded, as engines do
        for layer in (base.model.get_input_embeddings(), base.model.get_output_embeddings())
    )
    bias = None if base.lm_bias is None else torch.cat([base.lm_bias, torch.zeros(12)])

    def engines(lm_head):
        parts = SimpleNamespace(weight=embedding), SimpleNamespace(weight=lm_head, bias=bias)
        target = SimpleNamespace(model=SimpleNamespace(embed_tokens=parts[0]), lm_head=parts[1])
        return base_of(target, str(tmp_path / family), base.context_length, "--max-model-len")

    served = engines(lm_head)
    assert served.lm_weight.data_ptr() == lm_head.data_ptr()
    assert served.model.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    assert all(p.is_meta for p in served.decoder.layers.parameters())
    assert (served.eos_ids, served.context_length) == (base.eos_ids, base.context_length)
    texts, drafted = prompts(2, seed=7), []
    for own in (base, served):
        made = PagedEngine(
            base,
            lambda pages, own=own: ServedHead(own, load_head(tmp_path / "head", own), CHAIN, pages),
            head.attended,
        )
        for text in texts:
            made.add(text, 16)
        run(made)
        drafted.append(made.seen)
    assert drafted[0] == drafted[1]
    with pytest.raises(ValueError, match="differ"):
        load_head(tmp_path / "head", engines(lm_head.flip(0)))
    with pytest.raises(ValueError, match="packed"):
        engines(lm_head.to(torch.int8))
