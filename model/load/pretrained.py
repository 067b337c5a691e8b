"""Loading a base from a folder, the Hub or a GGUF file, with what its users may choose: dtype, template, date, ends."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, ProcessorMixin
from transformers import logging as hf_logging

from ..base.attention import use_grouped_attention
from ..base.llm import Base
from ..base.packed import pack
from .checks import check_verifiable, check_weights, windows_work
from .gguf import convert_gguf, is_gguf
from .precision import Dtype, resolve_dtype
from .template_date import PINNED_DATE, with_date, writes_date

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
TEMPLATE_FOLDER = Path(__file__).with_name("templates")
TEMPLATES = {  # vicuna is FastChat's vicuna_v1.1
    file.stem: file.read_text(encoding="utf-8").removesuffix("\n") for file in sorted(TEMPLATE_FOLDER.glob("*.jinja"))
}


@torch.inference_mode(False)
def load_base(
    path: str,
    dtype: Dtype = "fp32",
    device: str = "auto",
    template: str | None = None,
    trust_remote_code: bool = False,
    cache: str | Path = ".cache",
    eos: str | int | Sequence[str | int] | None = None,
    date: str | None = None,
) -> Base:
    """Load a frozen base and its tokenizer from a local folder or the Hub: safetensors alone, never pickles, and none
    of its Python code unless trust_remote_code asks for it. A GGUF file is converted in `cache` first (gguf.py).

    dtype: fp32, bf16, fp64, or auto, which is bf16 where the machine is faster in it (precision.py).
    On a CPU its linear layers are packed (packed.py), which takes the memory of its weights once more.
    template names a built-in chat template (TEMPLATES) for a tokenizer that comes without one, or with
    another; None keeps the tokenizer's own, and gives one that has none the plain format.
    eos: the tokens (texts or ids) that end a sequence instead of those that the folder names. date: YYYY-MM-DD, what
    the chat template writes as today's (None: PINNED_DATE).
    Raises ValueError, in one sentence, when the path holds no causal LM or tokenizer, or when the model
    makes its logits in a way that ctcdraft does not know (drafts would then be verified wrongly).
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"base.dtype={dtype!r} is unknown: choose one of {get_args(Dtype)}")
    if device == "auto":
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    dtype = resolve_dtype(dtype, Path(cache), device)
    if template is not None and template not in TEMPLATES:
        raise ValueError(f"base.template={template!r} is unknown: choose one of {tuple(TEMPLATES)}")
    if is_gguf(path):
        path = str(convert_gguf(Path(path).expanduser(), Path(cache)))
    source, folder = model_source(path), Path(path).expanduser()
    with _quiet_transformers():
        try:
            trusted = {"trust_remote_code": trust_remote_code}
            AutoConfig.from_pretrained(source, **trusted)
            options = trusted | {"dtype": DTYPES[dtype], "use_safetensors": True, "ignore_mismatched_sizes": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
            model, loading = loaded
            tokenizer = AutoTokenizer.from_pretrained(source, **trusted)
            tokenizer.chat_template = own_template(source, tokenizer)
        except Exception as error:  # whatever a broken folder makes transformers raise
            raise ValueError(f"base.path={path}: {_why_not(folder, error)}") from error
    check_weights(f"base.path={path}", loading)
    tokenizer.model_max_length = 10**9  # lengths are checked, and refused with a sentence, where they matter
    model = model.to(device).eval().requires_grad_(False)
    pack(model)
    use_grouped_attention(model)
    plain = template is None and tokenizer.chat_template is None
    if plain or template:
        tokenizer.chat_template = TEMPLATES[template or "plain"]
    tokenizer.chat_template = with_date(tokenizer.chat_template, date or PINNED_DATE)
    eos_ids = own_eos_ids(model, tokenizer) if eos is None else _chosen_eos(eos, model, tokenizer, path)
    # Penalties and forced tokens that the folder may bring along would not be the model's own greedy words.
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids) or None, pad_token_id=(*eos_ids, 0)[0])
    written = date or PINNED_DATE if writes_date(tokenizer.chat_template) else None
    return base_of(model, tokenizer, path, eos_ids, plain_template=plain, date=written)


