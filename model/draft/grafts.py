"""What is hung into a draft tree beside the head's nodes and copies: phrases of a pool, and what follows the same
tokens elsewhere in the tree. All are candidates: what becomes of them, the base says.

Phrases: Ouroboros (Zhao et al. 2024, arXiv 2402.13720). Siblings: graph-structured speculative decoding (Gong et al.
2024, arXiv 2407.16207), whose graph is unrolled into the tree.
"""

from collections import OrderedDict, defaultdict, deque
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
    """Token -> the phrases that were seen behind it, the newest last."""

    def __init__(self) -> None:
        self.behind: OrderedDict[int, deque[tuple[int, ...]]] = OrderedDict()
        self.first = self.later = 0.3  # how often a phrase's first token, and a further one, was accepted

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

    def learn(self, read: NDArray[np.int64], learnt: int = 0) -> None:
        """The phrases of a text, whose first `learnt` tokens were learnt from before."""
        for at in range(max(0, learnt - LENGTH), len(read) - LENGTH):
            self.add(int(read[at]), read[at + 1 : at + 1 + LENGTH].tolist())

    def paths(self, tree: Tree, root: int) -> Iterator[Path]:
        rate = [self.first, *[self.later] * (LENGTH - 1)]
        for node in range(-1, len(tree)):
            token = root if node < 0 else int(tree.tokens[node])
            if (node < 0 or tree.psi[node] >= FAINT) and token in self.behind:
                for phrase in list(self.behind[token])[-DRAFTED:]:
                    yield Path(node, phrase, rate)

    def observe(self, tree: Tree, path: Sequence[int]) -> None:
        """What became of the phrases behind accepted nodes."""
        if tree.source is None:
            return
        stood = {-1, *path}
        for node in np.flatnonzero(tree.source & PHRASES).tolist():
            parent = int(tree.parents[node])
            if parent in stood:
                later = parent >= 0 and bool(tree.source[parent] & PHRASES)
                name = "later" if later else "first"
                setattr(self, name, (1 - LEARN) * getattr(self, name) + LEARN * (node in stood))


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
    children = defaultdict[int, list[int]](list)
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)

    def ending(node: int) -> tuple[int, int]:
        parent = int(tree.parents[node])
        return root if parent < 0 else int(tree.tokens[parent]), int(tree.tokens[node])

    sees, known = tree.ancestors(), defaultdict[tuple[int, int], list[int]](list)
    for node in range(len(tree)):
        if children[node]:
            known[ending(node)].append(node)
    for leaf in range(len(tree)):
        twins = [node for node in known[ending(leaf)] if not sees[leaf + 1, node + 1]]  # not on its own path
        if not children[leaf] and twins:
            twin = twins[0]
            waiting: list[tuple[int, list[int]]] = [(node, [node]) for node in children[twin]]
            while waiting:
                node, nodes = waiting.pop()
                above = [twin, *nodes[:-1]]
                rate = [float(tree.psi[a] / tree.psi[b]) for a, b in zip(nodes, above, strict=True)]
                yield Path(leaf, tree.tokens[nodes].tolist(), rate)
                waiting += [(further, [*nodes, further]) for further in children[node]]


def grafted(tree: Tree, paths: Iterator[Path], source: int, deepest: int) -> Tree:
    """The tree with these paths in it, not ordered yet (`tree.chosen`); a node that is there stays as it is."""
    rows = [tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.psi.tolist(), tree.all_sources()]
    tokens, parents, depths, psi, sources = rows
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
