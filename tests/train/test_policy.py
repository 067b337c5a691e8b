"""Labels that the head drafts, and what the base says of them."""

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import random_corpus, random_head

from ctcdraft.data.batches import Sampler
from ctcdraft.launch.cli import _quoted, compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.heads import CtcConfig, EagleConfig, GlideConfig, MedusaConfig, ParallelConfig
from ctcdraft.model.replay import Transcript, drafts_along
from ctcdraft.train.policy import on_policy, states_behind
from ctcdraft.train.task import DraftTask, ObjectiveConfig, base_features

HEADS = [
    CtcConfig(slots=5, layers=1, rank=8),
    MedusaConfig(slots=5, layers=2),
    EagleConfig(slots=5, width=32, beam=3),
    GlideConfig(slots=5, beam=3),
]
U = 4


@pytest.fixture(scope="module")
def exact_base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("base") / "b", initializer_range=0.2)), dtype="fp64")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), 6, 8, 24)


def a_batch(corpus, *, pack=False, labels=U):
    return Sampler(corpus, batch=2, anchors=5, labels=labels, max_length=64, seed=0, pack=pack).collate(0, slice(None))


def read_before(batch, n):
    """The document of an anchor up to its root."""
    b, root = int(batch.batch_N[n]), int(batch.position_N[n]) + 1
    first = 0 if batch.place_BL is None else root - int(batch.place_BL[b, root])
    return batch.ids_BL[b, first : root + 1].tolist()


def drafted(policy, head, base, batch):
    return on_policy(policy, head, base, batch, base_features(base, batch, torch.float64, head)[0])


