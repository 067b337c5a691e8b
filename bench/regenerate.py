"""The base's own answers to many prompts: continuous batching beside transformers' `generate` on the same batch.

python bench/regenerate.py --base FOLDER --prompts FILE [--dtype bf16] [--prompt-count 64] [--new 192] [--rounds 3]

FILE: JSON lines of conversations; their first turns are asked. Interleaved rounds, medians. `generate` pads all prompts
to the longest, copies its cache at each step, and waits for the longest answer.
"""

import argparse
import random
import time
from collections import deque
from statistics import median

import torch
from transformers import GenerationConfig

from ctcdraft.data.records import record_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.data.template import prompt_ids
from ctcdraft.eval.report import markdown_table
from ctcdraft.model import load_base
from ctcdraft.model.decode.generate import continue_all
from ctcdraft.model.decode.request import Request


def first_turns(base, path, count):
    """`count` prompts of the file, drawn with a fixed seed, as tokens."""
    rows, found = list(read_rows(path)), []
    random.Random(0).shuffle(rows)
    for number, row in enumerate(rows):
        if len(found) == count:
            break
        try:
            opening = record_of(row, str(number), "sharegpt").opening
        except RowError:
            continue
        found.append(prompt_ids(base.tokenizer, [{"role": "user", "content": opening}], ()))
    return found


def ours(base, prompts, new):
    asked = [Request(prompt, new) for prompt in sorted(prompts, key=len)]
    list(continue_all(base, deque(asked), len(asked)))
    return sum(len(one.tokens) for one in asked)


def transformers_generate(base, prompts, new):
    longest, pad = max(map(len, prompts)), base.eos_ids[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    settings = GenerationConfig(max_new_tokens=new, eos_token_id=list(base.eos_ids), pad_token_id=pad)
    with torch.no_grad():
        out = base.model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:]
    ends = torch.isin(out, torch.tensor(base.eos_ids)).long()
    return int(((ends.cumsum(dim=1) - ends) == 0).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompt-count", type=int, default=64)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    base = load_base(options.base, dtype=options.dtype)
    prompts = first_turns(base, options.prompts, options.prompt_count)
    speed = {ours: [], transformers_generate: []}
    for side in speed:
        side(base, prompts[:2], 2)  # the first call compiles
    for _ in range(options.rounds):
        for side, found in speed.items():
            start = time.perf_counter()
            tokens = side(base, prompts, options.new)
            found.append(tokens / (time.perf_counter() - start))
            print(f"{side.__name__}: {tokens:,} tokens, {found[-1]:.0f} tokens/s", flush=True)
    ratios = sorted(a / b for a, b in zip(*speed.values(), strict=True))
    rows = [(side.__name__.replace("_", " "), f"{median(found):.0f}") for side, found in speed.items()]
    lengths = [len(prompt) for prompt in prompts]
    print(f"\n{options.dtype}, {len(prompts)} prompts, {sum(lengths):,} tokens, longest {max(lengths)}")
    print(markdown_table(("decoded by", "tokens/s"), rows))
    print(f"ratio {median(ratios):.2f} (lowest {ratios[0]:.2f}, highest {ratios[-1]:.2f}), {options.rounds} rounds")


if __name__ == "__main__":
    main()
