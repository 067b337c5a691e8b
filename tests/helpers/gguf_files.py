"""Tiny GGUF files, with the weights that they were written from."""

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from gguf.quants import dequantize

VOCAB, WIDTH, INNER, HEADS, LAYERS = 300, 64, 128, 4, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_gguf(path, kind=GGMLQuantizationType.F32, architecture="llama", seed=0, leave_out=()):
    """A random llama as a GGUF. Returns its weights as they can be read back, by GGUF's names."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCAB)
    _write_tokenizer(writer)
    weights = {}
    random = np.random.default_rng(seed)
    for name, shape in shapes().items():
        if name in leave_out:
            continue
        exact = len(shape) == 1
        values = random.normal(1.0 if exact else 0.0, 0.1 if exact else 0.3, shape).astype(np.float32)
        if exact or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            packed = quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            values = dequantize(packed, kind)
        weights[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def shapes():
    found = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        found |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": (WIDTH // 2, WIDTH),
            f"blk.{i}.attn_v.weight": (WIDTH // 2, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_up.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, INNER),
        }
    return found


def _write_tokenizer(writer):
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens) - 1)] + ["ab"]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCAB - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
