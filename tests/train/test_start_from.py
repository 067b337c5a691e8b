"""A run that begins as another run's head."""

import pytest
import torch
from drafting import TRAINING

from ctcdraft.model import export_head

OPTIONS = ["head=mlp", "objective=cross_entropy", "head.width=16", "head.draft_vocab_size=100"]


def weights(trainer):
    return trainer.step.task.head.state_dict()


def test_it_begins_with_those_weights_and_draft_tokens_and_goes_on_from_its_own_checkpoints(small, tmp_path):
    before = small(tmp_path / "first", *OPTIONS)
    before._one_step()
    weights(before)["draft_ids_X"][-1] += 1  # as other data would have it
    export_head(before.step.task.head, before.base, tmp_path / "first" / "head", TRAINING)
    after = small(tmp_path / "second", *OPTIONS, "train.start_from=first", "optim.lr=0.01")
    assert weights(after).keys() == weights(before).keys()
    assert all(torch.equal(value, weights(after)[name]) for name, value in weights(before).items())
    assert not torch.equal(weights(small(tmp_path / "third", *OPTIONS))["enter.weight"], weights(after)["enter.weight"])
    after._one_step()
    after._save()
    again = small(tmp_path / "second", *OPTIONS, "train.start_from=first", "optim.lr=0.01")
    assert torch.equal(weights(again)["enter.weight"], weights(after)["enter.weight"])
    assert not torch.equal(weights(again)["enter.weight"], weights(before)["enter.weight"])


def test_another_heads_weights_are_refused(small, tmp_path):
    before = small(tmp_path / "first", *OPTIONS)
    export_head(before.step.task.head, before.base, tmp_path / "first" / "head", TRAINING)
    with pytest.raises(ValueError, match=r"train\.start_from: the head in .* is MlpConfig"):
        small(tmp_path / "second", *OPTIONS, "head.width=24", "train.start_from=first")
    with pytest.raises(ValueError, match="no such folder of an exported head"):
        small(tmp_path / "second", *OPTIONS, "train.start_from=nothing")
