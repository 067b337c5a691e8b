"""Writes the base's hidden states of given answers as speculators stores them, so that it trains without an engine.

python bench/peers/states.py --base BASE --answers ROWS.jsonl --rows 0:1500 1560: --out STATES

Answers are rows with input_ids and loss_mask. OUT becomes a folder of `datasets` with input_ids, loss_mask and seq_len,
and beside it hidden_states/hs_<row>.safetensors with token_ids [L] and hidden_states [L, layers + 1, D] in bfloat16:
those behind the chosen layers, and the last one's before the final norm. Rows that are there are not made again.
"""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from answers import answers_of, span
from conditionals import LayersBase
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.model import load_base
from ctcdraft.model.decode.generate import batches_by_length

SEQUENCES = 8  # that the base reads together


def write_states(base, rows, layers, folder):
    """Raises ValueError where the folder holds the states of other rows, layers or another base."""
    states, sources = folder / "hidden_states", folder / "made_of.json"
    states.mkdir(parents=True, exist_ok=True)
    tokens = hashlib.sha256(np.concatenate([known.tokens for known in rows]).tobytes()).hexdigest()
    made_of = {"base": base.identity, "layers": [*layers], "rows": len(rows), "tokens": tokens}
    if sources.exists() and json.loads(sources.read_text()) != made_of:
        raise ValueError(f"{folder} holds the states of other rows, layers or another base: give another --out")
    sources.write_text(json.dumps(made_of, indent=1) + "\n")
    missing = [number for number in range(len(rows)) if not _file(states, number).exists()]
    batches = batches_by_length([rows[number].tokens for number in missing], SEQUENCES)
    for batch in tqdm(batches, "hidden states", unit="batch", mininterval=1):
        numbers = [missing[i] for i in batch]
        several = [torch.from_numpy(rows[number].tokens) for number in numbers]
        hidden_BLF = base.hidden(pad_sequence(several, True), attended=layers)
        for number, tokens, hidden_LF in zip(numbers, several, hidden_BLF, strict=True):
            hidden = hidden_LF[: len(tokens)].unflatten(1, (len(layers), -1)).bfloat16().contiguous()
            part = states / f"{number}.part"
            save_file({"token_ids": tokens, "hidden_states": hidden}, part)
            part.rename(_file(states, number))
    columns = {
        "input_ids": [known.tokens.tolist() for known in rows],
        "loss_mask": [known.answered.astype(int).tolist() for known in rows],
        "seq_len": [len(known.tokens) for known in rows],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)


def _file(states, number):
    return states / f"hs_{number}.safetensors"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder of the base")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="that the base computes in")
    parser.add_argument("--answers", required=True, help="rows with input_ids and loss_mask")
    parser.add_argument("--rows", type=span, nargs="+", default=[(0, float("inf"))], metavar="FIRST:END")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a row that are kept (default: 1024)")
    parser.add_argument("--layers", type=int, nargs="+", help="default: speculators' 2, half of them, all but 3")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        base = LayersBase.of(load_base(options.base, dtype=options.dtype))
        depth = base.model.config.num_hidden_layers
        layers = options.layers or [2, depth // 2, depth - 3]
        if not all(0 <= layer <= depth for layer in layers):
            raise ValueError(f"--layers {layers}: {base.name} has {depth} layers")
        write_states(base, answers_of(options.answers, options.rows, options.longest), (*layers, depth), options.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
