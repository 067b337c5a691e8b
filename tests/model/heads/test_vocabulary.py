"""A head that drafts some of the base's tokens: numbers and ids, labels that it cannot draft, and drafts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import random_head, slots_behind

from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.model.draft.tree import search
from ctcdraft.model.export import export_head
from ctcdraft.model.heads import CtcConfig, EagleConfig, GlideConfig, MedusaConfig, MlpConfig, ParallelConfig
from ctcdraft.model.heads.vocabulary import DraftVocabulary, most_frequent

IDS = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29])
KINDS = [
    CtcConfig(slots=4, draft_vocab_size=10),
    CtcConfig(slots=4, draft_vocab_size=10, transition="none", merge=True, band=None),
    ParallelConfig(slots=4, draft_vocab_size=10),
    MedusaConfig(draft_vocab_size=10, slots=4),
    EagleConfig(draft_vocab_size=10, slots=4, width=32, heads=2, beam=3),
    MlpConfig(draft_vocab_size=10, slots=4, width=24, beam=3),
    GlideConfig(draft_vocab_size=10, slots=4, beam=3),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("base"), context=64)), dtype="fp64")


def drafting(config, base):
    head = random_head(config, base)
    head.draft_ids_X.copy_(IDS)
    return head


def test_numbers_and_ids_are_each_others_inverse(base):
    vocabulary = DraftVocabulary(base, IDS)
    assert len(vocabulary) == 10
    assert vocabulary.numbered(vocabulary.ids[torch.arange(10)]).tolist() == list(range(10))
    assert vocabulary.numbered(torch.tensor([[4, 5], [0, 29]])).tolist() == [[10, 2], [10, 9]]
    assert torch.equal(vocabulary.lm_weight, base.lm_weight[IDS])
    embedded = vocabulary.embed(torch.tensor([1, 10]))
    assert torch.equal(embedded[0], base.embed(torch.tensor(3)))
    assert not embedded[1].any()


def test_without_ids_it_is_the_bases_own(base):
    vocabulary = DraftVocabulary(base)
    assert len(vocabulary) == base.vocab_size
    assert vocabulary.lm_weight is base.lm_weight
    labels, lengths = vocabulary.cut(torch.tensor([[4, 5]]), torch.tensor([2]))
    assert (labels.tolist(), lengths.tolist()) == ([[4, 5]], [2])


def test_labels_end_before_the_first_that_cannot_be_drafted(base):
    labels = torch.tensor([[2, 5, 29], [2, 4, 5], [4, 2, 2], [29, 3, 4]])
    numbers, lengths = DraftVocabulary(base, IDS).cut(labels, torch.tensor([2, 3, 3, 2]))
    assert lengths.tolist() == [2, 1, 0, 2]
    assert [row[:n] for row, n in zip(numbers.tolist(), lengths.tolist(), strict=True)] == [[0, 2], [0], [], [9, 1]]


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [-1, 4], [4, 1000]])
def test_ids_that_are_not_the_bases_or_do_not_rise_are_refused(base, ids):
    with pytest.raises(ValueError, match="draft tokens must be rising ids"):
        DraftVocabulary(base, torch.tensor(ids))


def test_the_most_frequent_tokens_of_answers_come_before_those_of_prompts():
    ids = np.array([6, 6, 6, 6, 1, 1, 4, 3])
    answered = np.array([False] * 4 + [True] * 3 + [False])
    assert most_frequent(ids, answered, 8, 2, ()).tolist() == [1, 4]
    assert most_frequent(ids, answered, 8, 3, ()).tolist() == [1, 4, 6]
    assert most_frequent(ids, answered, 8, 2, (7,)).tolist() == [1, 7]


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_drafts_are_of_these_tokens_and_output_stays_the_bases(base, config):
    head = drafting(config, base)
    decoder = Decoder(base, head, DraftConfig(nodes=16, top_k=8, prompt_lookup=0, budget="fixed"))
    drafted: set[int] = set()
    make = decoder.drafter.tree

    def watched(*arguments, **options):
        tree = make(*arguments, **options)
        drafted.update(tree.tokens.tolist())
        return tree

    decoder.drafter.tree = watched
    prompt = [4, 9, 5, 12]  # two of them cannot be drafted
    assert decoder.generate(prompt, 24).tokens == Decoder(base).generate(prompt, 24).tokens
    assert drafted
    assert drafted <= set(IDS.tolist())


def test_its_beliefs_are_the_whole_vocabularys_given_that_a_token_can_be_drafted(base):
    """psi of one slot is the softmax over draft tokens, but for the blank's share."""
    head = drafting(CtcConfig(slots=1, draft_vocab_size=10, transition="none"), base)
    ids = torch.randint(2, 260, (1, 4))
    slots = slots_behind(ids, head, base)
    (lattice,) = head.candidates(slots, ids[:, -1], head.vocabulary(base, 10)).lattices()
    tree = search(lattice, 10)
    p = (slots.states_NTD[0, 0] @ base.lm_weight[IDS].T).softmax(0) * (1 - slots.blank_NT[0].sigmoid())
    want = dict(zip(IDS.tolist(), p.tolist(), strict=True))
    assert {int(t): pytest.approx(want[int(t)], abs=1e-6) for t in tree.tokens} == dict(
        zip(tree.tokens.tolist(), tree.psi.tolist(), strict=True)
    )


def test_an_exported_head_knows_its_tokens(base, tmp_path: Path):
    head = drafting(KINDS[0], base)
    figures = {"objective": "prefix_ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
    export_head(head, base, tmp_path / "head", figures)
    assert torch.equal(load_head(tmp_path / "head", base).draft_ids_X, IDS)
    head.draft_ids_X[0] = 4  # 4, 3, ...: no longer rising
    export_head(head, base, tmp_path / "head", figures)
    with pytest.raises(ValueError, match="draft tokens must be rising ids"):
        load_head(tmp_path / "head", base)
