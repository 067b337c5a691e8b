"""Tokens per step without decoding: drafts along answers that are known to be the base's own.

Decoding is lossless, so that where a draft begins, what of it is accepted and where the next one begins all follow from
the answer. The base reads each sequence once, several at a time; then only heads draft, at every position.
What is counted along the walk is what `Decoder.generate` would count (tests/model/test_replay.py).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from .base.context import Anchors, Attended
from .base.llm import Base
from .base.sampling import Sampling
from .decode.decoder import Decoder, Generation
from .decode.generate import batches_by_length
from .draft.drafter import Frontier
from .draft.tree import ANY_DEPTH, EMPTY, Tree
from .heads.head import OnePassHead
from .lattice.candidates import Lattice

SEQUENCES = 8  # that the base reads together
ANCHORS = 64  # that a head drafts for together


@dataclass(frozen=True)
class Transcript:
    """A sequence of tokens, and which of them [L] are answers of the base; how it chose them, and with which noise."""

    tokens: NDArray[np.int64]
    answered: NDArray[np.bool_]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    def answers(self) -> list[tuple[int, int]]:
        """Where each answer begins and ends. A first token is of none: there is no state to choose it from."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0, 0], self.answered[1:].astype(np.int8), [0]])))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@dataclass
class Replayed:
    """An answer, and what became of the draft behind each of its roots: the accepted nodes by who proposed them, and
    how many psi expected."""

    tokens: list[int]
    sources: list[list[str]] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)

    def generation(self) -> Generation:
        """What decoding would count: the next root lies behind what was accepted."""
        steps, root = [], 0
        while root < len(self.sources):
            steps.append(root)
            root += len(self.sources[root]) + 1
        return Generation(
            self.tokens,
            steps=len(steps),
            accepted=[len(self.sources[root]) for root in steps],
            accepted_from=Counter(source for root in steps for source in self.sources[root]),
            expected=[self.expected[root] for root in steps],
        )


class Root(NamedTuple):
    """A token that a draft begins behind: `at`, in an answer that ends before `end`, the `answer`-th of a sequence."""

    sequence: int
    answer: int
    at: int
    end: int


def replay(
    base: Base, decoders: Mapping[str, Decoder], sequences: Sequence[Transcript], *, progress: bool = True
) -> dict[str, list[list[Replayed]]]:
    """Per decoder of that base, what it makes of the answers of each sequence. Decoders with the same head share its
    drafts."""
    found = {
        label: [[Replayed(known.tokens[start:end].tolist()) for start, end in known.answers()] for known in sequences]
        for label in decoders
    }
    for label, root, tree in drafts_along(base, decoders, sequences, progress=progress):
        answer = found[label][root.sequence][root.answer]
        following = sequences[root.sequence].tokens[root.at + 1 :]
        answer.sources.append(tree.sources(tree.path_of(following[: root.end - root.at - 1].tolist())))
        answer.expected.append(float(tree.psi.sum()))
    return found


@torch.no_grad()
def drafts_along(
    base: Base,
    decoders: Mapping[str, Decoder],
    sequences: Sequence[Transcript],
    *,
    progress: bool = True,
) -> Iterator[tuple[str, Root, Tree]]:
    """The tree of each decoder behind all roots of the answers."""
    drafters: dict[Hashable, list[str]] = defaultdict(list)  # decoders whose head drafts the same for them
    for label, decoder in decoders.items():
        draft = decoder.draft
        passes = None if isinstance(decoder.head, OnePassHead) else (draft.kind, draft.stop)
        drafters[id(decoder.head), draft.top_k, draft.proposal, passes].append(label)
    batches = batches_by_length([known.tokens for known in sequences], SEQUENCES)
    for batch in tqdm(batches, "answers", unit="batch", mininterval=1, disable=not progress):
        tokens = [torch.from_numpy(sequences[i].tokens) for i in batch]
        ids_BL = pad_sequence(tokens, True).to(base.device)
        roots = [root for i in batch for root in _roots(i, sequences[i])]
        places = [(batch.index(root.sequence), root.at - 1) for root in roots]
        anchors_N2 = torch.tensor(places, device=base.device).view(-1, 2)
        ends = [_frontier(base, sequences[root.sequence], root) for root in roots]
        hidden: dict[Attended | None, Tensor] = {}
        for labels in drafters.values():
            drafted: Iterator[Lattice | Tree] = iter([EMPTY] * len(roots))
            first = decoders[labels[0]]
            if first.head is not None:
                attended = first.head.attended
                if attended not in hidden:
                    hidden[attended] = base.hidden(ids_BL, attended=attended)
                drafted = _drafted(first, hidden[attended], ids_BL.roll(-1, dims=1), anchors_N2, ends)
            for root, end, one in zip(roots, ends, drafted, strict=True):
                for label in labels:
                    decoder = decoders[label]
                    yield label, root, decoder.drafter.tree(one, end) if decoder.drafts else EMPTY


def _roots(number: int, known: Transcript) -> list[Root]:
    return [Root(number, n, at, end) for n, (start, end) in enumerate(known.answers()) for at in range(start, end - 1)]


def _drafted(
    decoder: Decoder, hidden_BLD: Tensor, root_BL: Tensor, anchors_N2: Tensor, ends: Sequence[Frontier]
) -> Iterator[Lattice | Tree]:
    """What the decoder's head drafts for each anchor (sequence, position), where these texts end."""
    head = decoder.head
    assert head is not None
    hidden_BLD = hidden_BLD.to(next(head.parameters()).dtype)
    for start in range(0, len(ends), ANCHORS):
        part = slice(start, start + ANCHORS)
        batch_N, position_N = anchors_N2[part].unbind(1)
        first, last = batch_N[[0, -1]].tolist()  # anchors come sequence by sequence
        own = slice(first, last + 1)
        anchors = Anchors.of(batch_N - first, position_N, last + 1 - first)
        hints = decoder.drafter.hints(ends[part], decoder.slots, decoder.base.vocab_size, root_BL.device)
        yield from head.drafts(hidden_BLD[own], root_BL[own], anchors, decoder.vocabulary, None, hints)


def _frontier(base: Base, known: Transcript, root: Root) -> Frontier:
    ended = known.tokens[root.end - 1] in base.eos_ids
    room = ANY_DEPTH if ended else root.end - root.at - 2  # a bonus token follows
    return Frontier(known.tokens[: root.at + 1], base.eos_ids, room, known.sampling, known.seed)
