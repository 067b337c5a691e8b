"""Masked diffusion: what a slot is shown, what is learnt of it, and how a draft is refined."""

from itertools import product

import pytest
import torch
from bases import write_base
from drafting import random_head

from ctcdraft.data.batches import Batch
from ctcdraft.model import load_base
from ctcdraft.model.base.context import Anchors
from ctcdraft.model.heads import ParallelConfig, head_config, head_on
from ctcdraft.model.heads.diffusion import DiffusionConfig
from ctcdraft.train.task import DraftTask, ObjectiveConfig

T = 3


@pytest.fixture
def whole(base):
    """Of random weights, over the whole vocabulary."""
    return random_head(DiffusionConfig(slots=T, layers=1, draft_vocab_size=None, fills=T), base)


def reading(base, head, B=2, L=6, seed=0):
    """Hidden states, roots and anchors of every position but the last of random sequences."""
    ids = torch.randint(2, 260, (B, L), generator=torch.Generator().manual_seed(seed)).to(base.device)
    rows, places = torch.arange(B).repeat_interleave(L - 1), torch.arange(L - 1).repeat(B)
    anchors = Anchors.of(rows.to(base.device), places.to(base.device), B, None)
    return base.hidden(ids, attended=head.attended), base.embed(ids.roll(-1, 1)), anchors


def with_mask(head, monkeypatch, mask_T, N):
    """`forward` masks these slots of every anchor."""
    draws = [~torch.tensor(mask_T).expand(N, -1) * 1.0, torch.full((N, 1), 0.5)]
    monkeypatch.setattr(torch, "rand", lambda *size, device=None: draws.pop(0).to(device))


def test_one_fill_is_a_parallel_heads(base, whole):
    control = head_on(base, ParallelConfig(slots=T, layers=1, draft_vocab_size=None)).to(base.device, base.dtype).eval()
    control.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("show.")})
    given = reading(base, whole)
    assert torch.equal(whole.fill(*given).states_NTD, control.fill(*given).states_NTD)


@pytest.mark.parametrize("mask_T", list(product([True, False], repeat=T)))
def test_the_masked_loss_is_the_formula(base, whole, monkeypatch, mask_T):
    """Mean over the masked slots of -w_k log p_k(y_k), for every mask of three slots."""
    ids = torch.randint(2, 260, (1, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.stack([ids[0, 2:5], ids[0, 3:6], ids[0, 4:7]])
    lengths = torch.tensor([3, 0, 3])  # the second has no label, and no loss
    batch = Batch(ids, torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]), labels, lengths).to(base.device)
    objective = ObjectiveConfig(kind="cross_entropy", labels=T, negatives=None, distill=0.0)
    task, hidden = DraftTask(whole, objective, base), base.hidden(batch.ids_BL, attended=whole.attended)
    with_mask(whole, monkeypatch, mask_T, 3)
    slots = task.slots(hidden, base.embed(batch.ids_BL.roll(-1, 1)), batch)
    loss_N = task.losses(slots, hidden, batch).loss_N
    log_p_NT = (slots.states_NTD @ base.lm_weight.T).log_softmax(2).gather(2, batch.labels_NU.unsqueeze(2)).squeeze(2)
    weight_T = torch.tensor([0.8**k * masked for k, masked in enumerate(mask_T)], dtype=torch.float64)
    want_N = -(log_p_NT.cpu() * weight_T).sum(1) / weight_T.sum().clamp(min=1e-30) * (lengths > 0)
    assert torch.allclose(loss_N.cpu(), want_N)


def test_a_label_does_not_leak_through_its_own_slot(base, whole, monkeypatch):
    hidden, root, anchors = reading(base, whole)
    N = len(anchors.position_N)
    label = torch.randn(N, T, base.hidden_size, dtype=base.dtype, device=base.device, requires_grad=True)
    with_mask(whole, monkeypatch, [False, True, True], N)
    slots = whole(hidden, root, anchors, label)
    assert slots.learnt_NT.tolist() == [[False, True, True]] * N
    for k in range(1, T):
        grad = torch.autograd.grad(slots.states_NTD[:, k].sum(), label, retain_graph=True)[0]
        assert grad[:, 0].abs().sum() > 0  # what is shown is seen
        assert grad[:, 1:].abs().sum() == 0


def test_labels_that_are_not_there_are_masked(base, whole):
    hidden, root, anchors = reading(base, whole)
    label = torch.zeros(len(anchors.position_N), 2, base.hidden_size, dtype=base.dtype, device=base.device)
    slots = whole(hidden, root, anchors, label)
    assert slots.learnt_NT.all()
    assert torch.equal(slots.states_NTD, whole.fill(hidden, root, anchors).states_NTD)


def test_each_fill_sees_the_surest_tokens_of_the_one_before(base, whole):
    """By hand, one anchor at a time; and other tokens would have given other states."""
    hidden, root, anchors = reading(base, whole)
    tokens = whole.draft_vocabulary(base)
    got = whole.fill(hidden, root, anchors, tokens=tokens).states_NTD
    own_root = anchors.own(root)
    for n in range(len(anchors.position_N)):
        shown, kept = {}, None
        for number in range(T):
            mark, token = torch.zeros_like(got), own_root.unsqueeze(1).expand_as(got).clone()
            for k, id_ in shown.items():
                token[n, k] = base.embed(torch.tensor(id_, device=base.device))
                mark[n, k] = whole.show(torch.nn.functional.rms_norm(token[n, k], token.shape[-1:]))
            states = whole.states(hidden, root, anchors, shown=(mark, token))[n]
            kept = states if kept is None else torch.stack([kept[k] if k in shown else states[k] for k in range(T)])
            log_p = (kept @ base.lm_weight.T).log_softmax(1)
            left = [k for k in range(T) if k not in shown]
            surest = max(left, key=lambda k: log_p[k].max())
            assert number == T - 1 or surest not in shown
            shown[surest] = int(log_p[surest].argmax())
        assert torch.allclose(got[n], kept, atol=1e-10)
    once = whole.fill(hidden, root, anchors).states_NTD
    assert not torch.allclose(got, once)


def test_more_fills_than_slots_are_refused():
    with pytest.raises(ValueError, match=r"head\.fills=4"):
        head_config({"kind": "diffusion", "slots": 3, "fills": 4})


def test_a_base_without_layers_to_copy_has_blocks(tmp_path):
    base = load_base(str(write_base(tmp_path / "b", "gpt_neox")), dtype="fp64")
    head = random_head(DiffusionConfig(slots=T, layers=1, draft_vocab_size=None, fills=2), base)
    given = reading(base, head)
    states = head.fill(*given, tokens=head.draft_vocabulary(base)).states_NTD
    assert states.isfinite().all()
    assert not torch.equal(states, head.fill(*given).states_NTD)
