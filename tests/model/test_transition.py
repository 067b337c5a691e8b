"""The transition lattice: training against brute force over alignments, drafting against training."""

import copy

import numpy as np
import oracle
import pytest
import torch
from drafting import random_head
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model import HeadConfig, build_head
from ctcdraft.model.head import Vocabulary, candidates
from ctcdraft.model.kernels import Prefixes, carried, moved_shortlist
from ctcdraft.model.kernels.cpu_shortlist import _shares as shares
from ctcdraft.model.kernels.reference import NO_TOKEN
from ctcdraft.model.lattice import movable_candidates_of
from ctcdraft.model.objective import anchor_losses
from ctcdraft.model.topology import CTC, Topology
from ctcdraft.model.transition import Known, Tables, Transition
from ctcdraft.model.tree import search
from ctcdraft.model.vocabulary import DraftVocabulary

D, RANK = 6, 4


class Case:
    """Random slots, transition and labels of one anchor, in float64."""

    def __init__(self, T, V, labels, seed, with_blank=True, successors=0):
        torch.manual_seed(seed)
        self.T, self.V, self.labels = T, V, torch.tensor([labels])
        self.weight = torch.randn(V, D, dtype=torch.float64)
        self.states = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
        self.blank = torch.randn(1, T, dtype=torch.float64, requires_grad=True) if with_blank else None
        self.transition = Transition(5, D, RANK, successors, with_blank=with_blank).double()
        for p in self.transition.parameters():
            p.data.normal_()
        self.slot_NTR = torch.randn(1, T, RANK, dtype=torch.float64)
        self.root = int(torch.randint(V, ()))
        table_VJ = torch.rand(V, min(V, 64)).argsort(dim=1)[:, :successors]  # of each row different ones
        table_VJ = (table_VJ + torch.randint(V, (V, 1))) % V
        self.transition.learn_successors(table_VJ.where(torch.rand(table_VJ.shape) > 0.2, -1))
        self.context_VR = torch.randn(V, RANK, dtype=torch.float64)
        self.token_VR = torch.randn(V, RANK, dtype=torch.float64, requires_grad=True)

    def loss(self, shortlist, objective="prefix_ctc", lengths=None, **options):
        token_NS = torch.cat([torch.tensor([[self.root]]), self.labels], dim=1)
        told_SNR, successor_NSJ = self.context_VR[token_NS.T], self.transition.successors(token_NS)
        known = Known(self.transition, self.slot_NTR, told_SNR, self.token_VR, successor_NSJ, shortlist)
        lengths = torch.tensor([self.labels.shape[1]]) if lengths is None else lengths
        arguments = (self.states, self.weight, self.blank, self.labels, lengths)
        return anchor_losses(*arguments, objective=objective, known=known, **options)

    def state(self, prefix):
        if not prefix:
            return self.context_VR[self.root]
        before = torch.nn.functional.hardswish(self.state(prefix[:-1]))
        return self.context_VR[prefix[-1]] + self.transition.carry.weight @ before

    def delta(self, t, prefix):
        """By how much the transition would move each token behind a prefix, [V]."""
        return self.token_VR @ torch.nn.functional.hardswish(self.slot_NTR[0, t] + self.state(prefix))

    def in_float32(self):
        other = copy.deepcopy(self)
        other.transition.float()
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(other, name, value.detach().float())
        return other

    def lattice(self, shortlist, topology):
        """What drafts are searched in."""
        transition = self.transition
        tables = Tables(
            self.context_VR.numpy(),
            self.token_VR.numpy(),
            transition.successor_VJ.numpy(),
            transition.carry.weight.detach().T.contiguous().numpy(),
            transition.blank_R.detach().numpy(),
        )
        root = torch.tensor([self.root])
        logits = self.states @ self.weight.T
        return movable_candidates_of(logits, self.blank, self.slot_NTR, root, tables, shortlist, topology).lattices()[0]

    def p(self, t, prefix, shortlist):
        """Slot t's distribution over tokens and blank behind a prefix, spelt out: [V (+ 1)]."""
        z = self.weight @ self.states[0, t]
        gate = torch.nn.functional.hardswish(self.slot_NTR[0, t] + self.state(prefix))
        last = prefix[-1] if prefix else self.root
        held = {*z.topk(shortlist).indices.tolist(), *self.transition.successor_VJ[last].tolist()}
        moved = [z[v] + (gate @ self.token_VR[v] if v in held else 0.0) for v in range(self.V)]
        if self.blank is not None:
            moved.append(self.blank[0, t] + self.transition.blank_R @ gate)
        return torch.stack(moved).softmax(0)

    def outputs(self, shortlist, topology=CTC):
        """({prefix: psi}, {collapsed tokens: probability}), alignment by alignment."""
        starts, ends = {}, {}

        def go(t, output, before, p):
            if t == self.T:
                ends[output] = ends.get(output, 0.0) + p
                return
            q = self.p(t, output, shortlist)
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


def gradients(loss, case):
    wanted = [case.states, case.token_VR, case.transition.blank_R, case.transition.carry.weight]
    return torch.autograd.grad(loss, [*wanted, case.blank], retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 4),
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    shortlist=st.integers(1, 3),
    successors=st.integers(0, 2),
    topology=st.sampled_from([CTC, *(Topology(False, band) for band in (None, 0, 1, 2))]),
    seed=st.integers(0, 9999),
)
def test_psi_and_gradients_equal_brute_force_over_all_alignments(
    implementation, T, labels, shortlist, successors, topology, seed
):
    case = Case(T, 3, labels, seed, successors=successors)
    out = case.loss(shortlist, implementation=implementation, topology=topology)
    starts, _ = case.outputs(shortlist, topology)
    want = []
    for k in range(1, len(labels) + 1):
        if tuple(labels[:k]) in starts:
            want.append(starts[tuple(labels[:k])].log())
            assert abs(float((out.log_psi_NU[0, k - 1] - want[-1]).detach())) < 1e-9
    if not want:
        assert not out.feasible_N[0]
        return
    for got, truth in zip(gradients(out.loss_N.sum(), case), gradients(-torch.stack(want).mean(), case), strict=True):
        assert torch.allclose(got, truth, atol=1e-9)


@pytest.mark.parametrize("topology", [CTC, Topology(False, None), Topology(False, 2)])
def test_the_papers_objective_is_the_probability_of_exactly_the_labels(topology):
    case = Case(4, 3, [1, 1], seed=3)
    got = case.loss(2, objective="ctc", topology=topology).loss_N[0]
    assert torch.allclose(got, -case.outputs(2, topology)[1][1, 1].log(), atol=1e-10)


def test_labels_that_no_alignment_within_the_band_can_end_are_dropped():
    case = Case(4, 3, [1, 2], seed=3)
    kept = [bool(case.loss(2, objective="ctc", topology=Topology(False, band)).feasible_N) for band in (0, 1, 2, None)]
    assert kept == [False, False, True, True]


def test_slot_by_slot_each_label_stands_behind_those_before():
    case = Case(4, 5, [2, 0, 2], seed=1, with_blank=False, successors=2)
    out = case.loss(2, objective="cross_entropy")
    want = 0.0
    for t, label in enumerate([2, 0, 2]):
        want = want + case.p(t, (2, 0, 2)[:t], 2)[label].log()
        assert torch.allclose(out.log_psi_NU[0, t], want, atol=1e-10)


def test_a_label_outside_the_shortlist_is_not_moved():
    """It would tell in training what inference cannot know: which token is right."""
    case = Case(1, 6, [0], seed=2)
    outside = int((case.weight @ case.states[0, 0]).argmin())
    case.labels = torch.tensor([[outside]])
    before = case.loss(3).log_psi_NU[0, 0]
    case.token_VR = case.token_VR.detach().clone()
    case.token_VR[outside] += 10.0
    assert torch.equal(case.loss(3).log_psi_NU[0, 0], before)
    assert not torch.equal(case.loss(6).log_psi_NU[0, 0], before)  # with the whole vocabulary it is moved
    assert case.loss(3).coverage_T[0] == 0.0
    assert case.loss(6).coverage_T[0] == 1.0


