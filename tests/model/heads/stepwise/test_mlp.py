"""IBM's speculator: the formulas of its code, its own tables in the loss, and what it is without the tokens."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drafting import random_head

from ctcdraft.data.batches import Batch
from ctcdraft.data.store import Example, corpus_of
from ctcdraft.model.base.context import Anchors
from ctcdraft.model.heads import MlpConfig, head_on
from ctcdraft.train.task import DraftTask, ObjectiveConfig, head_for, roots_of

CONFIG = MlpConfig(slots=4, width=24, beam=3, draft_vocab_size=None)


def literal_states(head, hidden_D, tokens):
    """MLPSpeculator.forward of fms-extras at one position, its lists of tied stages written out."""
    n, width = len(tokens), head.config.width
    state_weight = 0.5 ** (0.5 / head.config.slots)
    token_weight = math.sqrt(1 - state_weight**2)
    proj = [head.enter.weight] + [head.proceed.weight] * (n - 1)
    state = hidden_D / (hidden_D.pow(2).mean() + 1e-6).sqrt() / (2**0.5)
    states = []
    for i in range(n):
        z = head.embedding.weight[tokens[i]] * (token_weight * math.sqrt(width / 2))
        state = (proj[i] @ state) * state_weight + z
        state = state / (state.pow(2).mean() + 1e-6).sqrt() * head.norm.weight + head.shift
        state = 0.5 * state * (1 + torch.erf(state / math.sqrt(2)))
        states.append(state)
    return torch.stack(states)


@pytest.fixture
def batch():
    ids = torch.randint(260, (2, 9))
    labels = torch.stack([ids[0, 4:8], ids[1, 3:7], ids[1, 5:9]])
    rows, positions = torch.tensor([0, 1, 1]), torch.tensor([2, 1, 3])
    return Batch(ids, rows, positions, labels, torch.tensor([4, 4, 3]))


def test_its_states_are_those_of_the_papers_code(base, batch):
    head = random_head(CONFIG, base)
    hidden = torch.randn(2, 9, base.hidden_size).double()
    slots = DraftTask(head, ObjectiveConfig("cross_entropy", labels=4), base).slots(
        hidden, base.embed(batch.ids_BL), batch
    )
    for n, (row, position) in enumerate(zip(batch.batch_N, batch.position_N, strict=True)):
        read = [batch.ids_BL[row, position + 1], *batch.labels_NU[n, :3]]
        assert torch.allclose(slots.states_NTD[n], literal_states(head, hidden[row, position], read), atol=1e-10)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_its_loss_and_gradients_are_those_of_softmaxes_over_its_own_table(base, batch, share):
    """Soft labels are the base's distribution, whose words are another table's."""
    head = random_head(CONFIG, base)
    objective = ObjectiveConfig("cross_entropy", labels=4, decay=1.0, distill=share)
    hidden = base.hidden(batch.ids_BL)
    loss, _ = DraftTask(head, objective, base)(hidden, base.embed(roots_of(batch)), batch)
    want = 0.0
    for n, (row, position) in enumerate(zip(batch.batch_N, batch.position_N, strict=True)):
        states = literal_states(head, hidden[row, position], [batch.ids_BL[row, position + 1], *batch.labels_NU[n, :3]])
        length = int(batch.lengths_N[n])
        log_q = (states @ head.output.weight.T).log_softmax(1)[:length]
        said = base.logits(hidden[row, position + 1 : position + 1 + length]).softmax(1)
        hard = F.one_hot(batch.labels_NU[n, :length], base.vocab_size)
        want = want - ((share * said + (1 - share) * hard) * log_q).sum(1).mean()
    assert torch.allclose(loss, want, atol=1e-9)
    found, truth = (torch.autograd.grad(total, [*head.parameters()]) for total in (loss, want))
    for got, wanted in zip(found, truth, strict=True):
        assert torch.allclose(got, wanted, atol=1e-9)


@pytest.mark.parametrize("width", [24, 96])  # less and more than the base's 32
@pytest.mark.parametrize("size", [None, 100])
def test_a_new_one_expects_what_the_base_says_at_the_same_place(base, width, size):
    """It has learnt nothing yet: its root's embedding is noise, and without the base's rows it knows nothing."""
    ids_1L = torch.randint(260, (1, 200))
    ids = ids_1L[0].numpy()
    corpus = corpus_of([Example(ids, np.ones(len(ids), np.bool_), ids)])
    config = MlpConfig(slots=4, width=width, draft_vocab_size=size)
    hidden = base.hidden(ids_1L)

    def agreement(head):
        tokens = head.draft_vocabulary(base)
        states = head.begin(hidden.float(), head.embedded(tokens, ids_1L.roll(-1), torch.float32))
        both = states @ head.output.weight.T, base.logits(hidden)[..., tokens.ids]
        got, said = (each - each.mean(dim=-1, keepdim=True) for each in both)
        return float(F.cosine_similarity(got.detach().double(), said, dim=-1).mean())

    assert agreement(head_for(config, base, corpus)) > 0.4
    assert abs(agreement(head_on(base, config).float())) < 0.1


def children(tree):
    """{depth: the set of (tokens, conditional probabilities) behind each expanded node}."""
    found = {}
    for node in range(-1, len(tree)):
        own = np.flatnonzero(tree.parents == node)
        if len(own):
            before = 1.0 if node < 0 else tree.psi[node]
            kinds = found.setdefault(int(tree.depths[own[0]]), set())
            kinds.add(tuple((int(tree.tokens[i]), round(float(tree.psi[i] / before), 4)) for i in own))
    return found


def test_without_the_embeddings_nothing_depends_on_the_token_before_as_in_medusa(base):
    head = random_head(CONFIG, base)
    hidden, ids = torch.randn(1, 7, base.hidden_size).double(), torch.randint(260, (1, 7))
    at = Anchors.of(torch.tensor([0]), torch.tensor([6]), 1)

    def drafted(ids):
        (tree,) = head.drafts(hidden, ids, at, head.vocabulary(base, 8))
        return children(tree)

    behind_other_root = drafted((ids + 1) % 260)
    assert drafted(ids) != behind_other_root
    assert all(len(kinds) > 1 for depth, kinds in behind_other_root.items() if depth > 1)
    head.embedding.weight.data.zero_()
    assert drafted(ids) == drafted((ids + 1) % 260)
    assert all(len(kinds) == 1 for kinds in drafted(ids).values())
