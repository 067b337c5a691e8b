"""A trained head as a folder: config.json, model.safetensors, README.md; bound to its base by hashes."""

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load, save

from .base.llm import Base
from .folders import HUB_NAME, new_folder
from .heads import Head, head_config, head_on, parameters_of
from .heads.head import OnePassHead

FORMAT = 4
FILES = {"config.json", "model.safetensors", "README.md", "custom_generate"}
CARD = Path(__file__).with_name("card.md")  # its fields stand in braces; engines serve one-pass heads alone
SHIM = '''"""For model.generate(**inputs, custom_generate="<this folder>", trust_remote_code=True)."""

import inspect


def generate(model, **arguments):
    try:
        from ctcdraft.model.custom_generate import generate_with
    except ImportError as error:
        raise ImportError("this draft head needs the package ctcdraft, which is not installed") from error
    # transformers copies this file elsewhere and does not say where the head lies; its caller knows.
    folder = arguments.pop("draft_head", None) or inspect.currentframe().f_back.f_locals["custom_generate"]
    return generate_with(model, folder, **arguments)
'''


def export_head(head: Head, base: Base, folder: Path, training: dict[str, Any]) -> None:
    """Write the head's folder; an older head is replaced whole. Raises ValueError when the folder holds
    anything else.

    `training` (objective, step, tokens, tokens_per_step) goes into config.json and the model card.
    """
    if folder.exists() and not (folder.is_dir() and {p.name for p in folder.iterdir()} <= FILES):
        raise ValueError(f"{folder} holds something else than an exported head: choose another folder")
    state = {name: p.detach().cpu().contiguous() for name, p in head.state_dict().items()}
    blob = save(state, metadata={"format": "pt"})
    identity = base.identity
    config = {
        "format": FORMAT,
        "head": asdict(head.config),
        "hidden_size": head.hidden_size,
        "base": identity,
        "template_args": dict(base.template_args),
        "training": training,
        "sha256": hashlib.sha256(blob).hexdigest(),
    }
    card, heading, served = CARD.read_text(encoding="utf-8").partition("\n## Behind vLLM\n")
    if isinstance(head, OnePassHead):
        card += heading + served
    card = card.format(
        kind=head.config.kind,
        slots=head.config.slots,
        parameters=parameters_of(head),
        template_args=f"with {json.dumps(config['template_args'])}" if base.template_args else "as it is",
        **identity,
        **training,
    )
    with new_folder(folder, replaces=True) as fresh:
        (fresh / "model.safetensors").write_bytes(blob)
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        (fresh / "custom_generate").mkdir()
        (fresh / "custom_generate" / "generate.py").write_text(SHIM)


@torch.inference_mode(False)
def load_head(folder: str | Path, base: Base) -> Head:
    """The exported head of a folder, or of a name on the Hub, as `Head.for_drafting` of the dtype that it was exported
    in. Raises ValueError as `trained_head` does."""
    head, dtype = trained_head(folder, base)
    return head.for_drafting(base, dtype)


def trained_head(folder: str | Path, base: Base) -> tuple[Head, torch.dtype]:
    """The head as it was when it was exported, to be trained on, and in which dtype that was.

    Raises ValueError, in one sentence, when the folder is no exported head, is damaged, or was trained on
    another base (config, tokenizer or LM head differ). Warns where float16 has rounded that LM head.
    """
    folder = head_folder(folder)
    config = read_config(folder)
    weights = folder / "model.safetensors"
    blob = weights.read_bytes() if weights.is_file() else b""
    if hashlib.sha256(blob).hexdigest() != config["sha256"]:
        problem = "damaged (checksum differs)" if blob else "missing or empty"
        raise ValueError(f"{weights} is {problem}: export the head again")
    identity = base.identity
    differing = [key for key in ("config", "tokenizer", "lm_head") if identity[key] != config["base"][key]]
    if differing == ["lm_head"] and base.dtype == torch.float16:
        warnings.warn(
            f"the head in {folder} was trained on {config['base']['name']}; whether {identity['name']} has its LM head "
            "cannot be told in float16, which rounds the smallest weights",
            stacklevel=2,
        )
    elif differing:
        raise ValueError(
            f"the head in {folder} was trained on {config['base']['name']} and cannot draft for "
            f"{identity['name']}: their {', '.join(differing)} differ"
        )
    for key, words in (("eos", "[{}]"), ("date", "{}")):
        trained, now = config["base"].get(key), identity.get(key)
        if None not in (trained, now) and trained != now:  # a base that others render chats for has no date
            warnings.warn(
                f"the head in {folder} was trained with base.{key}={words.format(trained)}, and {identity['name']} has "
                f"{words.format(now)} here: give it the same, since drafts fit what it was trained on",
                stacklevel=2,
            )
    try:
        state = load(blob)
        head = head_on(base, head_config(config["head"]))
        head.load_state_dict(state, assign=any(p.is_meta for p in head.parameters()))
        head.draft_vocabulary(base)  # whose ids are checked
    except (SafetensorError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} does not hold the head that its config.json names: {reason}") from error
    return head, next(part.dtype for part in state.values() if part.is_floating_point())


def head_folder(place: str | Path) -> Path:
    """A folder as it is; of a head on the Hub, `owner/name`, the folder in the Hub's cache. Raises ValueError where the
    Hub has none of that name, or cannot be asked."""
    folder = Path(place).expanduser()
    if folder.is_dir() or not HUB_NAME.fullmatch(str(place)):
        return folder
    try:
        return Path(snapshot_download(str(place), allow_patterns=["config.json", "model.safetensors"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{place}: no such folder of an exported head, and the Hub gives none ({reason})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported head. Raises ValueError when it is missing, damaged or of another kind."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of an exported head")
    try:
        config = json.loads((folder / "config.json").read_bytes())
        head_config(config["head"])
        good = config["format"] == FORMAT and {"name", "config", "tokenizer", "lm_head"} <= config["base"].keys()
        good = good and isinstance(config["training"], dict) and len(config["sha256"]) == 64
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"{folder}/config.json is not that of an exported head: export it again")
    return config
