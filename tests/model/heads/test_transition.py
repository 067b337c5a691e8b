"""The transition lattice: training against brute force over alignments, drafting against training."""

from typing import get_args

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from drafting import random_head, slots_behind
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ctcdraft.model.draft.tree import search
from ctcdraft.model.heads import CtcConfig, ParallelConfig, head_on
from ctcdraft.model.heads.head import Vocabulary
from ctcdraft.model.heads.transition import Slots, Transition
from ctcdraft.model.heads.vocabulary import DraftVocabulary
from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import CTC, ONE_TO_ONE, Topology
from ctcdraft.model.loss.divergence import Divergence, Teacher, divergences
from ctcdraft.model.loss.objective import anchor_losses

D, RANK = 6, 4


class Words:
    """A vocabulary of embeddings and rows of an LM head."""

    def __init__(self, V):
        self.embedded, self.lm_weight = (
            torch.randn(V + 1, D, dtype=torch.float64),
            torch.randn(V, D, dtype=torch.float64),
        )

    def __len__(self):
        return len(self.lm_weight)

    def embed(self, numbers):
        return self.embedded[numbers].to(self.lm_weight.dtype)


class Case:
    """Random slots, transition and labels of one anchor, in float64."""

    def __init__(self, T, V, labels, seed, with_blank=True):
        torch.manual_seed(seed)
        self.T, self.V, self.labels, self.words = T, V, torch.tensor([labels]), Words(V)
        self.states = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
        self.blank = torch.randn(1, T, dtype=torch.float64, requires_grad=True) if with_blank else None
        self.transition = Transition(D, RANK, with_blank=with_blank).double()
        for p in self.transition.parameters():
            p.data.normal_()
        self.slot_NTR = torch.randn(1, T, RANK, dtype=torch.float64, requires_grad=True)
        self.root = int(torch.randint(V, ()))

    def loss(self, objective="prefix_ctc", lengths=None, topology=CTC, **options):
        token_NS = torch.cat([torch.tensor([[self.root]]), self.labels], dim=1)
        topology = ONE_TO_ONE if self.blank is None else topology
        moved = self.transition(Slots(self.states, self.blank, self.slot_NTR), token_NS, self.words, topology)
        lengths = torch.tensor([self.labels.shape[1]]) if lengths is None else lengths
        weight = self.words.lm_weight.to(moved.states_NTD.dtype)
        options |= {"objective": objective, "topology": topology, "blank_is_odds": True}
        return anchor_losses(moved.states_NTD, weight, moved.blank_NT, self.labels, lengths, **options)

    def trained(self):
        transition = self.transition
        weights = transition.from_context.weight, transition.to_state.weight, transition.blank_R
        return [self.states, self.blank, self.slot_NTR, *weights]

    def lattice(self, topology, top_k=None):
        """What drafts are searched in, in float32."""
        root = torch.tensor([self.root])
        moved = self.slot_NTR.detach().float(), root, self.transition.tables(self.words)
        logits = (self.states @ self.words.lm_weight.T).detach().float()
        blank = None if self.blank is None else self.blank.detach().float()
        return candidates_of(logits, blank, top_k or self.V, topology, moved=moved).lattices()[0]

    def p(self, t, prefix):
        """Slot t's distribution over tokens and blank behind a prefix, spelt out: [V (+ 1)]."""
        embedded = self.words.embedded[prefix[-1] if prefix else self.root]
        context = self.transition.from_context(embedded / (embedded.pow(2).mean() + torch.finfo(float).eps).sqrt())
        at = self.slot_NTR[0, t] + context
        gate = at * (at + 3).clamp(0, 6) / 6
        p_V = (self.words.lm_weight @ (self.states[0, t] + self.transition.to_state.weight @ gate)).softmax(0)
        if self.blank is None:
            return p_V
        odds = self.blank[0, t] + self.transition.blank_R @ gate
        return torch.cat([p_V * (-odds).sigmoid(), odds.sigmoid().unsqueeze(0)])  # 1 - sigmoid would cancel

    def outputs(self, topology=CTC):
        """({prefix: psi}, {collapsed tokens: probability}), alignment by alignment."""
        starts, ends = {}, {}

        def go(t, output, before, p):
            if t == self.T:
                ends[output] = ends.get(output, 0.0) + p
                return
            q = self.p(t, output)
            last = t - len(output) == topology.band
            if last:
                q = q[: self.V] / q[: self.V].sum()
            else:
                go(t + 1, output, None, p * q[self.V])
            for c in range(self.V):
                if not topology.merge or before != c:
                    starts[*output, c] = starts.get((*output, c), 0.0) + p * q[c]
                    go(t + 1, (*output, c), c, p * q[c])
                elif not last:
                    go(t + 1, output, c, p * q[c])

        go(0, (), None, 1.0)
        return starts, ends


