"""The way in from stock transformers: generate(..., custom_generate="<exported head>", trust_remote_code=True).

The exported folder's custom_generate/generate.py (export.SHIM) comes here. Output has the form of `generate`'s:
prompts and answers, padded; and the same tokens, since drafts change none.
"""

import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.export import head_folder, load_head, read_config
from ctcdraft.model.load.pretrained import base_of

# Options of `generate` that this decoder does, or that change no token; of all others only the defaults are taken.
TAKEN = {
    *("max_length", "max_new_tokens", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"),
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("early_stopping", "length_penalty"),  # of beams, which are refused
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("low_memory", "prefill_chunk_size"),
    *("renormalize_logits", "remove_invalid_values"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    "transformers_version",
}
# Of all others 0 asks for nothing.
ZERO_COUNTS = {"forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "max_time"}


def generate_with(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    nodes: int = DraftConfig.nodes,
    seed: int | None = None,
    **arguments: Any,
) -> Tensor:
    """Prompts [B, L], left-padded where attention_mask is 0, with their answers: [B, L + longest answer]. As in
    `generate`, padding without a mask is told by a pad_token_id that ends nothing.

    Takes generate's options for greedy decoding and sampling; `nodes` is the draft budget, `seed` that of the noise
    (None: drawn from torch's global generator). A repetition penalty counts a prompt's own tokens, where transformers
    counts its padding too. Raises ValueError on any other option that would change the output.
    """
    if input_ids is None:
        input_ids = arguments.pop("inputs", None)
    if input_ids is None or input_ids.dim() != 2 or not len(input_ids):
        raise ValueError("custom_generate: give input_ids [batch, length]")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        shapes = f"{list(attention_mask.shape)}, input_ids {list(input_ids.shape)}"
        raise ValueError(f"custom_generate: attention_mask is {shapes}: give one number for each token")
    lengths = (arguments.get("max_length"), getattr(generation_config, "max_length", None))
    default_length = {*lengths, model.generation_config.max_length} == {None}
    config, rest = model._prepare_generation_config(generation_config, **arguments)  # type: ignore[operator]
    defaults = GenerationConfig._get_default_generation_params()
    for name in sorted(vars(GenerationConfig()).keys() - TAKEN):
        value = getattr(config, name, None)
        zero = name in ZERO_COUNTS and value == 0 and value is not False
        if (zero or value not in (None, False, defaults.get(name))) and not name.startswith("_"):
            raise ValueError(f"custom_generate: the draft decoder has no {name}={value}")
    given = [name for name, value in rest.items() if _is_given(value) and name != "use_model_defaults"]
    if given:
        raise ValueError(f"custom_generate: the draft decoder has no {', '.join(sorted(given))}")
    decoder = _decoder(model, folder, tokenizer, nodes)
    ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    padding = None if config.pad_token_id in ends else config.pad_token_id
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids) if padding is None else input_ids != padding
    prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, attention_mask, strict=True)]
    limit = config.max_new_tokens or config.max_length - (0 if default_length else input_ids.shape[1])
    first = int(torch.randint(2**62, ())) if seed is None else seed
    seeds = [first + number for number in range(len(prompts))]
    stop = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()
    neutral: dict[str, Any] = {"repetition_penalty": 1.0}  # what None stands for
    if config.do_sample:
        neutral |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    asked = {name: getattr(config, name) for name in neutral}
    settings = neutral | {name: value for name, value in asked.items() if value is not None}
    outs = decoder.generate(prompts, limit, seed=seeds, stop=stop, eos=ends, **settings)
    if any(out.finish == "context" for out in outs):
        longest = decoder.base.context_length
        warnings.warn(f"custom_generate: an answer ends at {longest} tokens, which drafts take at most", stacklevel=2)
    pad = config.pad_token_id if config.pad_token_id is not None else (*ends, 0)[0]
    answers = input_ids.new_full((len(outs), max(len(out.tokens) for out in outs)), pad)
    for row, out in zip(answers, outs, strict=True):
        row[: len(out.tokens)] = torch.tensor(out.tokens)
    return torch.cat([input_ids, answers], dim=1)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, Sized) and len(value) == 0)


class _Decoders(dict[Any, Decoder]):
    """Of one model. Neither a copy of the model nor a pickle takes them along: what they hold cannot be pickled."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def _decoder(model: PreTrainedModel, folder: str | Path, tokenizer: Any, nodes: int) -> Decoder:
    """Made once per model, head and budget, and anew where the model's weights lie elsewhere since; kept by the model,
    to go when it goes."""
    where, config = [weight.data_ptr() for weight in model.parameters()], read_config(head_folder(folder))
    if model.__dict__.get("_ctcdraft_weights") != where:
        model.__dict__.update(_ctcdraft_weights=where, _ctcdraft_decoders=_Decoders())
    made: dict[Any, Decoder] = model.__dict__["_ctcdraft_decoders"]
    key = config["sha256"], nodes
    if key not in made:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        base = base_of(model, tokenizer, str(model.name_or_path))
        made[key] = Decoder(base, load_head(folder, base), DraftConfig(nodes=nodes))
    return made[key]