@pytest.mark.parametrize("options", [{"slot_lengths_N": torch.tensor([3])}, {"topology": Topology(False, 1)}])
def test_content_of_slots_and_labels_past_their_length_has_no_effect(options):
    """Nor of slots by which a band has all labels written."""
    case = Case(5, 4, [1, 2, 3], seed=5)
    clean = case.loss(2, lengths=torch.tensor([2]), **options)
    case.slot_NTR[:, 3:] = torch.nan
    case.states.data[:, 3:] = torch.nan
    case.blank.data[:, 3:] = torch.nan
    dirty = case.loss(2, lengths=torch.tensor([2]), **options)
    assert torch.equal(clean.loss_N, dirty.loss_N)
    assert torch.equal(clean.blank_rate_T, dirty.blank_rate_T)
    assert case.loss(2, lengths=torch.tensor([2]), topology=Topology(False, 2)).loss_N.isnan(), "the control"
    (grad,) = torch.autograd.grad(dirty.loss_N.sum(), case.states)
    assert grad.isfinite().all()
    assert not grad[:, 3:].any()


def test_a_fresh_transition_changes_nothing(base):
    """Training begins where the head without one would."""
    torch.manual_seed(0)
    config = HeadConfig(slots=4, width=32, mixer_width=16, transition="shortlist", shortlist=5)
    head = build_head(config, base.hidden_size).double()
    hidden, root = torch.randn(1, 6, base.hidden_size).double(), torch.randn(1, 6, base.hidden_size).double()
    slots, last = head.step(hidden, root, [6], head.new_cache(1, 32)), torch.tensor([3])
    (moved,) = candidates(slots, last, head, head.vocabulary(base, 5)).lattices()
    (plain,) = candidates(slots, last, head, Vocabulary(DraftVocabulary(base), 5, None)).lattices()
    for moved_tree, plain_tree in [(search(moved, n), search(plain, n)) for n in (1, 30)]:
        assert np.array_equal(moved_tree.tokens, plain_tree.tokens)
        assert np.allclose(moved_tree.psi, plain_tree.psi, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "topology"), [("ctc", CTC), ("ctc", Topology(False, 1)), ("ctc", Topology(False, None)), ("parallel", CTC)]
)
@pytest.mark.parametrize(("form", "successors"), [("shortlist", 0), ("shortlist", 6), ("full", 0)])
def test_the_tree_has_the_psi_that_training_computes(base, kind, topology, form, successors):
    sizes = {"slots": 5, "width": 32, "mixer_width": 16, "shortlist": 12 - successors, "rank": 8}
    sizes.update(topology._asdict())
    head = random_head(HeadConfig(kind, transition=form, successors=successors, **sizes), base)
    table = torch.randint(-1, base.vocab_size, (base.vocab_size, successors))
    table[::3, :1] = torch.arange(base.vocab_size)[::3, None]  # some are their own successors
    head.transition.learn_successors(table)
    hidden, root = torch.randn(3, 4, base.hidden_size).double(), torch.randn(3, 4, base.hidden_size).double()
    slots = head.step(hidden, root, [4, 4, 4], head.new_cache(3, 32))
    roots, checked = torch.randint(8, (3,)), 0
    for n, lattice in enumerate(candidates(slots, roots, head, head.vocabulary(base, 1)).lattices()):
        tree = search(lattice, 40)
        for node in range(len(tree)):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[at]))
                at = int(tree.parents[at])
            want = float(training_psi(head, base, slots, n, roots[n : n + 1], path).detach())
            assert abs(want - float(tree.psi[node])) < 1e-5 * max(1.0, want)
            checked += len(path) > 1
    assert checked > 20


def training_psi(head, base, slots, n, root_N, path):
    given = torch.tensor([path]), root_N, DraftVocabulary(base), head.shortlist(base.vocab_size)
    known = head.transition.known(slots.slot_NTR[n : n + 1], *given)
    blank = None if slots.blank_NT is None else slots.blank_NT[n : n + 1]
    out = anchor_losses(
        slots.states_NTD[n : n + 1],
        base.lm_weight,
        blank,
        torch.tensor([path]),
        torch.tensor([len(path)]),
        objective="cross_entropy" if blank is None else "prefix_ctc",
        known=known,
        topology=head.topology,
    )
    return out.log_psi_NU[0, len(path) - 1].exp()


