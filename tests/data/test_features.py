"""Hidden states on disk come back as they were rounded, or not at all."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ctcdraft.data.features import Features, shard_name, shard_tensors

SIZE, LENGTHS = 24, np.array([5, 1, 9, 3, 7, 2])
FACTS = {"size": SIZE, "shard": 2, "base": "llama", "tokenizer": "t", "data": "d"}


def spoken(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, SIZE, generator=g) * torch.logspace(-3, 3, n).unsqueeze(1) for n in LENGTHS]


def stored(folder):
    folder.mkdir()
    states = [hidden.bfloat16() for hidden in spoken()]
    for number, first in enumerate(range(0, len(states), FACTS["shard"])):
        save_file(shard_tensors(states[first : first + FACTS["shard"]]), folder / shard_name(number))
    (folder / "manifest.json").write_text(json.dumps(FACTS))
    return folder


def opened(folder, **facts):
    return Features(folder, LENGTHS, {**FACTS, **facts})


def test_every_sequence_is_found_in_its_shard(tmp_path):
    features = opened(stored(tmp_path / "f"))
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 2
    for number, hidden in enumerate(spoken()):
        assert torch.equal(features[number], hidden.bfloat16())
    assert features.bytes == sum(path.stat().st_size for path in (tmp_path / "f").glob("*.safetensors"))


def test_rows_hold_sequences_end_to_end_cut_and_padded(tmp_path):
    features = opened(stored(tmp_path / "f"))
    values = features.rows([[2, 1], [4]], longest=6)
    assert values.shape == (2, 7, SIZE)
    assert torch.equal(values[0], torch.cat([features[2][:6], features[1]]))
    assert torch.equal(values[1, :6], features[4][:6])
    assert not values[1, 6:].any()


def test_any_flipped_bit_is_told_in_one_sentence_or_changes_nothing(tmp_path):
    folder = stored(tmp_path / "f")
    want = [opened(folder)[i] for i in range(len(LENGTHS))]
    rng, told = random.Random(0), []
    for trial in range(300):
        path = folder / rng.choice(["manifest.json", shard_name(0), shard_name(2)])
        whole = bytearray(path.read_bytes())
        flipped = whole.copy()
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            features = opened(folder)
            assert all(torch.equal(features[i], want[i]) for i in range(len(LENGTHS))), trial
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
    with pytest.raises(ValueError, match=r"00001.safetensors is missing or damaged .*: delete"):
        opened(folder)


@pytest.mark.parametrize("key", ["base", "tokenizer", "data", "size", "shard"])
def test_hidden_states_of_something_else_are_refused(tmp_path, key):
    other = {"size": SIZE + 1, "shard": 3}.get(key, "another")
    with pytest.raises(ValueError, match=f"holds hidden states of another {key}: delete it"):
        opened(stored(tmp_path / "f"), **{key: other})
