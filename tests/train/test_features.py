"""Training from stored hidden states is training, whoever stored them and however often they were killed."""

import random
import shutil
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bases import tiny_tokenizer, write_base
from workers import SHARD, logged_batches, store_of, storing, wait_for

from ctcdraft.data.batches import Sampler
from ctcdraft.data.features import Features
from ctcdraft.data.store import Example, load_corpus, save_corpus
from ctcdraft.model import load_base
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import CtcConfig, head_on
from ctcdraft.model.heads.slots import SlotHead
from ctcdraft.train.task import DraftTask, ObjectiveConfig, base_features

pytestmark = pytest.mark.slow

# A number is off by at most 2^-8 of itself, a third of that in the root mean square and in any direction: a gradient,
# linear in them, by about as much, a loss, a mean over many anchors, by less. Measured: 3e-5 (loss) and 1.3e-3
# (gradient); 2^-8 / 3 is 1.3e-3.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 3e-4, 2.6e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Of layers that, as trained ones, do not make an error larger that they are given."""
    return load_base(str(write_base(tmp_path_factory.mktemp("base") / "b", initializer_range=0.05)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return sequences(tmp_path_factory.mktemp("data"))


def sequences(folder, count=60, seed=0):
    """A folder that training reads, of `count` random sequences."""
    rng, examples = np.random.default_rng(seed), []
    for _ in range(count):
        ids = rng.integers(4, 250, int(rng.integers(6, 40))).tolist()
        examples.append(Example(ids, [int(i >= len(ids) // 3) for i in range(len(ids))], ids))
    save_corpus(folder / "train.safetensors", examples)
    return folder


def stored(*given, **options):
    store = store_of(*given, **options)
    store.fill()
    return store


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def outcome(base, task, sampler, steps):
    """The loss and the gradient of some steps together."""
    task.zero_grad()
    losses = []
    for step in range(steps):
        batch = sampler.collate(step, slice(None))
        loss, sums = task(*base_features(base, batch, torch.float32, task.head), batch)
        (loss / sums.anchors).backward()
        losses.append(float(loss.detach() / sums.anchors))
    return np.array(losses), torch.cat([p.grad.flatten() for p in task.parameters()])


def task_on(base, layers=0):
    """With so many of the base's layers in the head's body; 0: with blocks among slots."""
    torch.manual_seed(0)
    config = CtcConfig(slots=4, layers=layers or 1, draft_vocab_size=None)
    head = head_on(base, config) if layers else SlotHead(config, base)
    torch.nn.init.normal_(head.enter.weight, std=0.1)  # which would read nothing at first
    return DraftTask(head, ObjectiveConfig(labels=4), base)


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("pack", [False, True])
def test_stored_and_online_losses_and_gradients_are_equal_within_rounding(base, data, tmp_path, pack, layers):
    features, task = stored(base, data, tmp_path, layers).open(), task_on(base, layers)
    corpus = load_corpus(data, "train")
    options = {"batch": 3, "anchors": 6, "labels": 4, "max_length": 64 if pack else 24, "seed": 0, "pack": pack}
    online, reading = Sampler(corpus, **options), Sampler(corpus, features=features, **options)
    steps = 2 * online.steps_per_epoch + 1  # the anchors are others in every epoch
    loss, gradient = outcome(base, task, online, steps)
    got, got_gradient = outcome(base, task, reading, steps)
    off, off_gradient = np.abs(got / loss - 1).max(), (got_gradient - gradient).norm() / gradient.norm()
    assert 0 < off < LOSS_TOLERANCE
    assert 0 < off_gradient < GRADIENT_TOLERANCE


def test_a_half_precision_base_loses_nothing(base, data, tmp_path):
    half = load_base(base.path, "bf16")
    features, task = stored(half, data, tmp_path, layers=1).open(), task_on(half, 1)
    corpus, options = load_corpus(data, "train"), {"batch": 1, "anchors": 6, "labels": 4, "max_length": 64, "seed": 0}
    steps = 12  # of one row each, as they were not stored: another batch may round the base's sums in another way
    loss, gradient = outcome(half, task, Sampler(corpus, **options), steps)
    got, got_gradient = outcome(half, task, Sampler(corpus, features=features, **options), steps)
    assert np.abs(got / loss - 1).max() < LOSS_TOLERANCE
    assert (got_gradient - gradient).norm() < GRADIENT_TOLERANCE * gradient.norm()
    assert (got == loss).mean() > 0.5


@pytest.mark.parametrize("columns", [slice(32), slice(32, 64), slice(64, None)], ids=["hidden", "entering", "keys"])
def test_the_states_of_another_sequence_would_not_do(base, data, tmp_path, columns):
    features, task = stored(base, data, tmp_path, layers=2).open(), task_on(base, 2)
    options = {"batch": 3, "anchors": 6, "labels": 4, "max_length": 24, "seed": 0}
    sampler = Sampler(load_corpus(data, "train"), features=features, **options)
    _, gradient = outcome(base, task, sampler, 1)
    honest = sampler.collate

    def swapped(*given):
        batch = honest(*given)
        stored_BLX = batch.stored_BLX.clone()
        stored_BLX[..., columns] = batch.stored_BLX.flip(0)[..., columns]
        return batch._replace(stored_BLX=stored_BLX)

    sampler.collate = swapped
    _, other = outcome(base, task, sampler, 1)
    assert (other - gradient).norm() > 0.12 * gradient.norm()


def test_losses_are_bitwise_equal_where_the_format_can_say_the_states(base, data, tmp_path, monkeypatch):
    def coarse(self, ids_BL, *_, **__):  # of one token alone, in steps of 1/4
        return (self.embed(ids_BL) * 4).round().clamp(-15, 15) / 4

    monkeypatch.setattr(type(base), "hidden", coarse)
    features, task = stored(base, data, tmp_path).open(), task_on(base)
    options = {"batch": 3, "anchors": 6, "labels": 4, "max_length": 24, "seed": 0}
    corpus = load_corpus(data, "train")
    loss, gradient = outcome(base, task, Sampler(corpus, **options), 8)
    got, got_gradient = outcome(base, task, Sampler(corpus, features=features, **options), 8)
    assert (got == loss).all()
    assert torch.equal(got_gradient, gradient)


def test_a_step_from_stored_states_runs_no_layer_of_the_base(small, tmp_path, monkeypatch):
    online, trainer = (small(tmp_path / name, *words) for name, words in RUNS.items())
    losses = [[float(sums.loss / sums.anchors) for sums in steps_of(online)]]
    monkeypatch.setattr(type(trainer.base), "hidden", None)
    losses.append([float(sums.loss / sums.anchors) for sums in steps_of(trainer)])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)  # three steps apart, each from rounded states
    assert losses[0] != losses[1]


RUNS = {"online": (), "stored": ("data.features=bf16",)}


def steps_of(trainer):
    for step in range(3):
        yield trainer.step(step).metrics


def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(base, data, tmp_path, monkeypatch):
    want = files(stored(base, data, tmp_path / "whole").folder)
    log = tmp_path / "batches"
    monkeypatch.setattr(Base, "hidden", logged_batches(log))
    rng, cache = random.Random(3), tmp_path / "cut"
    batches = -(-len(store_of(base, data, cache).corpus) // SHARD)  # one for each file
    for kill in range(5):
        process = storing(base, data, cache, log)
        process.start()
        enough = (kill + rng.random()) * batches / 6
        while process.is_alive() and (not log.exists() or log.stat().st_size < enough):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not store_of(base, data, cache).done
    store = stored(base, data, cache)
    assert files(store.folder) == want
    assert log.stat().st_size <= batches + 5
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [store.folder.name]


@pytest.mark.parametrize("dies", [False, True])
def test_two_processes_share_the_shards_and_one_may_die(base, data, tmp_path, dies):
    want = stored(base, data, tmp_path / "one").folder
    log = tmp_path / "batches"
    workers = [storing(base, data, tmp_path / "two", log if dies else None) for _ in range(2)]
    for worker in workers:
        worker.start()
    if dies:
        wait_for(log)
        workers[0].kill()
    for worker in workers[dies:]:
        worker.join()
        assert worker.exitcode == 0
    assert files(tmp_path / "two" / want.name) == files(want)


def test_a_full_disk_is_refused_before_anything_is_read(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=80_000))
    monkeypatch.setattr(type(base), "hidden", None)
    with pytest.raises(ValueError, match=r"features=bf16 needs 0.00 GB .* has 0.00 GB free: make room"):
        store_of(base, data, tmp_path / "c").fill()


def test_a_shard_that_another_process_is_just_finishing_is_no_error(base, data, tmp_path):
    store = store_of(base, data, tmp_path)
    store.folder.mkdir()
    (store.folder / "00000.safetensors.tmp").symlink_to("renamed")  # listed, and gone when it is looked at
    assert "0.00 GB for hidden states" in store.check_room()


def test_the_estimate_is_what_the_files_take(base, data, tmp_path):
    store = store_of(base, data, tmp_path, layers=1)
    estimate = store.bytes_left
    store.fill()
    assert estimate <= store.open().bytes < 1.1 * estimate + 4096  # headers
    assert store.bytes_left == 0
    assert "0.00 GB for hidden states of 32 numbers and 64 of the layers that the head copies at" in store.check_room()


def test_what_is_stored_is_not_stored_again(base, data, tmp_path, monkeypatch):
    folder = stored(base, data, tmp_path).folder
    monkeypatch.setattr(type(base), "hidden", None)
    assert stored(base, data, tmp_path).folder == folder
    (folder / "manifest.json").unlink()  # as the sentence about a damaged one advises
    want = files(folder)
    stored(base, data, tmp_path)
    assert {**want, "manifest.json": (folder / "manifest.json").read_bytes()} == files(folder)


def moved(base):
    """The same base with one weight of one layer changed: LM head, tokenizer and sizes are equal."""
    other = load_base(base.path)
    with torch.no_grad():
        next(p for name, p in other.model.named_parameters() if "layers.1" in name)[0] += 1e-3
    return other


def retokenised(base):
    return replace(base, tokenizer=tiny_tokenizer(extra=("<new>",)))


@pytest.mark.parametrize(("change", "what"), [(moved, "base"), (retokenised, "tokenizer")])
def test_another_base_or_tokenizer_has_a_folder_of_its_own_and_refuses_this_one(base, data, tmp_path, change, what):
    store, other = stored(base, data, tmp_path), store_of(change(base), data, tmp_path)
    assert other.folder != store.folder
    shutil.copytree(store.folder, other.folder)
    with pytest.raises(ValueError, match=f"holds hidden states of another {what}: delete it"):
        other.open()


def test_other_layers_have_a_folder_of_their_own_and_refuse_this_one(base, data, tmp_path):
    store, other = stored(base, data, tmp_path, layers=1), store_of(base, data, tmp_path, layers=2)
    assert len({store.folder, other.folder, store_of(base, data, tmp_path).folder}) == 3
    with pytest.raises(ValueError, match="of another size"):
        Features(store.folder, store.corpus.lengths, other.facts)


def test_other_sequences_have_a_folder_of_their_own(base, data, tmp_path):
    (tmp_path / "d").mkdir()
    store, other = stored(base, data, tmp_path), store_of(base, sequences(tmp_path / "d", seed=1), tmp_path)
    assert other.folder != store.folder
    with pytest.raises(ValueError, match="of another data"):
        Features(store.folder, store.corpus.lengths, other.facts)


def test_every_position_is_stored(base, data, tmp_path):
    store = stored(base, data, tmp_path, layers=1)
    features = store.open()
    for number in range(len(store.corpus)):
        ids = torch.from_numpy(store.corpus[number].ids.astype(int)).unsqueeze(0)
        hidden = base.hidden(ids, attended=base.attended(1))[0]
        assert (features[number].float() - hidden).norm() < 2**-8 * hidden.norm()
