"""Packing changes where tokens lie, and nothing else."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from bases import write_base
from drafting import random_corpus

from ctcdraft.data.batches import Sampler
from ctcdraft.model import load_base
from ctcdraft.model.heads import HEADS, CtcConfig, EagleConfig, GlideConfig, MedusaConfig, MlpConfig, head_on
from ctcdraft.model.loss.divergence import Divergence
from ctcdraft.model.loss.objective import anchor_losses
from ctcdraft.train.task import (
    DraftTask,
    ObjectiveConfig,
    anchors_of,
    base_features,
    base_says,
    check_fit,
    soft_labels,
)

LONGEST = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), 12, 6, 40)


def losses(base, task, sampler):
    """{(document, place): loss} of every anchor of an epoch, and the gradient of their sum."""
    task.zero_grad()
    total, anchors = torch.zeros((), dtype=torch.float64), 0
    for step in range(sampler.steps_per_epoch):
        batch = sampler.collate(step, slice(None))
        loss, metrics = task(*base_features(base, batch, torch.float64, task.head), batch)
        loss.backward()
        total += loss.detach()
        anchors += int(metrics.anchors)
    return float(total), anchors, torch.cat([p.grad.flatten() for p in task.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "whole"), [("ctc", False), ("ctc", True), ("medusa", False)])
def test_packed_and_unpacked_losses_and_gradients_are_equal(tmp_path, corpus, attention, kind, whole):
    """whole: with a body of the base's layers, and a transition."""
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    torch.manual_seed(0)
    sizes = {"slots": 4, "draft_vocab_size": None}
    config = CtcConfig(**sizes, transition="full" if whole else "none") if kind == "ctc" else MedusaConfig(**sizes)
    head = (head_on(base, config) if whole else HEADS[type(config)](config, base)).double()
    base.model.set_attn_implementation(attention)  # copies keep theirs: eager attention has its softmax in float32
    if head.transition is not None:
        torch.nn.init.normal_(head.transition.to_state.weight)
    if kind == "medusa":
        torch.nn.init.normal_(head.weight, std=0.1)
    objective = ObjectiveConfig("prefix_ctc" if kind == "ctc" else "cross_entropy", labels=4)
    check_packed(base, DraftTask(head, objective, base), corpus)


@pytest.mark.parametrize("config", [EagleConfig(), MlpConfig(), GlideConfig(), GlideConfig(cross=False)])
def test_heads_of_a_pass_per_depth_may_be_packed_too(tmp_path, corpus, config):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    torch.manual_seed(0)
    head = head_on(base, replace(config, slots=4)).double()
    check_packed(base, DraftTask(head, ObjectiveConfig("cross_entropy", labels=4), base), corpus)


def check_packed(base, task, corpus):
    options = {"anchors": 100, "labels": 4, "max_length": LONGEST, "seed": 0}
    packed = Sampler(corpus, batch=1, pack=True, **options)
    assert len(packed.members) < len(corpus)
    want, anchors, gradient = losses(base, task, Sampler(corpus, batch=len(corpus), **options))
    got, packed_anchors, packed_gradient = losses(base, task, packed)
    assert packed_anchors == anchors > 100
    assert abs(got - want) < 1e-9 * want  # float64, sums in another order
    assert torch.allclose(packed_gradient, gradient, rtol=1e-9, atol=1e-9)


def test_without_the_document_mask_the_loss_is_another(tmp_path, corpus):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    torch.manual_seed(0)
    head = head_on(base, CtcConfig(slots=4)).double()
    task = DraftTask(head, ObjectiveConfig(labels=4), base)
    sampler = Sampler(corpus, batch=1, pack=True, anchors=100, labels=4, max_length=LONGEST, seed=0)
    batch = sampler.collate(0, slice(None))
    blind = batch._replace(document_BL=None, place_BL=None)
    assert len(sampler.members[sampler.sequences(0)[0]]) > 1
    with torch.no_grad():
        right, _ = task(*base_features(base, batch, torch.float64, head), batch)
        wrong, _ = task(*base_features(base, blind, torch.float64, head), blind)
    assert abs(right - wrong) > 1e-3


def test_later_prefixes_weigh_less(tmp_path, corpus):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    head = head_on(base, CtcConfig(slots=4, transition="none")).double()
    task = DraftTask(head, ObjectiveConfig(labels=4, decay=0.3, distill=0.0), base)
    sampler = Sampler(corpus, batch=4, anchors=100, labels=4, max_length=LONGEST, seed=0)
    batch = sampler.collate(0, slice(None))
    features = base_features(base, batch, torch.float64, head)
    found, _ = task(*features, batch)
    slots = head(*features, anchors_of(batch))
    out = task.losses(slots, features[0], batch)
    weight_NU = 0.3 ** torch.arange(4).expand(len(out.loss_N), -1) * (torch.arange(4) < batch.lengths_N.unsqueeze(1))
    want_N = -(weight_NU * out.log_psi_NU.where(weight_NU > 0, 0.0)).sum(dim=1) / weight_NU.sum(dim=1)
    assert torch.allclose(found, want_N.sum(), rtol=1e-6)  # weights are float32
    even_N = -out.log_psi_NU.where(weight_NU > 0, 0.0).sum(dim=1) / batch.lengths_N
    assert not torch.allclose(found, even_N.sum(), rtol=1e-2)


