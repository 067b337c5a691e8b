"""What is hung into a draft tree beside the head's nodes and copies: phrases of a pool, and what follows the same
tokens elsewhere in the tree. All are candidates: what becomes of them, the base says.

Phrases: Ouroboros (Zhao et al. 2024, arXiv 2402.13720). Siblings: graph-structured speculative decoding (Gong et al.
2024, arXiv 2407.16207), whose graph is unrolled into the tree.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tree import PHRASES, Tree

LENGTH = 6  # tokens of a phrase
PER_KEY, DRAFTED = 20, 3  # phrases behind a token: kept, and hung below a node, the newest
MOST_KEYS = 8192  # tokens with phrases, those that were used last
LEARN = 0.02  # how much one phrase that was drafted changes what the next are worth
FAINT = 0.02  # nodes that are worth less get no phrases


class Path(NamedTuple):
    """Tokens that may follow a node (-1: the root), and how likely each is accepted where the one before was."""

    node: int
    tokens: Sequence[int]
    rate: Sequence[float]


class Phrases:
    """Of one request. behind: token -> the phrases that were seen behind it, the newest last."""

    def __init__(self) -> None:
        self.learnt = 0  # tokens of its text
        self.behind: OrderedDict[int, deque[tuple[int, ...]]] = OrderedDict()
        self.rates = [0.3, 0.3]  # how often a phrase's first token, and a further one, was accepted

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Only whole phrases are kept."""
        if len(phrase) < LENGTH:
            return
        whole = tuple(int(one) for one in phrase[:LENGTH])
        known = self.behind.setdefault(token, deque(maxlen=PER_KEY))
        if whole in known:
            known.remove(whole)
        known.append(whole)
        self.behind.move_to_end(token)
        if len(self.behind) > MOST_KEYS:
            self.behind.popitem(last=False)

    def learn(self, read: NDArray[np.int64]) -> None:
        """The phrases of a text that grows from call to call."""
        for at in range(max(0, self.learnt - LENGTH), len(read) - LENGTH):
            self.add(int(read[at]), read[at + 1 : at + 1 + LENGTH].tolist())
        self.learnt = len(read)

    def paths(self, tree: Tree, root: int) -> Iterator[Path]:
        first, later = self.rates
        for node in range(-1, len(tree)):
            token = root if node < 0 else int(tree.tokens[node])
            if (node < 0 or tree.psi[node] >= FAINT) and token in self.behind:
                for phrase in list(self.behind[token])[-DRAFTED:]:
                    yield Path(node, phrase, [first, *[later] * (LENGTH - 1)])

    def observe(self, tree: Tree, path: Sequence[int]) -> None:
        """What became of the phrases behind accepted nodes."""
        stood = {-1, *path}
        for node in np.flatnonzero(tree.source & PHRASES).tolist():
            parent = int(tree.parents[node])
            if parent in stood:
                later = int(parent >= 0 and bool(tree.source[parent] & PHRASES))
                self.rates[later] = (1 - LEARN) * self.rates[later] + LEARN * (node in stood)


def tails(tree: Tree, path: Sequence[int], said: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
    """(token, what the base said behind it, as far as the draft agreed) of the nodes that were not accepted, where what
    it said is known: said[0] behind the root, said[n + 1] behind node n."""
    child = {
        (int(parent), int(token)): n for n, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    for node in sorted(set(range(len(tree))) - set(path)):
        phrase, at = list[int](), node
        while at + 1 in said:
            phrase.append(said[at + 1])
            at = child.get((at, phrase[-1]), -2)
        if phrase:
            yield int(tree.tokens[node]), phrase


def siblings(tree: Tree, root: int) -> Iterator[Path]:
    """Below each leaf what follows the likeliest other node that ends in the same two tokens: all paths behind it."""
    behind = tree.ancestors()[1:, 1:]  # is node i node j, or one behind it?
    inner = behind.sum(axis=0) > 1
    before = np.where(tree.parents < 0, root, tree.tokens[tree.parents])
    for leaf in np.flatnonzero(~inner).tolist():
        same = (tree.tokens == tree.tokens[leaf]) & (before == before[leaf])
        twins = np.flatnonzero(same & inner & ~behind[leaf])  # not on its own path
        if not len(twins):
            continue
        below = behind[:, twins[0]]
        for end in np.flatnonzero(below)[1:]:
            path = np.flatnonzero(below & behind[end])  # from the twin on
            rate = tree.psi[path[1:]] / tree.psi[path[:-1]]
            yield Path(leaf, tree.tokens[path[1:]].tolist(), rate.tolist())


def grafted(tree: Tree, paths: Iterator[Path], source: int, deepest: int) -> Tree:
    """The tree with these paths in it, not ordered yet (`tree.chosen`); a node that is there stays as it is."""
    rows = (tree.tokens, tree.parents, tree.depths, tree.psi, tree.source)
    tokens, parents, depths, psi, sources = (row.tolist() for row in rows)
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    for at, phrase, rate in paths:
        for token, share in zip(phrase, rate, strict=True):
            depth = 1 if at < 0 else depths[at] + 1
            if depth > deepest:
                break
            node = child.setdefault((at, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(at)
                depths.append(depth)
                psi.append((1.0 if at < 0 else psi[at]) * share)
                sources.append(0)
            sources[node] |= source
            at = node
    nodes_3N = np.array([tokens, parents, depths], np.int64).reshape(3, -1)
    return Tree(nodes_3N[0], nodes_3N[1], nodes_3N[2], np.array(psi, np.float32), np.array(sources, np.int8))