TOPOLOGIES = [CTC, *(Topology(False, band) for band in (None, 0, 1, 2))]


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 4),
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    topology=st.sampled_from(TOPOLOGIES),
    seed=st.integers(0, 9999),
)
@example(4, [0, 0], CTC, 9999)  # a blank so likely that tokens have a hundred-millionth
def test_psi_and_gradients_equal_brute_force_over_all_alignments(implementation, T, labels, topology, seed):
    case = Case(T, 3, labels, seed)
    out = case.loss(implementation=implementation, topology=topology)
    starts, _ = case.outputs(topology)
    want = []
    for k in range(1, len(labels) + 1):
        if tuple(labels[:k]) in starts:
            want.append(starts[tuple(labels[:k])].log())
            assert abs(float((out.log_psi_NU[0, k - 1] - want[-1]).detach())) < 1e-9
    if not want:
        assert not out.feasible_N[0]
        return
    losses = out.loss_N.sum(), -torch.stack(want).mean()
    found, truth = (torch.autograd.grad(loss, case.trained(), materialize_grads=True) for loss in losses)
    for got, wanted in zip(found, truth, strict=True):
        assert torch.allclose(got, wanted, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 4),
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    topology=st.sampled_from(TOPOLOGIES),
    kind=st.sampled_from(get_args(Divergence)),
    seed=st.integers(0, 9999),
)
def test_a_head_is_taught_by_what_its_alignments_say_behind_each_prefix(T, labels, topology, kind, seed):
    """q(c | g) = psi(gc) / psi(g); two of three tokens are told apart, and what they leave is more than rounding."""
    case = Case(T, 3, labels, seed)
    case.words.lm_weight.mul_(0.1)
    log_p = torch.randn(1, len(labels), 3, dtype=torch.float64).log_softmax(2).topk(2, dim=2)
    out = case.loss(topology=topology, teacher=Teacher(log_p.indices, log_p.values, kind))
    starts, _ = case.outputs(topology)
    starts[()] = torch.ones((), dtype=torch.float64)
    nothing = torch.full((), torch.finfo(torch.float64).tiny, dtype=torch.float64)  # of 0 the logarithm has no gradient

    def q(prefix, token):
        return starts[*prefix, token] / starts[prefix] if (*prefix, token) in starts else nothing

    told_q = [
        torch.stack([q(tuple(labels[:k]), int(c)) for c in told])
        for k, told in enumerate(log_p.indices[0])
        if tuple(labels[: k + 1]) in starts
    ]
    if not told_q:
        assert not out.feasible_N[0]
        return
    assume(min(1.0 - each.sum().item() for each in told_q) > 1e-6)
    far = divergences(kind, log_p.values[0, : len(told_q)], torch.stack(told_q).log())
    losses = out.loss_N.sum(), far.cumsum(dim=0).mean()
    assert abs(float((losses[0] - losses[1]).detach())) < 1e-9
    found, truth = (torch.autograd.grad(loss, case.trained(), materialize_grads=True) for loss in losses)
    for got, wanted in zip(found, truth, strict=True):
        assert torch.allclose(got, wanted, atol=1e-8)


