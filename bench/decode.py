"""Where a decoding step's time goes, and what a given acceptance is worth: speedup / tokens per step.

python bench/decode.py [--shape tiny|base_50m|vicuna_7b] [--nodes 8 16 32 64] [--accept 2.5] [--batch 1 8]

Base and head (of the default's shape) have random weights, which timing does not mind; what the base says depends on
the last token alone, by a margin that no rounding reaches. Acceptance is then set by a script: the head drafts and the
tree is searched as always, and then some of its nodes are replaced by what the base is known to say next. Plain and
speculative decoding alternate. On a GPU both replay CUDA graphs, of one sequence; --eager measures them without graphs
as well.
"""

import argparse
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from measure import interleaved, keep, spread, told
from tqdm import tqdm
from train_step import SHAPES as STEP_SHAPES
from train_step import random_base, random_head

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.draft.tree import Tree

SHAPES = {
    name: replace(STEP_SHAPES[of], batch=1, length=64)
    for name, of in {"tiny": "tiny", "base_50m": "small", "vicuna_7b": "vicuna_7b"}.items()
}


class Scripted(Decoder):
    """Accepts `accept` draft tokens per step on average: the true continuation stands in the tree's first nodes."""

    def __init__(self, base, head, draft, accept):
        super().__init__(base, head, draft)
        self.accept, self.truth, self.rng = accept, [], np.random.default_rng(0)

    def _propose(self, request, lattice):
        tree = super()._propose(request, lattice)
        at = len(request.out.tokens)
        wanted = int(self.accept) + (self.rng.random() < self.accept % 1)
        path = self.truth[at : at + min(wanted, len(tree), max(0, request.room))]
        n, count = len(path), len(tree)
        tokens, parents, depths = tree.tokens.copy(), np.full(count, -1), np.ones(count, np.int64)
        tokens[:n], parents[:n], depths[:n] = path, np.arange(n) - 1, np.arange(n) + 1
        if at + n < len(self.truth):  # no other node may happen to be right
            wrong = (self.truth[at + n] + 1 + np.arange(count - n)) % self.base.vocab_size
            tokens[n:] = wrong
            parents[n:], depths[n:] = n - 1, n + 1
        return Tree(tokens, parents, depths, tree.psi)


@cache
def random_model(name):
    base = random_base(SHAPES[name])
    torch.manual_seed(0)
    make_sure(base)
    return base, random_head(base, "full").to(base.dtype).eval()


@torch.no_grad()
def make_sure(base):
    """Behind each token comes another: layers add next to nothing, the LM head is the embeddings in another order."""
    for layer in base.model.model.layers:
        layer.self_attn.o_proj.weight.mul_(1e-4)  # not 0: a GPU multiplies zeros faster
        layer.mlp.down_proj.weight.mul_(1e-4)
    embeddings = base.model.get_input_embeddings().weight
    base.model.lm_head.weight.copy_(embeddings[torch.randperm(len(embeddings), device=embeddings.device)])


def measured(name, batch, eager, given):
    """One row per number of nodes: a batch of equal prompts, drafted and plainly."""
    shape, (base, head) = SHAPES[name], random_model(name)
    prompts = [np.random.default_rng(0).integers(3, shape.vocab, shape.length).tolist()] * batch
    plain = Decoder(base)
    drafts = {n: DraftConfig(nodes=n, budget="fixed") for n in given.nodes}
    decoders = {n: Scripted(base, head, draft, given.accept) for n, draft in drafts.items()}
    for decoder in (plain, *decoders.values()):
        decoder.graphs &= not eager and batch == 1
    truth = plain.generate(prompts, given.tokens, eos=[])[0].tokens
    outs = {}

    def run(n):
        decoders[n].truth = truth
        outs.setdefault(n, []).append(decoders[n].generate(prompts, given.tokens, eos=[]))

    calls = {"plain": lambda: plain.generate(prompts, given.tokens, eos=[])}
    calls |= {n: (lambda n=n: run(n)) for n in given.nodes}
    seconds = interleaved(calls, given.rounds)
    rows = []
    for n in given.nodes:
        out = outs[n][-1][0]
        speedup = spread(seconds["plain"])["median"] / spread(seconds[n])["median"]
        whole = sum(seconds[n])
        parts = {part: sum(o[0].seconds[part] for o in outs[n][1:]) / whole for part in ("verify", "draft", "tree")}
        rows.append(
            {
                "shape": name,
                "batch": batch,
                "graphs": plain.graphs,
                "nodes": n,
                "tokens_per_step": out.tokens_per_step,
                "speedup": speedup,
                "conversion": speedup / out.tokens_per_step,
                "step_ms": spread(seconds[n])["median"] / out.steps * 1e3,
                "plain_step_ms": spread(seconds["plain"])["median"] / (given.tokens - 1) * 1e3,
                "time_share": {**parts, "other": 1 - sum(parts.values())},
                "identical": all(one.tokens == truth for one in outs[n][-1]),
            }
        )
    return rows


def table(rows):
    lines = [
        (
            row["shape"],
            row["batch"],
            "yes" if row["graphs"] else "no",
            row["nodes"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['conversion']:.2f}",
            f"{row['plain_step_ms']:.2f}",
            f"{row['step_ms']:.2f}",
            *(f"{row['time_share'][part]:.1%}" for part in ("verify", "draft", "tree", "other")),
            "yes" if row["identical"] else "NO",
        )
        for row in rows
    ]
    header = ("shape", "batch", "graphs", "N", "tokens/step", "speedup", "conversion", "plain ms", "step ms")
    return markdown_table((*header, "verify", "draft", "tree", "other", "identical"), lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny", "base_50m"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--accept", type=float, default=2.5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences together")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs as well")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, eager = [], [False, True] if options.eager else [False]
    for name, batch, without in tqdm([*product(options.shape, options.batch, eager)], desc="decode", leave=False):
        rows += measured(name, batch, without, options)
        keep(rows, options.out)  # a process that is ended leaves what it has
    told(f"; scripted acceptance of {options.accept} draft tokens", table(rows))


if __name__ == "__main__":
    main()
