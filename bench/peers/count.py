"""Tokens per step of a peer's drafters along given answers of the base, by the ruler of `eval.py count=true`.

python bench/peers/count.py --base BASE --answers ROWS.jsonl --rows 1500:1560 --drafter dspark=FOLDER eagle3=FOLDER

Of each drafter: its chain, its tree of N nodes, and both beside copied tokens (prompt lookup); and prompt lookup alone.
Answers are rows with input_ids and loss_mask, as `prepare` reads them, and must be the base's own greedy ones.
"""

import argparse
import json
from pathlib import Path

import torch
from answers import answers_of, span
from conditionals import LayersBase, PeerHead
from drafters import load_drafter

from ctcdraft.eval.bench import Question
from ctcdraft.eval.count import figures_of
from ctcdraft.eval.report import draft_rows, markdown_table
from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.replay import replay

COPIES = DraftConfig.prompt_lookup


def decoders_of(base, heads, nodes):
    """Every way to draft that is counted, by its label."""
    decoders = {}
    for name, head in heads.items():
        for copies, beside in ((0, ""), (COPIES, " and copies")):
            kinds = [("chain", max(nodes), "chain")] + [("tree", n, f"tree of {n}") for n in nodes]
            for kind, size, label in kinds:
                draft = DraftConfig(kind, size, budget="fixed", prompt_lookup=copies)
                decoders[f"{name}, {label}{beside}"] = Decoder(base, head, draft)
    for n in nodes:
        decoders[f"prompt lookup alone, tree of {n}"] = Decoder(base, None, DraftConfig("tree", n, budget="fixed"))
    return decoders


def named(text):
    name, _, folder = text.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=folder")
    return name, folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder of the base, in float32")
    parser.add_argument("--answers", required=True, help="rows with input_ids and loss_mask")
    parser.add_argument("--rows", type=span, required=True, metavar="FIRST:END", help="which of them are counted")
    parser.add_argument("--longest", type=int, default=900, help="tokens of a row that count (default: 900)")
    parser.add_argument("--drafter", type=named, nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--depth", type=int, default=8, help="longest draft of EAGLE-3 (default: 8)")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    try:
        base = LayersBase.of(load_base(options.base, dtype="fp32"))
        answers = [
            row for row in answers_of(options.answers, [options.rows], options.longest) if row.answered[1:].any()
        ]
        if not answers:
            raise ValueError(f"{options.answers}: --rows hold no answer within {options.longest} tokens")
        heads = {
            name: PeerHead(load_drafter(folder, options.depth), base, max(options.nodes))
            for name, folder in options.drafter
        }
    except ValueError as error:
        parser.error(str(error))
    found = replay(base, decoders_of(base, heads, options.nodes), answers)
    owners = [Question(str(number), "answers") for number in range(len(answers))]
    figures = {label: figures_of(replayed, owners, seed=0) for label, replayed in found.items()}
    table = markdown_table(*draft_rows(figures))
    print(f"{len(answers)} answers of {base.name}, {torch.get_num_threads()} threads\n\n{table}")
    if options.out:
        options.out.write_text(json.dumps({"answers": len(answers), "drafts": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
