"""Heads of a pass per depth: what their beam believes is what training computes, node by node."""

import numpy as np
import pytest
import torch
from drafting import TRAINING, Whims, prompts, random_head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.model import Decoder, DraftConfig, export_head, load_base, load_head
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.base.sampling import gumbel
from ctcdraft.model.draft.drafter import Drafter, Frontier, Stop
from ctcdraft.model.draft.growth import NO_HINTS, Hints
from ctcdraft.model.draft.tree import Tree, chosen
from ctcdraft.model.heads import EagleConfig, GlideConfig, MlpConfig
from ctcdraft.model.heads.stepwise.beam import CHILDREN
from ctcdraft.model.loss.objective import anchor_losses

CONFIGS = [
    EagleConfig(slots=4, width=32, beam=3),
    MlpConfig(slots=4, width=24, beam=3),
    GlideConfig(slots=4, beam=3),
    GlideConfig(slots=4, beam=3, cross=False),
]
KINDS = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


def embedded(head, base, ids):
    return head.embedded(head.draft_vocabulary(base), ids, base.dtype).detach()


def path_of(tree, node):
    path = []
    while node >= 0:
        path.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path


@KINDS
def test_each_node_of_the_beam_has_the_probability_that_training_computes(base, config):
    head = random_head(config, base)
    ids = torch.randint(base.vocab_size, (2, 7))
    hidden = base.hidden(ids.roll(1, 1), attended=head.attended)
    root = embedded(head, base, ids)
    batch, position = torch.tensor([0, 0, 1]), torch.tensor([2, 5, 6])
    vocabulary = head.vocabulary(base, 8)
    for n, tree in enumerate(head.drafts(hidden, ids, Anchors.of(batch, position, 2), vocabulary)):
        assert len(tree) == CHILDREN + 3 * 3 * CHILDREN
        paths = [path_of(tree, node) for node in range(len(tree))]
        assert len({tuple(path) for path in paths}) == len(tree)
        labels = pad_sequence([*map(torch.tensor, paths)], True)  # what follows a label has no influence on it
        lengths, output = torch.tensor([*map(len, paths)]), vocabulary.tokens.output
        at = Anchors.of(*(anchor[n].repeat(len(paths)) for anchor in (batch, position)), 2)
        slots = head(hidden, root, at, embedded(head, base, labels))
        out = anchor_losses(slots.states_NTD, output, None, labels, lengths, objective="cross_entropy")
        found = out.log_psi_NU.gather(1, lengths.unsqueeze(1) - 1).exp()[:, 0].tolist()
        assert found == pytest.approx(tree.psi.tolist(), rel=1e-4)


@KINDS
def test_told_of_the_noise_a_beam_goes_where_its_own_samples_go(base, config):
    """A base that believes what the head believes draws argmax(log q + noise) at each depth. Nearly all of that path
    is in the tree, and would not be without the noise."""
    head = random_head(config, base)
    ids, places = torch.randint(base.vocab_size, (1, 9)), range(3, 8)
    anchors = Anchors.of(torch.zeros(len(places), dtype=torch.long), torch.tensor(places), 1)
    hidden, vocabulary = base.hidden(ids.roll(1, 1), attended=head.attended), head.vocabulary(base, 8)
    noise = torch.stack([torch.stack([gumbel(n, t, base.vocab_size, ids.device) for t in range(4)]) for n in places])
    drawn = torch.zeros(len(places), 4, dtype=torch.long)
    for t in range(4):  # a label has no influence on its own slot
        slots = head(hidden, embedded(head, base, ids), anchors, embedded(head, base, drawn))
        drawn[:, t] = (vocabulary.tokens.logits(slots.states_NTD[:, t]).log_softmax(1) + noise[:, t]).argmax(1)
    told, untold = (
        sum(len(tree.path_of(path)) for path, tree in zip(drawn.tolist(), trees, strict=True))
        for trees in (head.drafts(hidden, ids, anchors, vocabulary, hints=Hints(known)) for known in (noise, None))
    )
    assert told >= 0.9 * drawn.numel()  # a beam can lose a path that is not sure
    assert untold < 0.8 * drawn.numel()


def drafted_and_read(head, base, hints, monkeypatch):
    """Its draft behind one anchor, and how many rows each pass read."""
    rows, step = [], head.step
    ids, anchors = torch.arange(9).unsqueeze(0), Anchors.of(torch.tensor([0]), torch.tensor([6]), 1)

    def counted(state, *given):
        rows.append(state.shape[1])
        return step(state, *given)

    with monkeypatch.context() as patched:
        patched.setattr(head, "step", counted)
        hidden = base.hidden(ids.roll(1, 1), attended=head.attended)
        (tree,) = head.drafts(hidden, ids, anchors, head.vocabulary(base, 8), hints=hints)
    return tree, rows