def model_source(path: str) -> str:
    """A model's folder, or its name on the Hub. Raises ValueError where it can only be a folder, and none is there."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"base.path={path}: no such folder")
    return path


def base_of(model: Any, tokenizer: Any, path: str, eos_ids: tuple[int, ...] | None = None, **facts: Any) -> Base:
    """A base from a model that is already there, by default with its own ends of sequence; facts: other fields.

    Raises ValueError where it cannot be verified against drafts.
    """
    length = usable_context(model)
    ends = own_eos_ids(model, tokenizer) if eos_ids is None else eos_ids
    base = Base(model, tokenizer, path, ends, length, **facts)
    if base.dtype == torch.float64:  # transformers' default for experts multiplies no such matrices
        model.set_experts_implementation("eager")
    check_verifiable(base)
    window = base.windows.width
    if window is not None and window < length and not windows_work(base):
        warnings.warn(
            f"{base.name} gets a context of {window} tokens, its window: its {type(model).__name__} takes no mask that "
            "would let a draft tree see a window",
            stacklevel=2,
        )
        base = replace(base, context_length=window)
    return base


def _why_not(folder: Path, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0][:200]
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own; where you have read it, base.trust_remote_code=true runs it"
    files = sorted(file.name for file in folder.glob("*"))
    if "adapter_config.json" in files:
        return "it is an adapter (PEFT): merge it into its base (merge_and_unload) and give the folder of the whole"
    if any(name.endswith(".safetensors") for name in files):
        if not any(name.startswith(("tokenizer", "vocab", "tekken", "spiece")) for name in files):
            return "it has no tokenizer: copy tokenizer.json and tokenizer_config.json from the model it was made of"
    elif gguf := [name for name in files if is_gguf(name)]:
        return f"it holds GGUF files: give one of them, {folder / gguf[0]}"
    elif any(name.endswith(".bin") for name in files):
        return "it holds its weights as pickles (*.bin), which can run code: save it again as safetensors"
    return f"not a causal LM with a tokenizer ({reason})"


def own_template(source: str, tokenizer: Any) -> Any:
    """The tokenizer's chat template, or the processor's, with which models that see pictures may keep it in a folder;
    None where there is none."""
    if tokenizer.chat_template or not Path(source).is_dir():
        return tokenizer.chat_template or None
    return ProcessorMixin.get_processor_dict(source)[0].get("chat_template")


def own_eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    rows = model.get_output_embeddings().weight.shape[0]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int) and 0 <= i < rows}))


def _chosen_eos(eos: str | int | Sequence[str | int], model: Any, tokenizer: Any, path: str) -> tuple[int, ...]:
    """The ids of tokens that a user named. Raises ValueError on one that the base does not know."""
    chosen = [eos] if isinstance(eos, str | int) else list(eos)
    if not chosen:
        raise ValueError("base.eos=[]: give at least one token, or leave it out for the base's own")
    rows = model.get_output_embeddings().weight.shape[0]
    known = tokenizer.get_vocab()
    ids = [token if isinstance(token, int) else known.get(token, -1) for token in chosen]
    for token, number in zip(chosen, ids, strict=True):
        if not 0 <= number < rows:
            what = f"its tokens are 0 to {rows - 1}" if isinstance(token, int) else "its tokenizer has no such token"
            what = f"it has no embedding for that token ({number})" if number >= rows and token != number else what
            raise ValueError(f"base.eos={token}: base.path={path}: {what}")
    return tuple(sorted(set(ids)))


def usable_context(model: Any) -> int:
    """Positions that may be used: no more than from where longrope turns every row of a forward by other angles, since
    a draft beyond it would change its own root's. Llama 4's layers without angles scale queries by places in the cache,
    where a node lies behind its siblings and a row as far as the longest: up to a first number of them, all alike."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = all(isinstance(one, dict) for one in rope.values())  # some have one for each kind of layer
    ropes = rope.values() if of_kinds else [rope]
    short = [one["original_max_position_embeddings"] for one in ropes if one.get("rope_type") == "longrope"]
    scales = getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers)
    return min([longest, *short, *([config.floor_scale * 7 // 8] if scales else [])])  # an eighth is left for drafts


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with patch.object(hf_logging, "_tqdm_active", False, create=True):  # its own bars, and not those of downloads
            yield
    finally:
        hf_logging.set_verbosity(level)
