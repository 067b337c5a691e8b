import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from workers import NO_DISK, joining

from ctcdraft.data.batches import Sampler, anchor_positions, first_fit
from ctcdraft.data.store import Example, join_corpora, load_corpus, save_corpus
from ctcdraft.model.folders import new_folder


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


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"{}" + b, lambda b: b[:20], lambda b: b"", lambda b: b + b"x"]
)
def test_a_damaged_file_is_one_sentence(tmp_path, damage):
    save_corpus(tmp_path / "train.safetensors", random_examples(3))
    path = tmp_path / "train.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="is missing or damaged: delete"):
        load_corpus(tmp_path, "train")
    with pytest.raises(ValueError, match=r"dev\.safetensors is missing or damaged: delete"):
        load_corpus(tmp_path, "dev")


def test_joined_parts_are_what_one_file_would_be(tmp_path):
    examples = random_examples(9)
    save_corpus(tmp_path / "whole.safetensors", examples)
    cuts = [examples[:4], [], examples[4:5], examples[5:]]
    parts = [tmp_path / f"{i}.safetensors" for i in range(len(cuts))]
    for part, cut in zip(parts, cuts, strict=True):
        save_corpus(part, cut)
    join_corpora(tmp_path / "joined.safetensors", parts)
    whole, joined = (load_corpus(tmp_path, name) for name in ("whole", "joined"))
    for name in ("ids", "mask", "labels", "offsets"):
        assert getattr(whole, name).tolist() == getattr(joined, name).tolist()
    published = load_file(tmp_path / "joined.safetensors")  # the format is the library's own
    assert published["ids"].tolist() == whole.ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("kilobytes", "fits"), [(64, False), (128, False), (512, True)])
def test_a_disk_that_fills_up_is_one_sentence_and_no_signal(tmp_path, kilobytes, fits):
    """Where the columns alone do not fit, where they do and their file does not, and where all does."""
    parts, disk = [tmp_path / f"{i}.safetensors" for i in range(3)], tmp_path / "disk"
    disk.mkdir()
    for part in parts:
        save_corpus(part, [Example([1] * 3000, [1] * 3000, [1] * 3000)])
    child = joining(parts, disk, kilobytes)
    child.start()
    child.join()
    if child.exitcode == NO_DISK:
        pytest.skip("no disk can be mounted here")
    assert child.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert (said == "") if fits else ("disk/joined could not be written (" in said)


def test_a_disk_that_fills_up_while_a_shard_is_saved_is_one_sentence(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        refused = pytest.raises(OSError, match=r"shard could not be written \(.*: make room")
        with refused, new_folder(tmp_path / "shard") as fresh:
            save_corpus(fresh / "train.safetensors", random_examples(50))
        assert not list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
        assert sampler.anchor_count(step) == len(whole.lengths_N)


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
    with pytest.raises(ValueError, match=r"no answer has two tokens within the first train\.max_length=1 of"):
        sampler_of(tmp_path, max_length=1)
    short = [Example([5, 6, 7], mask, [5, 6, 7]) for mask in ([0, 0, 1], [0, 1, 0])] + [Example([5], [1], [5])]
    with pytest.raises(ValueError, match="no answer has two tokens within"):  # a root, and a label behind it
        Sampler(corpus_of(tmp_path, short), batch=1, anchors=3, labels=4, max_length=64, seed=0)


def test_no_sequences_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no training sequence"):
        sampler_of(tmp_path, count=0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), max_length=st.integers(8, 60), labels=st.integers(1, 6))
def test_packed_rows_hold_the_same_anchors_and_no_label_crosses_a_document_or_leaves_an_answer(
    tmp_path_factory, seed, max_length, labels
):
    examples = random_examples(9, seed)
    corpus = corpus_of(tmp_path_factory.mktemp("c"), examples)
    options = {"anchors": 100, "labels": labels, "max_length": max_length, "seed": seed}
    try:
        packed = Sampler(corpus, batch=1, pack=True, **options)
    except ValueError:
        return  # no answer has two tokens within so few
    plain = Sampler(corpus, batch=len(corpus), **options)
    (whole,) = (anchors_of(plain.collate(0, slice(None)), corpus, plain.sequences(0)[:, None]),)
    found = []
    for step in range(packed.steps_per_epoch):
        batch = packed.collate(step, slice(None))
        members = [packed.members[row] for row in packed.sequences(step)]
        found += anchors_of(batch, corpus, members)
        assert packed.anchor_count(step) == len(batch.lengths_N)
        assert packed.tokens(step) == int((batch.document_BL >= 0).sum()) <= max_length
        for n, (row, position) in enumerate(zip(batch.batch_N.tolist(), batch.position_N.tolist(), strict=True)):
            length = int(batch.lengths_N[n])
            span = slice(position, position + 2 + length)
            number = members[row][int(batch.document_BL[row, position])]
            place = int(batch.place_BL[row, position])
            assert len(set(batch.document_BL[row, span].tolist())) == 1
            assert corpus[number].mask[place + 1 : place + 2 + length].all()
            assert batch.labels_NU[n, :length].tolist() == batch.ids_BL[row, position + 2 : span.stop].tolist()
    assert sorted(found) == sorted(whole)


def anchors_of(batch, corpus, members):
    """(document, place in it, labels) of every anchor."""
    document_BL = torch.zeros_like(batch.ids_BL) if batch.document_BL is None else batch.document_BL
    place_BL = torch.arange(batch.ids_BL.shape[1]).expand_as(document_BL) if batch.place_BL is None else batch.place_BL
    return [
        (int(members[b][int(document_BL[b, t])]), int(place_BL[b, t]), tuple(labels[:length]))
        for b, t, labels, length in zip(*(column.tolist() for column in batch[1:5]), strict=True)
    ]


def test_the_packing_of_short_sequences_saves_most_padding(tmp_path):
    corpus = corpus_of(tmp_path, random_examples(400))
    options = {"batch": 4, "anchors": 3, "labels": 4, "max_length": 64, "seed": 0}
    packed = Sampler(corpus, pack=True, **options)
    assert packed.padding < 0.03
    rows = Sampler(corpus, **options)
    assert 0 < rows.padding < 0.5
    assert len(packed.members) < len(rows.members) / 3


LENGTHS = st.lists(st.integers(1, 30), max_size=40)


def first_fit_plainly(lengths, capacity):
    rows, room = [], []
    for number, length in enumerate(min(n, capacity) for n in lengths):
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(number)
        room[row] -= length
    return rows


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 40))
def test_it_is_first_fit(lengths, capacity):
    assert [row.tolist() for row in first_fit(lengths, capacity)] == first_fit_plainly(lengths, capacity)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS.filter(bool), capacity=st.integers(1, 40))
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths, capacity):
    rows = first_fit(lengths, capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    clipped = np.minimum(lengths, capacity)
    assert all(clipped[row].sum() <= capacity for row in rows)
    share = 1 - clipped.sum() / (len(rows) * capacity)
    assert 0 <= share < 1
    if len(rows) > 1:  # first-fit fills all rows but one more than half
        assert share < 0.5 + 0.5 / len(rows)