def drafter(kind, least):
    return Drafter(DraftConfig(kind=kind, stop="none" if least is None else "adaedl", prompt_lookup=0), Stop(least))


def hints_of(drafter):
    return drafter.hints([Frontier(np.zeros(1, np.int64), [])], 4, 512, torch.device("cpu"))


@KINDS
@pytest.mark.parametrize("kind", ["chain", "cape"])
def test_a_chain_is_drafted_by_passes_of_one_row(base, config, kind, monkeypatch):
    """Of each depth its best child: a beam of several may lose that to likelier nodes beside it, and ends there."""
    head = random_head(config, base)
    whole, most = drafted_and_read(head, base, NO_HINTS, monkeypatch)
    narrow, rows = drafted_and_read(head, base, hints_of(drafter(kind, None)), monkeypatch)
    assert rows[-3:] == [1, 1, 1]
    assert most[-3:] == [3, 3, 3]
    here = Frontier(np.zeros(1, np.int64), [])
    got, want = (drafter(kind, None).tree(one, here) for one in (narrow, whole))
    behind = {tuple(path_of(got, node)) for node in range(len(got))}
    assert {tuple(path_of(want, node)) for node in range(len(want))} <= behind
    assert max(got.depths) == 4


@KINDS
def test_passes_end_where_adaedl_lets_nothing_follow(base, config, monkeypatch):
    """Of every threshold the chain begins with that of all passes, and each pass has a node that could be in it."""
    head = random_head(config, base)
    whole, most = drafted_and_read(head, base, NO_HINTS, monkeypatch)
    here, depths = Frontier(np.zeros(1, np.int64), []), set()
    for least in np.linspace(-0.6, 1.0, 17):
        early, rows = drafted_and_read(head, base, hints_of(drafter("chain", least)), monkeypatch)
        got, want = (drafter("chain", least).tree(one, here) for one in (early, whole))
        assert got.tokens[: len(want)].tolist() == want.tokens.tolist()
        assert len(rows) - len(most) == min(len(got), 3) - 3  # the row behind the last node is asked, if there is one
        depths.add(len(got))
    assert {0, 4} <= depths
    tree, rows = drafted_and_read(head, base, Hints(least=2.0), monkeypatch)
    assert len(tree) == CHILDREN  # of trees too: the first pass alone


@KINDS
def test_step_by_step_it_drafts_what_it_drafts_within_a_whole_sequence(base, config):
    head = random_head(config, base)
    ids = torch.randint(base.vocab_size, (2, 10))
    read, root, cache, own = ids[:, :-1], ids[:, 1:], TreeCache(base.depth, 2, 32), head.new_cache(2, 32)
    start, vocabulary = 0, head.vocabulary(base, 8)
    for end in (4, 5, 9):  # each draft's own entries must not stay behind
        mask = cache.causal_mask(end - start, ids.device)
        hidden = base.hidden(read[:, start:end], mask, cache=cache, attended=head.attended)
        cache.commit([range(end - start)] * 2)
        newest = cache.newest([end - start] * 2, end - start, ids.device)
        got = head.drafts(hidden, root[:, start:end], newest, vocabulary, cache, own=own)
        at = Anchors.of(torch.tensor([0, 1]), torch.tensor([end - 1] * 2), 2)
        whole = base.hidden(read[:, :end], attended=head.attended)
        want = head.drafts(whole, root[:, :end], at, vocabulary)
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a.tokens, b.tokens)
            assert np.allclose(a.psi, b.psi, rtol=1e-5)
        start = end


@KINDS
def test_anchors_do_not_see_each_other_or_what_follows_them(base, config):
    head = random_head(config, base)
    ids = torch.randint(260, (1, 9))
    hidden, root = base.hidden(ids[:, :-1], attended=head.attended), embedded(head, base, ids[:, 1:])
    labels = embedded(head, base, torch.randint(260, (2, 4)))
    zero = torch.zeros(1, dtype=torch.long)
    both = head(hidden, root, Anchors.of(torch.tensor([0, 0]), torch.tensor([1, 4]), 1), labels).states_NTD
    hidden[:, 5:], root[:, 5:] = 9.0, -9.0
    alone = head(hidden, root, Anchors.of(zero, torch.tensor([4]), 1), labels[1:]).states_NTD
    assert torch.allclose(both[1:], alone, atol=1e-10)
    assert not torch.allclose(both[:1], alone, atol=1e-3)


