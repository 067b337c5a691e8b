"""What the best head is chosen by."""

from unittest.mock import Mock

import numpy as np
import pytest
from drafting import HEADS, prompts, random_head

from ctcdraft.data.store import Example, save_corpus
from ctcdraft.model import Decoder
from ctcdraft.train import loop
from ctcdraft.train.dev import DRAFT, count_dev, dev_sequences


@pytest.fixture(scope="module")
def answered(talking, tmp_path_factory):
    """(folder of prepared data, prompts) whose answers the base has given."""
    folder, asked, rows = tmp_path_factory.mktemp("data"), prompts(12, seed=3), []
    for prompt in asked:
        answer = Decoder(talking).generate(prompt, 25).tokens
        ids = prompt + answer
        rows.append(Example(ids, [0] * len(prompt) + [1] * len(answer), ids))
    save_corpus(folder / "dev.safetensors", rows)
    return folder, asked


@pytest.mark.slow
@pytest.mark.usefixtures("small")  # which makes this process a rank
@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
def test_the_score_is_what_decoding_counts(talking, answered, config):
    folder, asked = answered
    head = random_head(config, talking)
    outs = Decoder(talking, head, DRAFT).generate(asked, 25)
    want = sum(len(out.tokens) - 1 for out in outs) / sum(out.steps for out in outs)
    got = count_dev(talking, config, head.state_dict(), dev_sequences(folder, 200, 10**6))
    assert got == pytest.approx(want, abs=1e-12)
    assert got > 1.02


@pytest.mark.usefixtures("small")
def test_without_development_sequences_the_score_is_that_of_plain_decoding(talking, tmp_path):
    save_corpus(tmp_path / "dev.safetensors", [])
    head = random_head(HEADS[0], talking)
    assert count_dev(talking, HEADS[0], head.state_dict(), dev_sequences(tmp_path, 200, 10**6)) == 1.0


@pytest.mark.usefixtures("small")
def test_where_heads_cannot_be_compared_the_last_one_is_exported_and_a_warning_says_so(small, tmp_path, capsys):
    trainer = small(tmp_path, "train.eval_every=2", "train.steps=4")
    trainer.dev = []
    trainer.run(None)
    assert (trainer.state.best, trainer.state.best_step) == (1.0, 4)
    assert capsys.readouterr().err.count("the last head is the best") == 1


def test_scores_compare_whatever_a_sitting_drafts_with(small, tmp_path):
    drafts = ("draft.nodes=8", "draft.nodes=1", "draft.prompt_lookup=0")
    scores = [small(tmp_path / str(number), draft)._evaluate() for number, draft in enumerate(drafts)]
    assert scores[0] > 1.0
    assert scores == [scores[0]] * 3


def test_a_long_evaluation_is_no_hang(small, tmp_path, monkeypatch):
    trainer, limits = small(tmp_path), []
    trainer.watchdog = Mock()
    monkeypatch.setattr(loop, "count_dev", lambda *_: limits.append(trainer.watchdog.moved.call_args.args[1]) or 1.0)
    trainer._evaluate()
    assert limits == [None]


def test_sequences_are_drawn_of_all_lengths_and_as_many_as_hold_the_drafts(tmp_path):
    examples = [Example([5] * length, [0] + [1] * (length - 1), [5] * length) for length in range(3, 103)]
    save_corpus(tmp_path / "dev.safetensors", examples)
    every = dev_sequences(tmp_path, 60, 10**6)
    assert sorted(len(known.tokens) for known in every) == [min(length, 60) for length in range(3, 103)]
    some = dev_sequences(tmp_path, 60, 1000)
    lengths = [len(known.tokens) for known in some]
    assert [len(known.tokens) for known in every[: len(some)]] == lengths
    drafts = [length - 2 for length in lengths]
    assert sum(drafts[:-1]) < 1000 <= sum(drafts)
    assert 25 < np.mean(lengths) < 55


def test_a_score_is_logged_at_steps_too_whose_figures_are_not_due(small, tmp_path, monkeypatch):
    trainer = small(tmp_path, "train.log_every=5", "train.eval_every=2")
    monkeypatch.setattr(trainer, "_evaluate", lambda: 1.5)
    rows = [trainer._one_step() for _ in range(3)]
    assert [row and row.get("dev/tokens_per_step") for row in rows] == [None, 1.5, None]