@pytest.mark.parametrize("topology", [CTC, Topology(False, None), Topology(False, 2)])
def test_the_papers_objective_is_the_probability_of_exactly_the_labels(topology):
    case = Case(4, 3, [1, 1], seed=3)
    got = case.loss(objective="ctc", topology=topology).loss_N[0]
    assert torch.allclose(got, -case.outputs(topology)[1][1, 1].log(), atol=1e-10)


def test_labels_that_no_alignment_within_the_band_can_end_are_dropped():
    case = Case(4, 3, [1, 2], seed=3)
    kept = [bool(case.loss(objective="ctc", topology=Topology(False, band)).feasible_N) for band in (0, 1, 2, None)]
    assert kept == [False, False, True, True]


def test_slot_by_slot_each_label_stands_behind_those_before():
    case = Case(4, 5, [2, 0, 2], seed=1, with_blank=False)
    out = case.loss(objective="cross_entropy")
    want = 0.0
    for t, label in enumerate([2, 0, 2]):
        want = want + case.p(t, (2, 0, 2)[:t])[label].log()
        assert torch.allclose(out.log_psi_NU[0, t], want, atol=1e-10)


@pytest.mark.parametrize("options", [{"slot_lengths_N": torch.tensor([3])}, {"topology": Topology(False, 1)}])
def test_content_of_slots_and_labels_past_their_length_has_no_effect(options):
    """Nor of slots by which a band has all labels written."""
    case = Case(5, 4, [1, 2, 3], seed=5)
    clean = case.loss(lengths=torch.tensor([2]), **options)
    for part in (case.slot_NTR, case.states, case.blank):
        part.data[:, 3:] = torch.nan
    dirty = case.loss(lengths=torch.tensor([2]), **options)
    assert torch.equal(clean.loss_N, dirty.loss_N)
    assert torch.equal(clean.blank_rate_T, dirty.blank_rate_T)
    assert case.loss(lengths=torch.tensor([2]), topology=Topology(False, 2)).loss_N.isnan(), "the control"
    (grad,) = torch.autograd.grad(dirty.loss_N.sum(), case.states)
    assert grad.isfinite().all()
    assert not grad[:, 3:].any()


@pytest.mark.parametrize("topology", [CTC, Topology(False, 1)])
def test_the_blanks_rate_is_that_behind_as_many_labels_as_there_were_slots(topology):
    case = Case(4, 3, [1, 2, 0], seed=4)
    rate_T = case.loss(topology=topology).blank_rate_T
    for t in range(4):
        want = case.p(t, (1, 2, 0)[:t])[-1]
        assert abs(float(rate_T[t] - want)) < 1e-6


def test_a_fresh_transition_changes_nothing(base):
    """Training begins where the head without one would."""
    torch.manual_seed(0)
    config = CtcConfig(slots=4, transition="full")
    head, ids = head_on(base, config).double(), torch.randint(2, 260, (1, 7))
    slots, last = slots_behind(ids, head, base), ids[:, -1]
    (moved,) = head.candidates(slots, last, head.vocabulary(base, 5)).lattices()
    (plain,) = head.candidates(slots, last, Vocabulary(DraftVocabulary(base), 5, None)).lattices()
    for moved_tree, plain_tree in [(search(moved, n), search(plain, n)) for n in (1, 30)]:
        assert np.array_equal(moved_tree.tokens, plain_tree.tokens)
        assert np.allclose(moved_tree.psi, plain_tree.psi, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        *(
            CtcConfig(slots=5, rank=8, merge=merge, band=band)
            for merge, band in ((True, None), (False, 1), (False, None))
        ),
        ParallelConfig(slots=5, rank=8, transition="full"),
    ],
)
def test_the_tree_has_the_psi_that_training_computes(base, config):
    head = random_head(config, base)
    ids, checked = torch.randint(2, 260, (3, 5)), 0
    slots, roots = slots_behind(ids, head, base), ids[:, -1]
    whole = head.vocabulary(base, base.vocab_size)
    for n, lattice in enumerate(head.candidates(slots, roots, whole).lattices()):
        for path, psi in paths_of(search(lattice, 40)):
            want = float(training_psi(head, base, slots, n, roots[n], path).detach())
            assert abs(want - psi) < 1e-5 * max(1.0, want)
            checked += len(path) > 1
    assert checked > 20