@KINDS
def test_documents_that_share_a_row_know_nothing_of_each_other(base, config):
    head = random_head(config, base)
    ids = torch.randint(260, (1, 9))
    root, labels = embedded(head, base, ids[:, 1:]), embedded(head, base, torch.randint(260, (1, 4)))
    zero = torch.zeros(1, dtype=torch.long)
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    allowed = (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)
    mask = AttentionMask(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), allowed)
    hidden = base.hidden(ids[:, :-1], mask, attended=head.attended)
    packed = head(hidden, root, Anchors.of(zero, torch.tensor([5]), 1, mask), labels).states_NTD
    alone = head(hidden[:, 3:], root[:, 3:], Anchors.of(zero, torch.tensor([2]), 1), labels).states_NTD
    assert torch.allclose(packed, alone, atol=1e-10)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=lambda config: config.kind)
@pytest.mark.parametrize("rests", [False, True])
def test_while_decoding_its_cache_is_that_of_a_fresh_encoding(base, config, rests):
    head, rounds = random_head(config, base), []

    class Checked(Decoder):
        def advance(self, step):
            super().advance(step)
            for row, request in enumerate(step.active):
                length = int(step.own_cache.lengths[row])
                if rests and length == 0:  # it has not drafted yet
                    continue
                assert length <= int(step.cache.lengths[row])
                ids, root = (
                    torch.from_numpy(request.read[part]).unsqueeze(0) for part in (slice(length), slice(1, length + 1))
                )
                at, fresh = Anchors.of(torch.tensor([0]), torch.tensor([length - 1]), 1), head.new_cache(1, length)
                hidden = base.hidden(ids, attended=head.attended)
                head.drafts(hidden, root, at, head.vocabulary(base, 8), own=fresh)
                for layer in head.own_layers:
                    for got, want in zip(step.own_cache.committed(layer), fresh.committed(layer), strict=True):
                        assert torch.allclose(got[row, :, :length], want[0], atol=1e-9)
                rounds.append(length)

    decoder = Checked(base, head, DraftConfig(nodes=8, budget="fixed"))
    if rests:
        decoder.measures, decoder.lengths, decoder.cold = True, Whims(), 0
    outs = decoder.generate(prompts(3, seed=5), 16)
    assert len(rounds) >= max(out.steps for out in outs) > 1


@KINDS
def test_exported_and_loaded_it_drafts_the_same_bits(base_folder, tmp_path, config):
    base = load_base(str(base_folder))
    head = random_head(config, base)
    export_head(head, base, tmp_path / "head", TRAINING)
    loaded, ids = load_head(tmp_path / "head", base), torch.arange(2, 10).unsqueeze(0)
    hidden, at = base.hidden(ids, attended=head.attended), Anchors.of(torch.tensor([0]), torch.tensor([6]), 1)
    (want,), (got,) = (one.drafts(hidden, ids, at, one.vocabulary(base, 8)) for one in (head, loaded))
    assert np.array_equal(want.tokens, got.tokens)
    assert np.array_equal(want.psi, got.psi)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 12), st.integers(1, 4))
def test_of_scored_nodes_the_best_are_chosen(seed, nodes, max_depth):
    rng = np.random.default_rng(seed)
    size = 20
    parents = np.array([int(rng.integers(-1, i)) for i in range(size)])
    psi, depths = np.ones(size, np.float32), np.ones(size, np.int64)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
        psi[i] = (1.0 if parent < 0 else psi[parent]) * rng.choice([0.25, 0.5, 1.0])
    tokens = rng.integers(0, 5, size)
    scored = Tree(tokens, parents, depths, psi)
    tree = chosen(scored, nodes, max_depth=max_depth, leaves=np.array([3]))

    def allowed(i):
        parent = parents[i]
        return depths[i] <= max_depth and (parent < 0 or (tokens[parent] != 3 and allowed(parent)))

    best = sorted((psi[i] for i in range(size) if allowed(i)), reverse=True)[:nodes]
    assert np.array_equal(np.sort(tree.psi)[::-1], np.array(best, np.float32))
    assert all(parent < i for i, parent in enumerate(tree.parents))
    chain = chosen(scored, 9, chain=True)
    assert list(chain.parents) == list(range(-1, len(chain) - 1))
