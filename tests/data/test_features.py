"""Hidden states on disk come back as they were rounded, or not at all."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ctcdraft.data.features import Features, bytes_of, decoded, encoded, shard_name, shard_tensors, shards_of

SIZE, LENGTHS = 24, np.array([5, 1, 9, 3, 7, 2])
FACTS = {"kind": "bf16", "size": SIZE, "base": "llama", "tokenizer": "t", "data": "d"}


def spoken(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, SIZE, generator=g) * torch.logspace(-3, 3, n).unsqueeze(1) for n in LENGTHS]


def stored(folder, kind="bf16", positions=8):
    folder.mkdir()
    states, shards = [encoded(hidden, kind) for hidden in spoken()], []
    for number, members in enumerate(shards_of(LENGTHS, positions)):
        path = folder / shard_name(number)
        save_file(shard_tensors([states[i] for i in members]), path)
        shards.append({"first": members[0], "bytes": path.stat().st_size})
    (folder / "manifest.json").write_text(json.dumps({**FACTS, "kind": kind, "shards": shards}))
    return folder


def opened(folder, **facts):
    return Features(folder, LENGTHS, {**FACTS, **facts})


@pytest.mark.parametrize(("kind", "worst"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_a_number_is_off_by_at_most_half_a_unit_of_its_format(kind, worst):
    hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 200).unsqueeze(1)
    got = decoded(encoded(hidden, kind)).float()
    error, largest = (got - hidden).abs(), hidden.abs().amax(dim=1, keepdim=True)
    assert (error <= worst * hidden.abs() + 2**-18 * largest).all()  # below 2^-15 of the largest fp8 has fixed steps


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_the_format_can_say_comes_back_exactly(kind):
    steps = torch.arange(-15, 16, dtype=torch.float32)  # four significant bits
    hidden = torch.cat([steps * 2.0**k for k in (-7, 0, 3)]).expand(3, -1) * torch.tensor([[1.0], [2**-40], [2.0**30]])
    assert torch.equal(decoded(encoded(hidden, kind)).float(), hidden)
    assert torch.equal(decoded(encoded(torch.zeros(2, 4), kind)), torch.zeros(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_number_that_is_none_stays_none(kind):
    hidden = torch.ones(3, 4)
    hidden[1, 2] = torch.nan
    hidden[2, 0] = torch.inf
    got = decoded(encoded(hidden, kind))
    assert got[0].isfinite().all()
    assert not got[1].isfinite().all()
    assert not got[2].isfinite().all()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_every_sequence_is_found_in_its_shard(tmp_path, kind):
    features = opened(stored(tmp_path / "f", kind), kind=kind)
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 2
    for number, hidden in enumerate(spoken()):
        want = encoded(hidden, kind)
        assert torch.equal(decoded(features[number]), decoded(want))
    sizes = (path.stat().st_size for path in (tmp_path / "f").glob("*.safetensors"))
    assert 0 <= sum(sizes) - bytes_of(LENGTHS, SIZE, kind) < 400 * len(features._firsts)  # headers


def test_rows_hold_sequences_end_to_end_cut_and_padded(tmp_path):
    features = opened(stored(tmp_path / "f"))
    values = features.rows([[2, 1], [4]], longest=6)
    assert values.shape == (2, 7, SIZE)
    assert torch.equal(values[0], torch.cat([features[2][:6], features[1]]))
    assert torch.equal(values[1, :6], features[4][:6])
    assert not values[1, 6:].any()


def test_shards_are_whole_sequences_in_order():
    shards = shards_of(LENGTHS, 8)
    assert [number for shard in shards for number in shard] == list(range(len(LENGTHS)))
    assert all(LENGTHS[shard].sum() >= 8 for shard in shards[:-1])
    assert shards_of(LENGTHS, 1) == [range(i, i + 1) for i in range(len(LENGTHS))]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_any_flipped_bit_is_told_in_one_sentence_or_changes_nothing(tmp_path, kind):
    folder = stored(tmp_path / "f", kind)
    want = [decoded(opened(folder, kind=kind)[i]) for i in range(len(LENGTHS))]
    rng, told = random.Random(0), []
    for trial in range(300):
        path = folder / rng.choice(["manifest.json", shard_name(0), shard_name(2)])
        whole = bytearray(path.read_bytes())
        flipped = whole.copy()
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            features = opened(folder, kind=kind)
            assert all(torch.equal(decoded(features[i]), want[i]) for i in range(len(LENGTHS))), trial
        except ValueError as error:
            told.append(str(error))
        path.write_bytes(whole)
    assert len(told) > 250
    assert all("run the command again" in sentence and "\n" not in sentence for sentence in told)


@pytest.mark.parametrize("name", [shard_name(1), "manifest.json"])
def test_a_cut_file_is_told_in_one_sentence(tmp_path, name):
    folder = stored(tmp_path / "f")
    whole = (folder / name).read_bytes()
    for length in range(0, len(whole), 7):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{name} .*run the command again"):
            opened(folder)[0]


def test_a_missing_shard_is_told(tmp_path):
    folder = stored(tmp_path / "f")
    (folder / shard_name(1)).unlink()
    with pytest.raises(ValueError, match=r"00001.safetensors is missing, or has .*: delete"):
        opened(folder)


@pytest.mark.parametrize("key", ["base", "tokenizer", "data", "size", "kind"])
def test_hidden_states_of_something_else_are_refused(tmp_path, key):
    other = {"size": SIZE + 1, "kind": "fp8"}.get(key, "another")
    with pytest.raises(ValueError, match=f"holds hidden states of another {key}: delete it"):
        opened(stored(tmp_path / "f"), **{key: other})