def training_psi(head, base, slots, n, root, path):
    blank = None if slots.blank_NT is None else slots.blank_NT[n : n + 1]
    own = Slots(slots.states_NTD[n : n + 1], blank, slots.slot_NTR[n : n + 1])
    moved = head.transition(own, torch.tensor([[int(root), *path]]), DraftVocabulary(base), head.topology)
    out = anchor_losses(
        moved.states_NTD,
        base.lm_weight,
        moved.blank_NT,
        torch.tensor([path]),
        torch.tensor([len(path)]),
        objective="cross_entropy" if blank is None else "prefix_ctc",
        topology=head.topology,
        blank_is_odds=True,
    )
    return out.log_psi_NU[0, len(path) - 1].exp()


def paths_of(tree):
    """(tokens from the root on, psi) of every node."""
    found = []
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        found.append(([*(found[parent][0] if parent >= 0 else []), int(tree.tokens[node])], float(tree.psi[node])))
    return found


@pytest.mark.parametrize("topology", [CTC, Topology(False, 1)])
@pytest.mark.parametrize(("peaked", "moved"), [(1.0, 1.0), (1.0, 60.0), (15.0, 1.0), (15.0, 20.0)])
@pytest.mark.parametrize("vocabulary", [2000, 49_152])
def test_the_tree_and_the_loss_in_float32_have_the_psi_of_float64_whatever_a_transition_moves(
    vocabulary, peaked, moved, topology
):
    """All logits far apart, and moved by hundreds."""
    case = Case(3, vocabulary, [0], seed=0)
    case.states = peaked * case.states.detach()
    case.transition.to_state.weight.data *= moved
    checked = 0
    for path, psi in paths_of(search(case.lattice(topology), 24)):
        case.labels = torch.tensor([path])
        want = float(case.loss(topology=topology).log_psi_NU[0, -1].exp())
        assert abs(psi - want) < 2e-3 * want + 1e-6, path
        checked += want > 1e-4
    assert checked > 0


def test_what_is_no_candidate_keeps_its_share():
    """With few candidates psi is no longer training's, but a distribution still."""
    case = Case(1, 50, [0], seed=6, with_blank=False)
    lattice = case.lattice(ONE_TO_ONE, top_k=5)
    gate = torch.nn.functional.hardswish(torch.tensor(lattice.slot[0] + lattice.root))
    logits = torch.tensor(lattice.log_p[0]) + gate @ torch.tensor(lattice.key)
    others = 1.0 - float(np.exp(lattice.log_p[0]).sum())
    want = logits.exp() / (logits.exp().sum() + others)
    tree = search(lattice, 5)
    assert np.allclose(np.sort(tree.psi), np.sort(want.numpy()), atol=1e-6)
    assert 0.0 < tree.psi.sum() < 1.0


def test_plain_ctc_is_the_case_where_the_context_does_not_matter():
    case = Case(4, 3, [0, 2], seed=8)
    case.transition.to_state.weight.data.zero_()
    case.transition.blank_R.data.zero_()
    odds_T1, log_p_TV = case.blank[0].unsqueeze(1), (case.states[0] @ case.words.lm_weight.T).log_softmax(1)
    table = torch.cat([log_p_TV + F.logsigmoid(-odds_T1), F.logsigmoid(odds_T1)], 1)
    want = oracle.log_psi(oracle.outputs(table), (0, 2))
    assert torch.allclose(case.loss().log_psi_NU[0, 1], want, atol=1e-9)
