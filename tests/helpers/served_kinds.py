"""Heads on tiny random bases of many kinds in the real vLLM: python tests/helpers/served_kinds.py [kind ...]

Prints for each kind whether all answers, one request at a time and all together, are those of vLLM without a head, and
its steps beside our own decoder's: the list in docs/results/serving.md. A minute or two a kind; `make engine` makes
vLLM's environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from architectures import MOE
from overfitted import SMALL, learnt_head
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctcdraft.data.template import prompt_ids
from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.train.toy_base import toy_base

ROOT = Path(__file__).parents[2]
ENV = Path(os.environ.get("CTCDRAFT_ENGINE", ROOT / ".venv-vllm"))
ASKED = ["Pretend that you are a gardener in London.", "Tell me a story about a cat and a dog.", "Why is the sky blue?"]
NODES, LIMIT, WINDOW = 12, 48, 32
SIZES = {
    **{"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 3},
    **{"intermediate_size": 128, "max_position_embeddings": 512, "tie_word_embeddings": False},
}
MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
TIED = {"tie_word_embeddings": True}
LINEAR = {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}}
SCALES = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "logits_scaling": 2.0,
}
TRANSFORMERS = ("--model-impl=transformers",)  # whose models show the states of their middle layers
KINDS = {  # sizes, and options of vLLM
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "apertus", "ernie4_5"), ({}, ())),
    "llama, scaled": (LINEAR, ()),
    "mistral, window": ({"sliding_window": WINDOW}, ()),
    "qwen2, yarn": (YARN, ()),
    "qwen3_moe": (MOE, ()),
    "granite": (SCALES, ()),
    "gpt_oss": (MOE | MIXED, ()),
    **dict.fromkeys(("glm", "olmo2", "arcee", "phi", "gpt_neox", "starcoder2"), ({}, ())),
    **dict.fromkeys(("seed_oss", "helium", "hunyuan_v1_dense"), ({}, ())),
    "smollm3": ({"no_rope_layer_interval": 2}, ()),
    "olmo3": (MIXED, ()),
    "gemma": (TIED, TRANSFORMERS),
    "gemma2": (TIED | MIXED, TRANSFORMERS),
    "gemma3_text": (TIED | MIXED, TRANSFORMERS),
    **dict.fromkeys(("cohere", "glm4", "stablelm", "nemotron"), ({}, TRANSFORMERS)),
    "exaone4": ({"sliding_window": None, "layer_types": ["full_attention"] * 3}, TRANSFORMERS),
}


def write_model(folder, toy, kind):
    """A random model that reads the toy's tokens, and whose words depend on what it reads."""
    tokenizer = AutoTokenizer.from_pretrained(toy)
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind.split(",")[0]](**SIZES | {"vocab_size": len(tokenizer)} | ends | KINDS[kind][0])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 4.0 if weight.dim() > 1 else 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_base(str(folder))


def in_engine(folder, prompts, batches, options):
    """What vLLM makes of the prompts, once for each size of a batch; ends where it does not."""
    words = [ENV / "bin" / "python", ROOT / "tests" / "helpers" / "engine_run.py", f"--model={folder}", *options]
    words += ["--dtype=float32", "--max-num-seqs=16", "--enforce-eager", "--block-size=32"]
    asked = [{"prompts": prompts, "batch": batch, "sampling": {"max_tokens": LIMIT}} for batch in batches]
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, input=lines, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError(errors[-1] if errors else done.stderr[-300:])
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


def row(work, toy, kind):
    folder = work / kind.replace(", ", "-")
    base = write_model(folder, toy, kind)
    head, _ = learnt_head(base, ASKED[0], folder / "head", steps=120)
    prompts = [prompt_ids(base.tokenizer, [{"role": "user", "content": text}], None) for text in ASKED]
    prompts += [prompts[0] + prompts[1] + ids for ids in prompts]
    ours = Decoder(base, head, DraftConfig("chain", NODES, budget="fixed")).generate(prompts, LIMIT)
    options = [f"--max-model-len={min(512, base.context_length)}", *KINDS[kind][1]]
    options += ["--disable-hybrid-kv-cache-manager"] if base.windows.mixed else []
    (plain,) = in_engine(folder, prompts, [1], options)
    drafter = {"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer", "num_speculative_tokens": NODES}
    options += [f"--speculative-config={json.dumps(drafter)}"]
    options += [f"--additional-config={json.dumps({'ctcdraft': {'head': str(folder / 'head'), 'length': 'fixed'}})}"]
    found = in_engine(folder, prompts, [1, 8], options)
    same = all(one["tokens"] == plain["tokens"] for one in found)
    steps, tokens = [out.steps for out in ours], sum(len(out.tokens) - 1 for out in ours)
    others = [sum(one["steps"]) for one in found if one["steps"] != steps]
    told = f"{'identical' if same else 'DIFFERENT'}, steps {f'NOT EQUAL, {others}' if others else 'equal'}"
    return f"{told}: {sum(steps)} for {tokens} tokens"


def main():
    with tempfile.TemporaryDirectory() as work:
        toy = toy_base(Path(work) / "cache", SMALL)
        for kind in sys.argv[1:] or KINDS:
            try:
                found = row(Path(work), toy, kind)
            except (RuntimeError, ValueError) as error:
                found = f"failed: {error}"
            print(f"{kind}: {found}", flush=True)


if __name__ == "__main__":
    main()