def test_soft_labels_are_mean_rows_under_what_the_base_says_there(tmp_path, corpus):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    batch = Sampler(corpus, batch=4, anchors=9, labels=4, max_length=LONGEST, seed=0).collate(0, slice(None))
    hidden = base.hidden(batch.ids_BL)
    said = base_says(base, hidden, batch, base.lm_weight)
    soft_NUD = soft_labels(said, batch.labels_NU, base.lm_weight, share=1.0)
    mean_BLD = base.logits(hidden).softmax(dim=-1) @ base.lm_weight
    seen = 0
    for n, (row, position, length) in enumerate(zip(batch.batch_N, batch.position_N, batch.lengths_N, strict=True)):
        for k in range(int(length)):  # label k is said behind the root and the labels before it
            assert torch.allclose(soft_NUD[n, k], mean_BLD[row, position + 1 + k], atol=1e-12)
            seen += 1
    assert seen > 50
    half_NUD = soft_labels(said, batch.labels_NU, base.lm_weight, share=0.5)
    assert torch.allclose(half_NUD, (soft_NUD + base.lm_weight[batch.labels_NU]) / 2)


def test_a_head_that_is_distilled_learns_another_loss_of_the_same_psi(tmp_path, corpus):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    head = head_on(base, CtcConfig(slots=4)).double()
    batch = Sampler(corpus, batch=4, anchors=9, labels=4, max_length=LONGEST, seed=0).collate(0, slice(None))
    features = base_features(base, batch, torch.float64, head)
    losses = [DraftTask(head, ObjectiveConfig(labels=4, distill=d), base)(*features, batch) for d in (0.0, 1e-9, 1.0)]
    (hard, metrics), (nearly, _), (soft, soft_metrics) = losses
    assert torch.allclose(hard, nearly, rtol=1e-6)
    assert not torch.allclose(hard, soft, rtol=1e-3)
    assert torch.equal(metrics.psi_U, soft_metrics.psi_U)


@pytest.mark.parametrize("divergence", get_args(Divergence))
def test_a_teacher_one_position_off_teaches_something_else(tmp_path, corpus, divergence):
    """A head of slots alone that is the base itself is at no distance from it, and only from it."""
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    batch = Sampler(corpus, batch=4, anchors=9, labels=4, max_length=LONGEST, seed=0).collate(0, slice(None))
    hidden = base.hidden(batch.ids_BL)
    place = (batch.position_N.unsqueeze(1) + 1 + torch.arange(4)).clamp(max=hidden.shape[1] - 1)
    states = hidden[batch.batch_N.unsqueeze(1), place].requires_grad_()
    far = []
    for turned in (hidden, hidden.roll(1, dims=1)):
        teacher = base_says(base, turned, batch, base.lm_weight).teacher(16, divergence, share=1.0)
        given = states, base.lm_weight, None, batch.labels_NU, batch.lengths_N
        far.append(anchor_losses(*given, objective="cross_entropy", teacher=teacher).loss_N.sum())
    assert far[0].abs() < 1e-9
    assert far[1] > 1e-3
    if divergence not in ("tv", "acceptance"):  # these have an edge there
        gradients = [torch.autograd.grad(one, states)[0].abs().max() for one in far]
        assert gradients[0] < 1e-9
        assert gradients[1] > 1e-4


def test_without_a_share_a_divergence_changes_nothing(tmp_path, corpus):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    head = head_on(base, CtcConfig(slots=4)).double()
    batch = Sampler(corpus, batch=4, anchors=9, labels=4, max_length=LONGEST, seed=0).collate(0, slice(None))
    features = base_features(base, batch, torch.float64, head)
    with torch.no_grad():
        hard, alone, half, whole = (
            DraftTask(head, ObjectiveConfig(labels=4, distill=share, divergence=kind), base)(*features, batch)[0]
            for share, kind in ((0.0, None), (0.0, "tv"), (0.5, "tv"), (1.0, "tv"))
        )
    assert torch.equal(hard, alone)
    assert torch.allclose(half, (hard + whole) / 2)
    assert abs(hard - whole) > 0.1


def test_the_papers_objective_has_no_prefixes_to_distil_behind():
    whole = CtcConfig(slots=4, band=None)
    with pytest.raises(ValueError, match="objective=prefix_ctc"):
        check_fit(whole, ObjectiveConfig("ctc", labels=4, divergence="kl"))
    check_fit(whole, ObjectiveConfig("prefix_ctc", labels=4, divergence="kl"))
