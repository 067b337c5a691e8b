import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.data.batches import Sampler, anchor_positions
from ctcdraft.data.store import Example, load_corpus, save_corpus


def corpus_of(tmp_path, examples):
    save_corpus(tmp_path / "train.safetensors", examples)
    return load_corpus(tmp_path, "train")


def random_examples(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        length = int(rng.integers(3, longest))
        ids = rng.integers(1, 100, length)
        mask = (np.arange(length) >= rng.integers(1, length)).astype(int)
        examples.append(Example(ids.tolist(), mask.tolist(), ids.tolist()))
    return examples


@settings(max_examples=200, deadline=None)
@given(mask=st.lists(st.integers(0, 1), max_size=20), labels=st.integers(1, 6))
def test_labels_never_leave_the_answer_and_no_anchor_is_missed(mask, labels):
    positions, lengths = anchor_positions(np.array(mask, np.uint8), labels)
    found = dict(zip(positions.tolist(), lengths.tolist(), strict=True))
    for t in range(len(mask)):
        run = 0
        while t + 2 + run < len(mask) and mask[t + 2 + run]:
            run += 1
        is_anchor = t + 1 < len(mask) and mask[t + 1] == 1 and run > 0
        assert (t in found) == is_anchor
        if is_anchor:
            assert found[t] == min(run, labels)


def test_stored_examples_come_back(tmp_path):
    examples = random_examples(5)
    corpus = corpus_of(tmp_path, examples)
    for got, want in zip((corpus[i] for i in range(5)), examples, strict=True):
        assert [list(map(int, column)) for column in got] == [list(column) for column in want]


def sampler_of(tmp_path, batch=4, anchors=3, count=37, seed=5, max_length=64):
    return Sampler(
        corpus_of(tmp_path, random_examples(count)),
        batch=batch,
        anchors=anchors,
        labels=4,
        max_length=max_length,
        seed=seed,
    )


def test_an_epoch_sees_every_sequence_at_most_once_and_then_reshuffles(tmp_path):
    sampler = sampler_of(tmp_path)
    steps = sampler.steps_per_epoch
    first = np.concatenate([sampler.sequences(s) for s in range(steps)])
    second = np.concatenate([sampler.sequences(steps + s) for s in range(steps)])
    assert len(set(first.tolist())) == len(first) == 36
    assert not np.array_equal(first, second)
    again = sampler_of(tmp_path)
    assert np.array_equal(again.sequences(steps + 3), sampler.sequences(steps + 3))


def test_ranks_share_a_step_without_overlap_and_see_the_same_anchors(tmp_path):
    sampler = sampler_of(tmp_path)
    for step in (0, 3, 11):
        whole = sampler.collate(step, slice(0, 4))
        halves = [sampler.collate(step, slice(0, 2)), sampler.collate(step, slice(2, 4))]
        assert whole.labels_NU.tolist() == [row for half in halves for row in half.labels_NU.tolist()]
        assert whole.position_N.tolist() == [p for half in halves for p in half.position_N.tolist()]
        assert int(sampler.anchor_counts(step).sum()) == len(whole.lengths_N)


def test_labels_are_the_tokens_after_the_root(tmp_path):
    sampler = sampler_of(tmp_path)
    batch = sampler.collate(2, slice(0, 4))
    for n in range(len(batch.lengths_N)):
        row, position, length = int(batch.batch_N[n]), int(batch.position_N[n]), int(batch.lengths_N[n])
        assert batch.labels_NU[n, :length].tolist() == batch.ids_BL[row, position + 2 : position + 2 + length].tolist()


def test_fewer_sequences_than_a_batch_repeat(tmp_path):
    sampler = sampler_of(tmp_path, batch=8, count=3)
    assert len(sampler.sequences(0)) == 8
    assert set(sampler.sequences(0).tolist()) == {0, 1, 2}


def test_long_sequences_are_cut(tmp_path):
    sampler = sampler_of(tmp_path, max_length=6)
    assert sampler.collate(0, slice(0, 4)).ids_BL.shape[1] <= 6


def test_no_answer_within_the_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no answer lies within"):
        sampler_of(tmp_path, max_length=1)


def test_no_sequences_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no training sequence"):
        sampler_of(tmp_path, count=0)
