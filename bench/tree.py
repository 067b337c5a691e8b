"""Time of one best-first tree search: compiled, and the same code in plain Python."""

import time
from statistics import median

import numpy as np
import torch

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import tree
from ctcdraft.model.lattice import candidates_of


def timed(call, rounds):
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1e6


def main():
    torch.manual_seed(0)
    rows = []
    for top_k in (4, 8, 16):
        lattice = candidates_of(torch.randn(1, 8, 2048) * 3, torch.zeros(1, 8), top_k).lattices()[0]
        ends = np.array([2])
        for nodes in (16, 64):
            plain = (lattice.emission, lattice.blank, lattice.tokens, ends, True, nodes, 8, False)
            arguments = (*plain, False, *tree.NOT_MOVED)
            tree._search(*arguments)
            fast = timed(lambda arguments=arguments: tree._search(*arguments), 300)
            slow = timed(lambda arguments=arguments: tree._search.py_func(*arguments), 3)
            rows.append((nodes, len(lattice.tokens), f"{fast:.0f}", f"{slow:.0f}", f"{slow / fast:.0f}"))
    print("8 slots; microseconds, median")
    print(markdown_table(("nodes", "candidates", "compiled", "Python", "ratio"), rows))


if __name__ == "__main__":
    main()
