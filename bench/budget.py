"""What draft.budget=measured is worth beside every fixed N: real decoding of known prompts, settings interleaved.

python bench/budget.py <answers.jsonl.gz> --base <model> [--head <exported head>] [--nodes 8 16 32] [--rows 8]
    [--tokens 128] [--dtype fp32] [--threads 2]

Rows hold `input_ids` and `loss_mask`; what comes before the first answer is the prompt. Foretold and accepted
tokens are per step. A speedup is plain decoding's seconds over the setting's, summed over the same prompts; the last
column says how much faster each setting is than the best fixed N.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from measure import machine
from tqdm import tqdm

from ctcdraft.data.records import tokens_of
from ctcdraft.data.sources import read_rows
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.run import balanced_orders
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers")
    parser.add_argument("--base", required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [tokens_of(row, number) for number, row in enumerate(read_rows(options.answers))]
    chosen = np.linspace(0, len(rows) - 1, min(options.rows, len(rows))).astype(int)
    prompts = [rows[i].prompt for i in chosen]
    base = load_base(options.base, options.dtype)
    head = load_head(options.head, base) if options.head else None
    decoders = {"plain": Decoder(base)}
    decoders |= {f"N={n}": Decoder(base, head, DraftConfig(nodes=n, budget="fixed")) for n in options.nodes}
    decoders["measured"] = Decoder(base, head, DraftConfig(nodes=max(options.nodes), budget="measured"))
    for decoder in decoders.values():
        decoder.generate(prompts[0], 16)
    outs = {name: [] for name in decoders}
    orders = balanced_orders(list(decoders))
    for number, prompt in enumerate(tqdm(prompts, "decoding", unit="prompt", mininterval=1)):
        for name in orders[number % len(orders)]:
            outs[name].append(decoders[name].generate(prompt, options.tokens))
    seconds = {name: sum(sum(out.seconds.values()) for out in made) for name, made in outs.items()}
    best = min(seconds[f"N={n}"] for n in options.nodes)
    table = []
    for name, made in outs.items():
        steps = sum(out.steps for out in made)
        nodes, foretold, accepted = (
            sum(sum(getattr(out, key)) for out in made) / steps for key in ("nodes", "expected", "accepted")
        )
        grown = sum(len(out.tokens) - 1 for out in made) / steps
        times = (f"{1e3 * seconds[name] / steps:.0f}", f"{seconds['plain'] / seconds[name]:.2f}")
        row = (name, f"{nodes:.1f}", f"{foretold:.2f} / {accepted:.2f}", f"{grown:.2f}", *times)
        table.append((*row, f"{best / seconds[name] - 1:+.1%}"))
    header = (
        *("budget", "nodes per step", "foretold / accepted", "tokens per step"),
        *("ms per step", "speedup", "beside the best N"),
    )
    times = ", ".join(f"{n}: {1e3 * decoders['measured'].budget[n]:.0f} ms" for n in (0, *options.nodes))
    print(f"Machine: {machine()}. {len(prompts)} prompts, {options.dtype}; steps as measured: {times}\n")
    print(markdown_table(header, table))


if __name__ == "__main__":
    main()
