"""Prompt lookup: where the last tokens were read before, the tokens that followed are a draft (Saxena 2023).

One compiled scan over the tokens of a request, 8 µs for 8,000 of them, finds the latest of the longest matches. A copy
goes on into itself, so a loop is drafted whole. How likely a copied token is was counted on known answers.

`with_copies` puts copies into a draft tree. Of what may follow a node, a copy takes its rate w, the head's tokens share
1 - w: P(child) = P(node) * (w [child is the copy's] + (1 - w) psi(child) / psi(node)), as in a pointer-generator
network (See et al. 2017). A node that both propose is one node, and P never grows along a path.
"""

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .tree import HEAD, LOOKUP, Tree

LONGEST_MATCH = 32  # tokens; longer ones are as good
LONGEST_RUN = 64  # match and copy together
MATCHES = 2  # copies per draft, which differ in their first token
# P(a copied token is right), counted on SmolLM2-135M-Instruct's greedy answers to 2,357 conversations, neighbours of
# few observations pooled. FIRST[m - 1], SECOND[m - 1]: the first token of a copy behind a match of m tokens, of the
# longest match and, where that one's is wrong, of the next. LATER[r - 1]: a further token, where those before it are
# right, match and copy together being r tokens long. The last rate of each is that of all longer ones.
FIRST = (
    *(0.22, 0.53, 0.60, 0.65, 0.69, 0.69, 0.69, 0.69, 0.69, 0.72, 0.75, 0.78, 0.80, 0.80, 0.80, 0.83),
    *(0.83, 0.83, 0.86, 0.86, 0.86, 0.93, 0.93, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.97, 0.996),
)
SECOND = (0.16, 0.28, 0.32, 0.43, 0.43, 0.32, 0.17, 0.11)
LATER = (
    *(0.5, 0.55, 0.64, 0.72, 0.77, 0.80, 0.82, 0.85, 0.86, 0.875, 0.885, 0.89, 0.90, 0.915, 0.92, 0.925),
    *(0.93, 0.935, 0.935, 0.94, 0.94, 0.94, 0.945, 0.945, 0.95, 0.95, 0.96, 0.965, 0.965, 0.965, 0.967, 0.967),
    *(0.985, 0.985, 0.985, 0.985, 0.988, 0.988, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.993, 0.993, 0.993),
    *(0.993, 0.993, 0.996),
)
SAMPLED = 0.75  # odds of a copied token fall by exp(-SAMPLED T): 0.47 at temperature 1, counted on 700 sampled answers


@lru_cache
def rates_at(temperature: float) -> NDArray[np.float32]:
    """[3, LONGEST_RUN + 1]: these rates by length, for a base that samples so; column 0 is not used."""
    rows = [[0.0, *rates, *[rates[-1]] * LONGEST_RUN][: LONGEST_RUN + 1] for rates in (FIRST, SECOND, LATER)]
    p = np.array(rows)
    odds = p * np.exp(-SAMPLED * temperature)
    return (odds / (1 - p + odds)).astype(np.float32)


def with_copies(tree: Tree, read: NDArray[np.int64], longest: int, temperature: float = 0.0) -> Tree:
    """A head's tree (or none, `tree.EMPTY`) and copies of at most `longest` tokens in one, with P for psi, not ordered
    yet (`tree.chosen`); read: the tokens so far, the root last; temperature: how the base will choose."""
    nodes = tree.tokens, tree.parents, tree.depths, tree.psi
    return Tree(*_merged(*nodes, read=read, depth=longest, rates=rates_at(temperature)))


@njit(cache=True)
def match(read, other_than):
    """(start, length): the place behind the latest of the longest earlier matches of the last tokens that `other_than`
    does not follow; length 0: there is none."""
    last = len(read) - 1
    start, length = -1, 0
    for end in range(last - 1, -1, -1):
        if read[end] != read[last] or read[end + 1] == other_than:
            continue
        m = 1
        while m < LONGEST_MATCH and m <= end and read[end - m] == read[last - m]:
            m += 1
        if m > length:
            start, length = end + 1, m
            if m == LONGEST_MATCH:
                break
    return start, length


@njit(cache=True)
def _merged(tokens, parents, depths, psi, read, depth, rates):
    """Fields of the tree that holds the head's nodes and those of the copies, each behind its parent; psi is P."""
    N = len(tokens)
    room = N + MATCHES * depth
    token = np.empty(room, np.int64)
    parent = np.empty(room, np.int64)
    level = np.empty(room, np.int64)
    source, share = np.empty(room, np.int8), np.zeros(room, np.float32)
    by_head = np.zeros(room, np.float32)  # psi(child) / psi(node)
    taken = np.zeros(room + 1, np.float32)  # by copies, of what may follow a node; the last one is the root's
    for i in range(N):  # see best_first._emit
        token[i], parent[i], level[i], source[i] = tokens[i], parents[i], depths[i], HEAD
        before = psi[parents[i]] if parents[i] >= 0 else np.float32(1.0)
        by_head[i] = min(psi[i] / before, np.float32(1.0)) if before > 0 else np.float32(0.0)
    count, first = N, np.int64(-1)
    for number in range(MATCHES):
        start, length = match(read, first)
        if length == 0:
            break
        first, at = read[start], -1
        for j in range(depth):
            said = read[start + j % (len(read) - start)]  # at the end it goes on into itself
            w = rates[number, length] * (1 - taken[-1]) if j == 0 else rates[2, min(length + j, LONGEST_RUN)]
            child = -1
            for i in range(N):
                if parent[i] == at and token[i] == said:
                    child = i
            if child < 0:
                child = count
                token[child], parent[child], level[child], source[child] = said, at, j + 1, 0
                count += 1
            source[child] |= LOOKUP
            share[child] = w
            taken[at] += w
            at = child
    p = np.empty(count, np.float32)
    for i in range(count):
        before = p[parent[i]] if parent[i] >= 0 else np.float32(1.0)
        p[i] = before * min(share[i] + (1 - taken[parent[i]]) * by_head[i], np.float32(1.0))
    return token[:count], parent[:count], level[:count], p, source[:count]