@pytest.mark.parametrize("labels", [1, 2, U])
@pytest.mark.parametrize("pack", [False, True])
def test_the_states_are_those_of_reading_each_text_alone(exact_base, corpus, pack, labels):
    batch = a_batch(corpus, pack=pack, labels=labels)
    batch = batch._replace(labels_NU=torch.randint(4, 30, batch.labels_NU.shape))
    said_NUD = states_behind(exact_base, batch)
    assert said_NUD.shape == (len(batch.batch_N), labels, exact_base.hidden_size)
    for n in range(len(batch.batch_N)):
        path = batch.labels_NU[n, : labels - 1].tolist()
        alone = exact_base.hidden(torch.tensor([read_before(batch, n) + path]))[0, -labels:]
        assert torch.allclose(said_NUD[n], alone, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
def test_labels_are_the_chains_that_the_head_drafts_when_it_decodes(exact_base, corpus, config, pack):
    head, batch = random_head(config, exact_base), a_batch(corpus, pack=pack)
    found = drafted("draft", head, exact_base, batch)
    decoder = Decoder(exact_base, head, DraftConfig("chain", U, prompt_lookup=0, budget="fixed"))
    drafts = 0
    for n in range(len(batch.batch_N)):
        text, length = read_before(batch, n), int(batch.lengths_N[n])
        tokens = np.array([*text, *[4] * (length + 1)])  # room for as many drafts
        known = Transcript(tokens, np.arange(len(tokens)) >= len(text) - 1)
        _, _, chain = next(drafts_along(exact_base, {"": decoder}, [known], progress=False))
        drafts += len(chain) > 0
        wanted = chain.tokens.tolist() or batch.labels_NU[n, :length].tolist()
        assert found.labels_NU[n, : int(found.lengths_N[n])].tolist() == wanted
    assert drafts > 3
    assert torch.equal(found.batch_N, batch.batch_N)
    assert not torch.equal(found.labels_NU, batch.labels_NU)


def test_the_loss_is_the_cross_entropy_from_what_the_base_says_behind_each_draft(exact_base, corpus):
    head = random_head(ParallelConfig(slots=U, draft_vocab_size=None), exact_base)
    batch = a_batch(corpus)
    features = base_features(exact_base, batch, torch.float64, head)
    found = drafted("draft", head, exact_base, batch)
    task = DraftTask(head, ObjectiveConfig("cross_entropy", labels=U, policy="draft", negatives=None), exact_base)
    loss, _ = task(*features, found)
    slots, wanted = task.slots(*features, found).states_NTD, torch.zeros((), dtype=torch.float64)
    for n, length in enumerate(found.lengths_N.tolist()):
        path, weights = found.labels_NU[n].tolist(), 0.8 ** torch.arange(length, dtype=torch.float64)
        for k in range(length):
            said = exact_base.hidden(torch.tensor([read_before(batch, n) + path[:k]]))[0, -1]
            p_V = exact_base.logits(said).softmax(dim=-1)
            log_q_V = (slots[n, k] @ exact_base.lm_weight.T).log_softmax(dim=-1)
            wanted = wanted - weights[k] / weights.sum() * (p_V * log_q_V).sum()
    assert torch.allclose(loss, wanted, rtol=1e-9)
    shifted = found._replace(said_NUD=found.said_NUD.roll(1, dims=1))  # the teacher one prefix off
    assert not torch.allclose(task(*features, shifted)[0], wanted, rtol=1e-3)
    own = DraftTask(head, ObjectiveConfig("cross_entropy", labels=U, negatives=None), exact_base)
    assert not torch.allclose(own(*features, batch)[0], wanted, rtol=1e-3)


def test_mixed_is_half_of_each_and_what_the_base_said_is_still_said(exact_base, corpus):
    head, batch = random_head(HEADS[0], exact_base), a_batch(corpus)
    whole = drafted("draft", head, exact_base, batch)
    torch.manual_seed(3)
    mixed = drafted("mixed", head, exact_base, batch)
    own_N = (mixed.labels_NU == batch.labels_NU).all(dim=1) & (mixed.lengths_N == batch.lengths_N)
    theirs_N = (mixed.labels_NU == whole.labels_NU).all(dim=1) & (mixed.lengths_N == whole.lengths_N)
    assert bool((own_N | theirs_N).all())
    assert 0 < int(own_N.sum()) < len(own_N)
    hidden_BLD = exact_base.hidden(batch.ids_BL)
    for n in own_N.nonzero().squeeze(1).tolist():
        root, length = int(batch.position_N[n]) + 1, int(batch.lengths_N[n])
        assert torch.allclose(mixed.said_NUD[n, :length], hidden_BLD[batch.batch_N[n], root : root + length], atol=1e-9)
    torch.manual_seed(3)
    again = drafted("mixed", head, exact_base, batch)
    assert torch.equal(again.labels_NU, mixed.labels_NU)


@pytest.mark.parametrize("pack", [False, True])
def test_who_has_a_row_changes_none_of_its_labels(exact_base, corpus, pack):
    """Both rows in one micro-batch, or each in one of its own, on whichever rank."""
    head = random_head(HEADS[0], exact_base)
    options = {"batch": 2, "anchors": 5, "labels": U, "max_length": 40, "seed": 0, "pack": pack}
    found = {}
    for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        labels = []
        for part in parts:
            torch.manual_seed(7)
            batch = drafted("mixed", head, exact_base, Sampler(corpus, **options).collate(0, part))
            labels += [one[:n].tolist() for one, n in zip(batch.labels_NU, batch.lengths_N, strict=True)]
        found[len(parts)] = labels
    assert found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["draft", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("objective.divergence=reverse_kl",),
        ("head=eagle", "objective=cross_entropy"),
        ("train.precision=bf16", "train.pack=true", "data.features=bf16"),
    ],
)
def test_a_run_trains_and_resumes_with_it(small, tmp_path, policy, options):
    words = (f"objective.policy={policy}", *options)
    whole, parts = small(tmp_path / "whole", *words), small(tmp_path / "parts", *words)
    for _ in range(4):
        row = whole._one_step()
    assert np.isfinite(row["train/loss"])
    for _ in range(2):
        parts._one_step()
    parts._save()
    parts = small(tmp_path / "parts", *words)
    for _ in range(2):
        again = parts._one_step()
    assert again["train/loss"] == row["train/loss"]


def test_what_does_not_go_together_is_refused():
    def entry(*words):
        return typed(compose("train", ["experiment=smoke", *map(_quoted, words)]), TrainEntry)

    with pytest.raises(ValueError, match=r"objective\.policy=draft needs objective\.distill=1\.0"):
        entry("objective.policy=draft", "objective.distill=0.5")
    with pytest.raises(ValueError, match=r"objective\.policy=mixed drafts with whole weights: take zero=2 or lower"):
        entry("objective.policy=mixed", "zero=3")
    assert entry("objective.policy=mixed", "zero=2").objective.policy == "mixed"
