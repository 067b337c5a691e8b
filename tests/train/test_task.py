"""Packing changes where tokens lie, and nothing else."""

import numpy as np
import pytest
import torch
from bases import write_base

from ctcdraft.data.batches import Sampler
from ctcdraft.data.store import Example, load_corpus, save_corpus
from ctcdraft.model import HeadConfig, build_head, load_base
from ctcdraft.train.task import DraftTask, ObjectiveConfig, base_features

LONGEST = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(12):
        ids = rng.integers(4, 250, int(rng.integers(6, 40))).tolist()
        mask = [int(i >= len(ids) // 3) for i in range(len(ids))]
        examples.append(Example(ids, mask, ids))
    folder = tmp_path_factory.mktemp("corpus")
    save_corpus(folder / "train.safetensors", examples)
    return load_corpus(folder, "train")


def losses(base, task, sampler):
    """{(document, place): loss} of every anchor of an epoch, and the gradient of their sum."""
    task.zero_grad()
    total, anchors = torch.zeros((), dtype=torch.float64), 0
    for step in range(sampler.steps_per_epoch):
        batch = sampler.collate(step, slice(None))
        loss, sums = task(*base_features(base, batch, torch.float64), batch)
        loss.backward()
        total += loss.detach()
        anchors += int(sums.anchors)
    return float(total), anchors, torch.cat([p.grad.flatten() for p in task.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "recall"), [("ctc", False), ("ctc", True), ("medusa", False)])
def test_packed_and_unpacked_losses_and_gradients_are_equal(tmp_path, corpus, attention, kind, recall):
    base = load_base(str(write_base(tmp_path / "b", context=LONGEST)), dtype="fp64")
    base.model.set_attn_implementation(attention)
    torch.manual_seed(0)
    sizes = {"slots": 4, "width": 32, "mixer_width": 16, "heads": 2, "mixer_heads": 2, "recall": recall}
    head = build_head(HeadConfig(kind=kind, **sizes), 32).double()
    if kind == "medusa":
        torch.nn.init.normal_(head.weight, std=0.1)
    objective = ObjectiveConfig("prefix_ctc" if kind == "ctc" else "cross_entropy", labels=4)
    task = DraftTask(head, objective, base)
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
    head = build_head(HeadConfig(slots=4, width=32, mixer_width=16, heads=2, mixer_heads=2), 32).double()
    task = DraftTask(head, ObjectiveConfig(labels=4), base)
    sampler = Sampler(corpus, batch=1, pack=True, anchors=100, labels=4, max_length=LONGEST, seed=0)
    batch = sampler.collate(0, slice(None))
    blind = batch._replace(document_BL=None, place_BL=None)
    assert len(sampler.members[sampler.sequences(0)[0]]) > 1
    with torch.no_grad():
        right, _ = task(*base_features(base, batch, torch.float64), batch)
        wrong, _ = task(*base_features(base, blind, torch.float64), blind)
    assert abs(right - wrong) > 1e-3
