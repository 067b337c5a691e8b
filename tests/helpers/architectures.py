"""A tiny random model of every architecture that people may bring as a base: a row is a family and what it needs to be
tiny. `python tests/helpers/architectures.py` prints what becomes of each, the table of docs/results/bases.md."""

from collections import deque
from dataclasses import replace
from functools import cache

import torch
from bases import SIZES, tiny_tokenizer
from drafting import prompts, random_trees
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctcdraft.model import Decoder
from ctcdraft.model.decode.generate import continue_all
from ctcdraft.model.decode.request import Request
from ctcdraft.model.load.pretrained import base_of

WINDOW, NEW_TOKENS = 16, 24
OWN = SIZES | {"eos_token_id": 259, "pad_token_id": 0}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
DECODER = {"is_decoder": True}
ARCHITECTURES = {
    "afmoe": MOE | MIXED | {"num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": MLA | MOE,
    "axk2": MLA | MOE,
    "bailing_hybrid": MLA | MOE,
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "beam": MIXED,
    "bert": DECODER,
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_head": 4},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "cohere": {},
    "cohere2": MIXED,
    "cohere2_moe": MOE | MIXED,
    "cwm": MIXED,
    "deepseek_v2": MLA | MOE,
    "deepseek_v3": MLA | MOE,
    "deepseek_v32": MLA | MOE,
    "deepseek_v4": MOE | {"sliding_window": WINDOW},
    "diffllama": {},
    "doge": {},
    "dots1": MOE | MIXED,
    "ernie4_5": {},
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": MIXED,
    "exaone_moe": MOE | MIXED,
    "falcon": {"head_dim": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, alibi": {"head_dim": None, "alibi": True},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_mamba": {"state_size": 4},
    "flex_olmo": MOE,
    "flint": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "gemma3n_text": MIXED
    | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 260,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": MIXED
    | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 260,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": MOE,
    "glm4_moe_lite": MLA | MOE,
    "glm_moe_dsa": MLA | MOE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gpt_neo, local": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": MOE | MIXED,
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "granite": {"logits_scaling": 2.0},
    "granite_swa": MIXED,
    "granitemoe": MOE,
    "granitemoe_swa": MOE | MIXED,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": MOE | {"moe_topk": 2},
    "hy_v3": MOE,
    "internlm3": {},
    "jais2": {},
    "jamba": {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8},
    "kimi_linear": MLA | MOE,
    "kolibri1": MOE | MIXED,
    "laguna": MOE | MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "llama": {},
    "llama4_text": MOE
    | {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 64,
    },
    "longcat_flash": MLA
    | MOE
    | {"num_layers": 1, "zero_expert_num": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16},
    "mamba": {"state_size": 4},
    "mellum": MOE | MIXED,
    "mimo_v2_flash": MOE | MIXED | {"v_head_dim": 4},
    "minicpm3": MLA,
    "minimax": MOE | {"layer_types": ["full_attention", "linear_attention"]},
    "minimax_m2": MOE,
    "ministral": MIXED,
    "ministral3": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": MOE | {"sliding_window": WINDOW},
    "modernbert-decoder": MIXED | {"local_attention": WINDOW},
    "mpt": {"n_heads": 4},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmo_hybrid": DELTA,
    "olmoe": MOE,
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": MOE | {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen2, window": MIXED | {"use_sliding_window": True},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_5_text": DELTA,
    "qwen3_moe": MOE,
    "qwen3_next": MOE | DELTA | {"shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"attention_window_size": WINDOW},
    "roberta": DECODER,
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": MOE,
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "vaultgemma": MIXED,
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "xlstm": {"num_heads": 4, "chunk_size": 16},
    "youtu": MLA,
}


SINGLE = {"xglm"}  # its own mask overflows in float64
NOT_ALONE = {  # whose last layers do not run by themselves on the keys and values that the base made
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),  # of several widths
    *("mimo_v2_flash", "gemma4_text"),  # the same
    *("codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"),  # are not called `layers`
    *("biogpt", "opt", "xglm"),  # learned positions are added to what enters
    "gemma3n_text",  # several states enter a layer
}
STATE = "keeps no keys and values per position, .* have one running state"
MORE = "keeps more than keys and values"
TREE = "does not take the mask and the positions of a draft tree"
LOGITS = "makes its logits of hidden states in a way"
REFUSED = {
    "axk2": MORE,  # an indexer that chooses positions
    "bailing_hybrid": STATE,
    "bart": TREE,  # counts positions by itself
    "bert": LOGITS,  # a transform before its LM head
    "bloom": f"{TREE}.*unpack",  # takes the mask for one of padding
    "deepseek_v32": MORE,
    "deepseek_v4": MORE,
    "falcon, alibi": f"{TREE}.*ALiBi",
    "falcon_h1": STATE,
    "falcon_mamba": STATE,
    "glm_moe_dsa": MORE,
    "gpt_neo, local": f"{TREE}.*windows",
    "granitemoehybrid": STATE,
    "jamba": STATE,
    "kimi_linear": STATE,
    "lfm2": STATE,
    "mamba": STATE,
    "minimax": STATE,
    "modernbert-decoder": LOGITS,
    "mpt": f"{TREE}.*ALiBi",
    "olmo_hybrid": STATE,
    "openai-gpt": "keeps no keys and values",  # has no cache
    "qwen3_5_text": STATE,
    "qwen3_next": STATE,
    "recurrent_gemma": STATE,
    "roberta": LOGITS,
    "rwkv": "keeps no keys and values",
    "trocr": TREE,
    "xlstm": "does not run with a cache of keys and values.*matC",
}


def base_of_architecture(name, dtype=torch.float64, **overrides):
    """A base in memory, as `load_base` makes it of a folder."""
    torch.manual_seed(0)
    sizes = OWN | ARCHITECTURES[name] | overrides
    config = CONFIG_MAPPING[name.split(",")[0]](**{key: value for key, value in sizes.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
    return base_of(model, tiny_tokenizer(), name)


@cache
def own_base(name):
    """In the precision that it can be compared in."""
    return base_of_architecture(name, torch.float32 if name in SINGLE else torch.float64)


def assert_decodes_as_generate(base):
    """Trees of any shape, eager and in fixed shapes, and rows that are decoded together, change no token, within the
    window and beyond."""
    accepted, asked = 0, prompts(1, seed=7, longest=9) + prompts(1, seed=8, longest=60)
    together = [Request(prompt, NEW_TOKENS) for prompt in asked]
    list(continue_all(replace(base, eos_ids=()), deque(together), 2))
    for number, prompt in enumerate(asked):
        ids = torch.tensor([prompt])
        want = base.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        assert Decoder(base).generate(prompt, NEW_TOKENS, eos=[]).tokens == together[number].tokens == want
        for fixed in (False, True):
            decoder = random_trees(base, want, number)
            decoder.graphs = fixed
            out = decoder.generate(prompt, NEW_TOKENS, eos=[])
            assert out.tokens == want
            accepted += sum(out.accepted)
    assert accepted > NEW_TOKENS


def outcome(name):
    """(does it decode?, why not): raises AssertionError where it decodes another way than `generate`."""
    try:
        base = own_base(name)
    except ValueError as error:
        return False, str(error).split(": ", 1)[1]
    assert_decodes_as_generate(base)
    return True, "" if base.context_length == SIZES["max_position_embeddings"] else f"context {base.context_length}"


def table():
    """docs/results/bases.md's, in Markdown."""
    lines = ["| architecture | decodes | why not |", "|---|---|---|"]
    for name in sorted(ARCHITECTURES):
        decodes, reason = outcome(name)
        lines.append(f"| `{name}` | {'yes' if decodes else 'no'} | {reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
