"""The base that an engine serves, as a head asks for it.

A head needs its base's LM head, its embedding, and a class of transformers that runs copies of its last layers. The
weights are the engine's own tensors, the class comes from the config; the layers themselves are nowhere a second time.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ctcdraft.model.base.attention import use_grouped_attention
from ctcdraft.model.base.llm import Base
from ctcdraft.model.load.pretrained import own_eos_ids, usable_context


def base_of(target: Any, path: str, length: int, option: str) -> Base:
    """Of a model that an engine has loaded from that folder or Hub name, and serves with contexts of that length, set
    by that option. It embeds and makes logits, with the vocabulary's rows alone, and cannot read: its layers are on the
    device `meta`. Raises ValueError where a head cannot draft for it."""
    decoder: Any = getattr(target, "model", None)
    names = ("embed_tokens", "embedding", "embed_in")  # but for gpt-oss and GPT-NeoX the first
    embedding = next((getattr(decoder, name) for name in names if hasattr(decoder, name)), None)
    lm_head = getattr(target, "lm_head", None)
    if embedding is None or lm_head is None:
        raise ValueError(f"{type(target).__name__}: its embedding and LM head are not where a head looks for them")
    config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    text = config.get_text_config()
    V, D = text.vocab_size, text.hidden_size
    for name, weight in (("embedding", embedding.weight), ("LM head", lm_head.weight)):
        if weight.dim() != 2 or len(weight) < V or weight.shape[1] != D or not weight.is_floating_point():
            raise ValueError(
                f"the {name} of {path} is {weight.dtype} {tuple(weight.shape)} in the engine, not {(V, D)} of floats: "
                "a head cannot draft with packed, quantised or divided weights"
            )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=lm_head.weight.dtype).eval().requires_grad_(False)
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(path)
    base = Base(model, tokenizer, path, own_eos_ids(model, tokenizer), usable_context(model))
    experts = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")  # torch's grouped one takes bfloat16 alone on `meta`
    base.key_shapes  # noqa: B018 (found while all of it is on `meta`, and kept)
    model.set_experts_implementation(experts)
    for module in model.modules():  # rotary frequencies, the scale of embeddings: computed, not stored
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device=lm_head.weight.device))
        if buffers:
            model._init_weights(module)
    for own, engines in ((model.get_input_embeddings(), embedding), (model.get_output_embeddings(), lm_head)):
        own.weight = nn.Parameter(engines.weight.detach()[:V], requires_grad=False)
    if getattr(lm_head, "bias", None) is not None:
        own.bias = nn.Parameter(lm_head.bias.detach()[:V], requires_grad=False)
    use_grouped_attention(model)
    if base.context_length < min(length, text.max_position_embeddings):  # longrope
        raise ValueError(
            f"{base.name} turns its keys otherwise in contexts beyond {base.context_length} tokens, which a head does "
            f"not know: give {option} {base.context_length}"
        )
    return base
