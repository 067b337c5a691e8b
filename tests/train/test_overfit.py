import dataclasses
import json

import numpy as np
import pytest
import torch
from overfitted import SMALL
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ctcdraft.data import batches
from ctcdraft.model import load_base
from ctcdraft.model.decode.step import EagerStep
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import CtcConfig, head_config
from ctcdraft.train.engine import OptimConfig, ZeroConfig
from ctcdraft.train.overfit import OverfitCheck
from ctcdraft.train.prepare import DataConfig
from ctcdraft.train.regenerate import Dialogue, RegenerateConfig
from ctcdraft.train.step import Plan, TrainConfig
from ctcdraft.train.task import ObjectiveConfig
from ctcdraft.train.toy_base import toy_base

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Pretend that you are a gardener in London. Mia asks you about your day."}]
STAGES = ["tokenizer", "mask", "labels", "loss", "verification"]


@pytest.fixture(scope="module")
def toy(common_cache):
    """Small, but with a language of its own: a random base would take any tokenizer for its own."""
    return load_base(str(toy_base(common_cache, SMALL)))


@pytest.fixture(scope="module", params=["toy", "smollm2_base", "smollm2_bf16"])
def trained_base(request):
    return request.getfixturevalue(request.param)


def check_of(base, kind="ctc", objective="prefix_ctc", steps=400, **options):
    sizes = {"draft_vocab_size": 4096} | options
    head = head_config({"kind": kind, **sizes})
    objective = ObjectiveConfig(objective, labels=12)
    plan = Plan(head, objective, OptimConfig(), ZeroConfig(), TrainConfig(), DraftConfig(), seed=0)
    return OverfitCheck(base, MESSAGES, plan, DataConfig(), answer_tokens=32, steps=steps)


def findings(*given, **options):
    return check_of(*given, **options).findings()


PAPER = {"slots": 7, "merge": True, "band": None, "transition": "none"}


@pytest.mark.parametrize(
    ("kind", "objective", "options"),
    [
        ("ctc", "prefix_ctc", PAPER),
        ("ctc", "prefix_ctc", {"slots": 13, "merge": False, "band": 1, "transition": "none"}),
        ("ctc", "ctc", PAPER),
        ("parallel", "cross_entropy", {}),
    ],
)
def test_a_sound_pipeline_passes_every_stage(toy, kind, objective, options):
    found = findings(toy, kind, objective, **options)
    assert [f.stage for f in found if f.agrees] == STAGES, found[-1]
    assert "a whole draft of" in found[-1].seen


AS_DEFAULT = {"slots": 13, "merge": False, "band": 1, "transition": "full", "draft_vocab_size": None}


def test_the_default_head_passes_every_stage_on_any_base_until_verification_accepts_anything(trained_base, monkeypatch):
    check = check_of(trained_base, **AS_DEFAULT)
    found = check.findings()
    assert [f.stage for f in found if f.agrees] == STAGES, found[-1]
    walks = EagerStep._walks

    def trusting(self, drafts, hidden):
        found = walks(self, drafts, hidden)
        wrong = [dataclasses.replace(one, bonus=(one.bonus + 1) % 300) for one in found]
        return [other if len(tree) else one for tree, one, other in zip(drafts, found, wrong, strict=True)]

    monkeypatch.setattr(EagerStep, "_walks", trusting)
    found = check.findings()[-1]
    assert (found.stage, found.agrees) == ("verification", False)


def another_tokenizer(base):
    """The same words, other numbers: what a tokenizer of another release looks like."""
    state = json.loads(base.tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    special = {token["content"] for token in state["added_tokens"]}
    words = [word for word in vocab if word not in special]
    order = np.random.default_rng(0).permutation(len(words))
    state["model"]["vocab"] |= {words[i]: vocab[words[j]] for i, j in enumerate(order)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token=base.tokenizer.bos_token,
        eos_token=base.tokenizer.eos_token,
    )
    tokenizer.chat_template = base.tokenizer.chat_template
    return dataclasses.replace(base, tokenizer=tokenizer)


def first_disagreement(base):
    (last,) = [f for f in findings(base, steps=1) if not f.agrees]
    return last


def test_another_tokenizer_is_named(trained_base):
    found = first_disagreement(another_tokenizer(trained_base))
    assert found.stage == "tokenizer"
    assert found.seen.startswith("another tokenizer")


@pytest.mark.parametrize("fault", ["one early", "the end left out", "everything"])
def test_a_wrong_mask_is_named(trained_base, monkeypatch, fault):
    true = Dialogue.examples
    faults = {
        "one early": lambda mask: [*mask[1:], 1],
        "the end left out": lambda mask: [*mask[:-1], 0],
        "everything": lambda mask: [1] * len(mask),
    }

    def wrong(self, turns):
        return [example._replace(mask=faults[fault](example.mask)) for example in true(self, turns)]

    monkeypatch.setattr(Dialogue, "examples", wrong)
    found = first_disagreement(trained_base)
    assert (found.stage, found.seen[:10]) == ("mask", "wrong mask")


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_labels_are_named(trained_base, monkeypatch, shift):
    true = batches.Sampler.collate

    def shifted(self, step, members):
        batch = true(self, step, members)
        at = batch.position_N.unsqueeze(1) + 2 + shift + torch.arange(self.labels)
        labels = batch.ids_BL[batch.batch_N.unsqueeze(1), at.clamp(max=batch.ids_BL.shape[1] - 1)]
        return batch._replace(labels_NU=labels)

    monkeypatch.setattr(batches.Sampler, "collate", shifted)
    found = first_disagreement(trained_base)
    assert (found.stage, found.seen[:14]) == ("labels", "shifted labels")


def test_a_head_that_cannot_learn_is_named(trained_base):
    found = findings(trained_base, steps=2)[-1]
    assert (found.stage, found.agrees) == ("loss", False)


DATA = DataConfig()


def check(base, messages=MESSAGES, data=DATA, **objective):
    objective = ObjectiveConfig(labels=4, **objective)
    plan = Plan(CtcConfig(slots=5), objective, OptimConfig(), ZeroConfig(), TrainConfig(), DraftConfig())
    return OverfitCheck(base, messages, plan, data, answer_tokens=8)


def test_the_labels_are_the_bases_own_words_whatever_a_runs_policy_is(base):
    task = check(base, policy="mixed").task
    assert (task.objective.policy, task.objective.distill) == ("base", 0.0)


def test_data_of_several_paths_in_shares_is_checked(base):
    data = DataConfig(kind="mixed", path=["chats.jsonl", "texts.json"], weights=[0.8, 0.2])
    assert check(base, data=data).ids == check(base).ids


def test_the_answer_is_greedy_whatever_the_temperatures_of_the_data_are(base):
    data = DataConfig(regenerate=RegenerateConfig(temperatures=[1.0, 0.7]))
    assert check(base, data=data).ids == check(base).ids


def test_a_question_of_one_token_says_nothing_of_the_tokenizer(base):
    assert check(base, [{"role": "user", "content": "h"}]).tokenizer() == "the question is one token: not judged"
