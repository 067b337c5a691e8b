"""What packed weights are worth on a CPU: one forward of the base over so many rows behind a prompt, logits included.

python bench/packed.py --base <model> [--dtypes fp32 bf16] [--rows 1 9 17 33] [--prompt 200] [--rounds 15] [--threads 2]
"""

import argparse
from copy import deepcopy
from dataclasses import replace

import torch
from measure import interleaved, machine, spread

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import load_base
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.draft.budget import chain_of
from ctcdraft.model.draft.tree import tree_mask


def forward_of(base, rows, prompt):
    """A call that reads `rows` tokens in a chain behind a prompt."""
    cache = TreeCache(base.depth, 1, prompt + rows)
    mask, ids = cache.causal_mask(prompt, base.device), torch.arange(prompt + rows).unsqueeze(0) % base.vocab_size
    base.hidden(ids[:, :prompt], mask, cache=cache)
    cache.lengths[0] = prompt
    mask = tree_mask([chain_of(list(range(rows - 1)), 0.5)], cache.lengths[:1], base.device)

    def call():
        hidden = base.hidden(ids[:, prompt:], mask, cache=cache)
        base.logits(hidden[0]).argmax(dim=-1)
        cache.lengths[0] = prompt

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 17, 33])
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = []
    for dtype in options.dtypes:
        packed = load_base(options.base, dtype)
        bases = {"plain": replace(packed, model=deepcopy(packed.model)), "packed": packed}  # copies are plain layers
        calls = {(name, n): forward_of(base, n, options.prompt) for name, base in bases.items() for n in options.rows}
        seconds = {key: spread(times)["median"] for key, times in interleaved(calls, options.rounds).items()}
        for n in options.rows:
            plain, ours = seconds["plain", n], seconds["packed", n]
            beside = [plain / seconds["plain", options.rows[0]], ours / seconds["packed", options.rows[0]]]
            table.append([dtype, n, f"{1e3 * plain:.1f}", f"{1e3 * ours:.1f}", f"{plain / ours:.2f}x"])
            table[-1] += [f"{ratio:.2f}" for ratio in beside]
    first = options.rows[0]
    heads = ["dtype", "rows", "plain ms", "packed ms", "faster", f"plain / {first} row", f"packed / {first} row"]
    print(f"{machine()}; medians of {options.rounds} interleaved rounds\n\n{markdown_table(heads, table)}")


if __name__ == "__main__":
    main()