EXTREMES = {
    "moved by hundreds": (1.0, 100.0),
    "all moved down by hundreds": (1.0, -100.0),
    "a shortlist with all but 1e-9": (20.0, 1.0),
    "a shortlist with all but 1e-9, moved down": (20.0, -3.0),
}


@pytest.mark.parametrize("topology", [CTC, Topology(False, 1)])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("vocabulary", [2000, 49_152])
def test_the_tree_and_the_loss_in_float32_have_the_psi_of_float64_whatever_a_transition_moves(
    vocabulary, extreme, topology
):
    """What stands outside of a shortlist is all that is left where all inside is moved far down: successors take most
    of it, and are moved down too."""
    peaked, moved = EXTREMES[extreme]
    case = Case(3, vocabulary, [0], seed=0, successors=3)
    logits_TV = peaked * (case.states[0] @ case.weight.T).detach()
    likely = logits_TV[0].argsort(descending=True)
    case.transition.successor_VJ[case.root] = likely[[1, 4, 6]].int()  # in the shortlist, and just outside of it
    case.transition.successor_VJ[likely[0]] = likely[[4, 5, 900]].int()
    case.states = peaked * case.states.detach()
    case.token_VR = moved * (case.token_VR.detach().abs() if moved < 0 else case.token_VR.detach())
    if moved < 0:
        case.slot_NTR = case.slot_NTR.abs() + 3 + case.context_VR.abs().max()  # gates that are all open
    deltas = torch.stack([case.delta(t, ()) for t in range(3)])
    rest = logits_TV.softmax(1).sort(descending=True).values[:, 4:].sum(1)
    assert deltas.abs().max() > 100 or moved == 1.0
    assert (rest.min() < 1e-9) == (peaked > 1)

    narrow = case.in_float32()
    tree = search(narrow.lattice(4, topology), 24)
    checked = 0
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        case.labels = narrow.labels = torch.tensor([path])
        want, in_float32 = (float(one.loss(4, topology=topology).log_psi_NU[0, -1].exp()) for one in (case, narrow))
        assert abs(float(tree.psi[node]) - want) < 1e-3 * want + 1e-6, path
        if peaked == 1.0:  # the loss takes the rest to be 1 minus the shortlist, which float32 knows to 1e-6
            assert abs(in_float32 - want) < 1e-3 * want + 1e-6, path
        checked += want > (1e-4 if moved > 0 else 0)  # what is moved down leaves to others
    assert checked > 0


def test_plain_ctc_is_the_case_where_the_context_does_not_matter():
    case = Case(4, 3, [0, 2], seed=8)
    case.token_VR = torch.zeros_like(case.token_VR)
    case.transition.blank_R.data.zero_()
    table = torch.cat([case.states[0] @ case.weight.T, case.blank[0].unsqueeze(1)], 1).log_softmax(1)
    want = oracle.log_psi(oracle.outputs(table), (0, 2))
    assert torch.allclose(case.loss(2).log_psi_NU[0, 1], want, atol=1e-9)


@pytest.mark.parametrize("U", [0, 1, 6])
def test_carried_states_and_their_gradients_equal_the_reference(U):
    torch.manual_seed(U)
    given = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((U + 1, 3, RANK), (RANK, RANK))]
    want, got = (carried(*given, name) for name in ("reference", "chunked"))
    assert torch.allclose(want, got, atol=1e-12)
    weights = torch.randn_like(want)
    for a, b in zip(
        *(torch.autograd.grad((out * weights).sum(), given, materialize_grads=True) for out in (want, got)), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-12)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(carried(*given).sum(), given, create_graph=True)


