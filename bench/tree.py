"""Time of one best-first tree search; and of a draft with a transition and without.

python bench/tree.py [--shape tiny small] [--rounds N]
"""

import argparse
import time
from functools import partial
from statistics import median

import numpy as np
import torch
from measure import interleaved
from train_step import SHAPES, random_base, random_head

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.draft import tree
from ctcdraft.model.draft.drafter import Frontier
from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import Topology

NODES = 32
CONTEXT, ACCEPTED = 64, 3  # positions that the head has read, and those of one step


def timed(call, rounds):
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1e6


def searches():
    rows = []
    for top_k in (128, 512, 1024):
        lattice = candidates_of(torch.randn(1, 8, 2048) * 3, torch.zeros(1, 8), top_k, Topology(False, 1)).lattices()[0]
        ends = np.array([2])
        for nodes in (16, 64):
            search = partial(tree.search, lattice, nodes, leaves=ends)
            search()
            rows.append((nodes, len(lattice.tokens), f"{timed(search, 300):.0f}"))
    print("8 slots; median of 300")
    print(markdown_table(("nodes", "candidates", "microseconds"), rows))


class Draft:
    """One draft after the other behind the same context: head, LM head, candidates, tree."""

    def __init__(self, base, transition):
        torch.manual_seed(0)
        self.head = random_head(base, transition).eval()
        for p in self.head.parameters():  # what begins at 0 would spare the search its work
            p.data.add_(torch.randn_like(p) * 0.05)
        self.decoder = Decoder(base, self.head, DraftConfig(nodes=NODES))
        ids = torch.randint(0, base.vocab_size, (1, CONTEXT), device=base.device)
        self.cache = TreeCache(base.model.config.num_hidden_layers, 1, 2 * CONTEXT)
        read = torch.cat([ids, ids[:, :ACCEPTED]], dim=1)
        self.hidden = base.hidden(read, cache=self.cache, attended=self.head.attended)[:, :CONTEXT].float()
        self.cache.commit([range(CONTEXT + ACCEPTED)])
        self.root, self.read = ids, ids[0].cpu().numpy()

    def __call__(self):
        newest, decoder = self.cache.newest([ACCEPTED], ACCEPTED, self.root.device), self.decoder
        hidden, root = self.hidden[:, :ACCEPTED], self.root[:, :ACCEPTED]
        (drafted,) = self.head.drafts(hidden, root, newest, decoder.vocabulary, self.cache)
        decoder.drafter.tree(drafted, Frontier(self.read, ()))


def drafts(shapes, rounds):
    rows = []
    for name in shapes:
        base = random_base(SHAPES[name])
        calls = {transition: Draft(base, transition) for transition in ("none", "full")}
        middle = {transition: median(seconds) for transition, seconds in interleaved(calls, rounds, 5).items()}
        micro = (f"{seconds * 1e6:.0f}" for seconds in middle.values())
        rows.append((name, *micro, f"{middle['full'] / middle['none']:.2f}"))
    print(f"\nA whole draft of {NODES} nodes; microseconds, median, interleaved")
    print(markdown_table(("shape", "without transition", "with", "times"), rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    searches()
    drafts(options.shape, options.rounds)


if __name__ == "__main__":
    main()
