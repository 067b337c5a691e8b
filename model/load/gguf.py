"""A GGUF file as a base: dequantised once into an ordinary transformers folder in the cache.

transformers' own loader reads the file; its weights are kept in float32, in which every GGUF type is exact.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..folders import claimed, new_folder
from .checks import check_weights

MAGIC = b"GGUF"


def is_gguf(path: str) -> bool:
    """Does the name say that this is a GGUF file?"""
    return path.lower().endswith(".gguf")


def converted(cache: Path, sha256: str) -> Path | None:
    """The transformers folder that was made of the GGUF file with that content; None where none was."""
    return next(iter(_entry(cache, sha256).glob("*")), None)


def convert_gguf(file: Path, cache: Path) -> Path:
    """The transformers folder of a GGUF file: float32 safetensors and the tokenizer, made where it is not there yet.

    It is kept in `cache` under the SHA-256 of the file's content and bears the file's name. Of several processes one
    converts and the others wait for it. Raises ValueError, in one sentence, when the file is not there, is no GGUF,
    is damaged, or holds no causal LM that transformers knows; as `new_folder` does where it does not fit on the disk.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{file} is no GGUF file: it does not begin with the letters GGUF")
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    entry = _entry(cache, sha256)
    with claimed(entry.with_name(f"{entry.name}.lock"), wait=True):
        if not entry.is_dir():
            for left in cache.glob(f"unfinished-{entry.name}-*"):  # by a process that was killed
                shutil.rmtree(left)
            with new_folder(entry) as fresh:
                _convert(file, fresh / file.stem)
    folder = converted(cache, sha256)
    if folder is None:
        raise ValueError(f"{entry} is damaged: delete it and run the command again")
    return folder


def _entry(cache: Path, sha256: str) -> Path:
    return cache / f"gguf-{sha256[:16]}"


def _convert(file: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError:  # where a head is served, and nothing is trained
        raise ValueError(f"{file} is read with the package gguf: pip install gguf, or ctcdraft[train]") from None
    try:
        GGUFReader(file)
    except Exception as error:  # whatever the reader stumbles over: it trusts every length that it reads
        raise ValueError(f"{file} is cut short or damaged: fetch it again") from error
    with tempfile.TemporaryDirectory() as alone:  # what lies beside the file, a config.json say, must not be read
        (Path(alone) / "model.gguf").symlink_to(file.resolve())
        source: Any = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
            model, info = loaded
            tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        except Exception as error:  # whatever a file that is no causal LM makes transformers raise
            reason = str(error).strip().split("\n")[0][:200]
            raise ValueError(
                f"{file} is not a causal LM with a tokenizer that transformers can read ({reason}): give the model "
                "as a folder of safetensors"
            ) from error
    check_weights(str(file), info)
    # save_pretrained would refuse what says that it is quantised, and it no longer is
    for place, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        vars(place).pop(name, None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