@settings(max_examples=25, deadline=None)
@given(
    N=st.integers(0, 5),
    T=st.integers(1, 5),
    U=st.integers(1, 6),
    K=st.integers(1, 9),
    J=st.integers(0, 7),
    R=st.integers(1, 70),
    band=st.none() | st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_the_compiled_shortlist_equals_the_reference(N, T, U, K, J, R, band, seed):
    prefixes, trained = random_prefixes(N, T, U, K, J, seed, R=R, band=band)
    prefixes = prefixes._replace(slots_N=torch.randint(T + 1, (N,)))
    want, got = (moved_shortlist(prefixes, name) for name in ("reference", "chunked"))
    assert torch.equal(want.inside_NTW, got.inside_NTW)
    weights = torch.randn(5, *want.moved_NTW.shape, dtype=torch.float64)
    sums = [sum((by * part).sum() for by, part in zip(weights, out, strict=False)) for out in (want, got)]
    for a, b in zip(want[:5], got[:5], strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    gradients = (torch.autograd.grad(total, trained, materialize_grads=True) for total in sums)
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), scale=st.sampled_from([0.1, 3.0, 30.0, 300.0]), seed=st.integers(0, 999))
def test_shares_of_float32_are_those_of_float64(count, scale, seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * scale).astype(np.float32)
    values[1:][rng.random(count - 1) < 0.2] = -np.inf
    found, peak = values.copy(), values.max().astype(float)
    total = np.exp(values - peak, dtype=float)
    lse = shares(found, np.empty(count, np.int32))
    assert abs(lse - np.log(total.sum()) - peak) < 1e-6 * max(1.0, abs(peak))
    assert np.allclose(found, total / total.sum(), rtol=1e-6 + 1e-7 * scale, atol=1e-37)
    assert (found[values == -np.inf] == 0).all()
    values[rng.integers(count)] = np.nan
    shares(values, np.empty(count, np.int32))
    assert np.isnan(values).all()


@pytest.mark.parametrize("scale", [1e-20, 1e-37, 1e-42])
def test_gradients_that_are_next_to_nothing_do_not_become_slow_numbers(scale):
    """Prefixes that alignments hardly reach have such gradients, and a CPU takes a hundred times as long over numbers
    below float32's normal ones."""
    prefixes, trained = random_prefixes(4, 5, 4, 8, 6, seed=0, dtype=torch.float32)
    for implementation in ("reference", "chunked"):
        out = moved_shortlist(prefixes, implementation)
        found = torch.autograd.grad(scale * (out.moved_NTW + out.blank_NTW).sum(), trained[:4])
        slow = [((part != 0) & (part.abs() < torch.finfo(torch.float32).tiny)).sum() for part in found]
        if implementation == "chunked":
            assert sum(slow) == 0
            assert any(part.any() for part in found) == (scale > 1e-30)
        else:
            assert (sum(slow) > 0) == (scale < 1e-30), "the control"


@pytest.mark.parametrize("name", ["moved_NTW", "emit_NTW", "blank_NTW"])
def test_a_gradient_that_is_not_a_number_stays_so(name):
    prefixes, trained = random_prefixes(4, 5, 4, 8, 6, seed=0, dtype=torch.float32)
    weights = torch.zeros(4, 5, 5)
    weights[1, 3, 2] = torch.nan
    out = moved_shortlist(prefixes._replace(next_NS=prefixes.index_NTK[:, 3, :5]), "chunked")
    slot, _, token, *_ = torch.autograd.grad((getattr(out, name) * weights).sum(), trained, materialize_grads=True)
    assert slot[1, 3].isnan().all()
    assert token[prefixes.index_NTK[1, 3, 2]].isnan().all() or name == "blank_NTW"
    assert slot[0].isfinite().all()


