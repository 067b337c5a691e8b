"""Tiny random bases: real transformers folders, made in a second, good for anything but language."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}<u>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def tiny_tokenizer(template=TEMPLATE, extra=()):
    """Bytes as tokens, plus specials: any text encodes, nothing is learnt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<u>", "<a>", *extra]
    vocab = {symbol: i for i, symbol in enumerate(specials + alphabet)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<u>", "<a>", *extra],
    )
    tokenizer.chat_template = template
    return tokenizer


SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_base(folder, family="llama", template=TEMPLATE, seed=0, context=256, **overrides):
    torch.manual_seed(seed)
    sizes = SIZES | {"max_position_embeddings": context} | overrides
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder
