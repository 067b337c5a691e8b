"""Tokens per step of heads and draft settings on answers that are known, counted without decoding (eval/replay.py).

python bench/replay.py <answers.jsonl.gz> --base <model> [--head <exported head> ...] [--nodes 16 32]
    [--prompt-lookup 0 32] [--rows 64] [--kind tree] [--dtype fp32]

Rows hold `input_ids` and `loss_mask`: the base's own greedy answers; --rows of them are taken, evenly spread. Every
head is counted with every setting, and prompt lookup alone beside them.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np

from ctcdraft.eval.replay import known_rows, replay
from ctcdraft.eval.report import markdown_table
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.model.tree import SOURCES


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers")
    parser.add_argument("--base", required=True)
    parser.add_argument("--head", nargs="*", default=[])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--prompt-lookup", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--kind", default="tree")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [known for known in known_rows(options.answers) if known.answers()]
    chosen = np.linspace(0, len(rows) - 1, min(options.rows, len(rows))).astype(int)
    base = load_base(options.base, options.dtype)
    heads = {"no head": None, **{Path(path).resolve().parent.name: load_head(path, base) for path in options.head}}
    decoders = {}
    for (name, head), nodes, copied in product(heads.items(), options.nodes, options.prompt_lookup):
        if head is not None or copied:
            draft = DraftConfig(options.kind, nodes, prompt_lookup=copied)
            decoders[name, nodes, copied] = Decoder(base, head, draft)
    found = replay(base, decoders, [rows[i] for i in chosen])
    table = []
    for (name, nodes, copied), out in found.items():
        whole = max(1, out.accepted_from.total())
        shares = [out.accepted_from[source] / whole for source in SOURCES.values()]
        foretold = f"{np.mean(out.expected):.2f} / {np.mean(out.accepted):.2f}"
        table.append((name, nodes, copied, f"{out.tokens_per_step:.3f}", foretold, *(f"{x:.0%}" for x in shares)))
    header = ("head", "N", "copied", "tokens per step", "foretold / accepted", "by the head", "by lookup", "by both")
    print(f"{len(chosen)} sequences of {options.answers}\n\n{markdown_table(header, table)}")
    if options.out:
        options.out.write_text(json.dumps([dict(zip(header, row, strict=True)) for row in table], indent=1) + "\n")


if __name__ == "__main__":
    main()