@pytest.mark.parametrize("name", ["slot_NTR", "successor_NTWJ", "logits_NTK"])
def test_a_value_that_is_not_a_number_stays_so(name):
    prefixes, _ = random_prefixes(4, 5, 4, 8, 6, seed=0, dtype=torch.float32)
    held = ~torch.isin(prefixes.successor_NSJ[1], torch.tensor([-1]))  # what is no successor is not looked at
    damaged = getattr(prefixes, name).detach().clone()
    damaged[1, 4] = torch.nan
    for implementation in ("reference", "chunked"):
        out = moved_shortlist(prefixes._replace(**{name: damaged}), implementation)
        assert out.moved_NTW[1, 4].isnan().any()
        assert out.moved_NTW[[0, 2, 3]].isfinite().all()
    assert held.any()


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_slots_that_are_not_looked_at_have_no_effect(implementation):
    prefixes, trained = random_prefixes(4, 5, 4, 8, 6, seed=0, band=1)
    prefixes = prefixes._replace(slots_N=torch.tensor([5, 3, 0, 4]))
    past_NT = torch.arange(5) >= prefixes.slots_N.unsqueeze(1)
    damaged = [part.detach().clone().requires_grad_() for part in trained]
    for which in (0, 4, 5):  # what is of each slot
        damaged[which].data[past_NT] = torch.nan
    given = prefixes._replace(slot_NTR=damaged[0], successor_NTWJ=damaged[4], logits_NTK=damaged[5])
    want, got = (moved_shortlist(one, implementation) for one in (prefixes, given))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
        assert not b[past_NT].any()
    weights = torch.randn(5, *want.moved_NTW.shape, dtype=torch.float64)
    weights[:, past_NT] = torch.nan  # a gradient of what is 0 in any case is not looked at either
    sums = [sum((by * part).nansum() for by, part in zip(weights, out, strict=False)) for out in (want, got)]
    of_slots = [trained[0], *trained[4:]], [damaged[0], *damaged[4:]]
    gradients = (torch.autograd.grad(total, some) for total, some in zip(sums, of_slots, strict=True))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
        assert not b[past_NT].any()


def test_coverage_is_that_of_labels_which_there_are():
    """Where labels end padding begins, and it is no label that a shortlist could hold."""
    case = Case(4, 6, [3, 1, 2], seed=2)
    whole, first = (case.loss(2, lengths=torch.tensor([length])).coverage_T for length in (3, 1))
    assert torch.equal(whole[:1], first[:1])
    assert not first[1:].any()
    assert case.loss(6, lengths=torch.tensor([1])).coverage_T.tolist() == [1, 0, 0, 0]


def test_products_that_do_not_count_are_left_out():
    """Where alignments come by one context alone, the others' gradients lie below what float32 keeps of the sum."""
    prefixes, trained = random_prefixes(4, 5, 4, 8, 6, seed=0, dtype=torch.float32)
    reached = torch.zeros(4, 5, 5)
    reached[:, range(5), range(5)] = 1

    def found(rest):
        out = moved_shortlist(prefixes, "chunked")
        return torch.autograd.grad(((out.moved_NTW + out.blank_NTW) * (reached + rest)).sum(), trained[:4])

    for alone, with_others in zip(found(0.0), found(1e-14), strict=True):
        assert torch.equal(alone, with_others)
    assert not torch.equal(found(1e-3)[0], found(0.0)[0])


def random_prefixes(N, T, U, K, J, seed, dtype=torch.float64, R=5, band=None):
    """Random prefixes, and those of their tensors that have gradients."""
    g = torch.Generator().manual_seed(seed)
    V, window_TW = 11, Topology(False, band).window(T, U)
    floats = [(N, T, R), (U + 1, N, R), (V, R), (R,), (N, T, window_TW.shape[1], J), (N, T, K)]
    trained = [torch.randn(*shape, generator=g, dtype=dtype, requires_grad=True) for shape in floats]
    index = torch.rand(N, T, V, generator=g).argsort(dim=2)[:, :, :K]
    successor = torch.rand(N, U + 1, V, generator=g).argsort(dim=2)[:, :, :J]
    successor = successor.where(torch.rand(successor.shape, generator=g) > 0.2, -1)
    labels = [torch.randint(V, (N, U + 1), generator=g) for _ in range(2)]
    labels = [part.where(torch.rand(part.shape, generator=g) > 0.1, NO_TOKEN) for part in labels]
    slots_N = torch.full((N,), T)
    return Prefixes(*trained[:4], window_TW, successor, index, *trained[4:], *labels, slots_N), trained
