"""Fixtures: a tiny random base, and the real data of shared/ where it lies beside the project."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, as some of transformers does

import pytest
from bases import write_base
from drafting import prompts

from ctcdraft.model import load_base
from ctcdraft.model.load.smollm2 import cached_smollm2

torch.set_num_threads(1)  # for what fixtures make before the first test
ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
HEAVY = (  # files that take longest, longest first (`make test ARGS=--durations=0`)
    "serve/test_engine.py",
    "train/test_training.py",
    "train/test_watchdog.py",
    "bench/test_gpu.py",
    "bench/test_ablation.py",
    "train/test_regenerate_server.py",
    "train/test_ranks.py",
    "model/decode/test_decoder.py",
    "train/test_overfit.py",
    "model/load/test_architectures.py",
    "model/test_replay.py",
    "train/test_regenerate.py",
    "model/draft/test_prompt_lookup.py",
    "launch/test_safety.py",
    "model/decode/test_identity.py",
    "train/test_anomalies.py",
    "model/lattice/test_compiled.py",
    "model/decode/test_captured.py",
)


def pytest_collection_modifyitems(items):
    """Heavy files come first, so that the processes of `make test`, which take whole files, end together."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(HEAVY)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(autouse=True)
def one_thread():
    """Before each test: bits depend on it, and what a test starts in this process may change it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def common_cache(tmp_path_factory):
    """A folder that all processes of `make test` share: what one has made there, the others take."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def base(base_folder):
    return load_base(str(base_folder), dtype="fp64")


@pytest.fixture(scope="session")
def answers(base):
    """Prompts, each with the 40 tokens that transformers' own loop continues it by."""

    def answer(prompt):
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt))
        out = base.model.generate(ids, max_new_tokens=40, do_sample=False, attention_mask=mask)
        return out[0, len(prompt) :].tolist()

    return [(prompt, answer(prompt)) for prompt in prompts(12)]


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    """A base whose answers end by themselves, now and then."""
    folder = write_base(tmp_path_factory.mktemp("talking") / "b", eos_token_id=1, initializer_range=0.2)
    return load_base(str(folder), dtype="fp64")


@pytest.fixture(scope="session")
def exact(tmp_path_factory):
    """A base whose best tokens lie close together."""
    folder = write_base(tmp_path_factory.mktemp("exact") / "b", context=64, initializer_range=0.05)
    return load_base(str(folder), dtype="fp64")


@pytest.fixture(scope="session")
def rough(exact):
    """The same in bfloat16."""
    return load_base(exact.path, dtype="bf16")


@pytest.fixture(scope="session")
def stories_base():
    path = SHARED / "models" / "stories260K"
    if not path.is_dir():
        pytest.skip("shared/models/stories260K is not on this machine")
    return load_base(str(path))


@pytest.fixture(scope="session")
def shared():
    if not SHARED.is_dir():
        pytest.skip("shared/ is not on this machine")
    return SHARED


@pytest.fixture(scope="session")
def smollm2_path():
    """The folder that CTCDRAFT_SMOLLM2 names, or what the cache has."""
    path = os.environ.get("CTCDRAFT_SMOLLM2") or cached_smollm2(ROOT / ".cache")
    if path is None:
        pytest.skip(
            "SmolLM2 is neither in .cache (launch/doctor.py base=smollm2 fetches it) nor named by CTCDRAFT_SMOLLM2"
        )
    return str(path)


@pytest.fixture(scope="session")
def smollm2_base(smollm2_path):
    return load_base(smollm2_path, "fp32")


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_path):
    return load_base(smollm2_path, "bf16")
