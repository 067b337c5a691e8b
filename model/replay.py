"""Tokens per step without decoding: drafts along answers that are known to be the base's own greedy ones.

Greedy decoding is lossless, so that where a draft begins, what of it is accepted and where the next one begins all
follow from the answer. The base reads each sequence once, several at a time; then only heads draft, at every position.
What is counted along the walk is what `Decoder.generate` would count at temperature 0 (tests/model/test_replay.py).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from .base.context import Anchors, Attended
from .base.llm import Base
from .decode.decoder import Decoder, Generation
from .decode.generate import batches_by_length
from .draft import tree as trees
from .draft.tree import Tree
from .lattice.candidates import Lattice

SEQUENCES = 8  # that the base reads together
ANCHORS = 64  # that a head drafts for together


@dataclass(frozen=True)
class Transcript:
    """A sequence of tokens, and which of them [L] are answers of the base."""

    tokens: NDArray[np.int64]
    answered: NDArray[np.bool_]

    def answers(self) -> list[tuple[int, int]]:
        """Where each answer begins and ends."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.answered.astype(np.int8), [0]])))
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


@torch.no_grad()
def replay(
    base: Base, decoders: Mapping[str, Decoder], sequences: Sequence[Transcript], *, progress: bool = True
) -> dict[str, list[list[Replayed]]]:
    """Per decoder of that base, what it makes of the answers of each sequence. Decoders with the same head share its
    drafts."""
    found = {
        label: [[Replayed(known.tokens[start:end].tolist()) for start, end in known.answers()] for known in sequences]
        for label in decoders
    }
    drafters: dict[tuple[int, int], list[str]] = defaultdict(list)  # decoders of the same candidates
    for label, decoder in decoders.items():
        drafters[id(decoder.head), decoder.draft.top_k].append(label)
    batches = batches_by_length([known.tokens for known in sequences], SEQUENCES)
    for batch in tqdm(batches, "answers", unit="batch", mininterval=1, disable=not progress):
        tokens = [sequences[i].tokens for i in batch]
        ids_BL = pad_sequence([torch.from_numpy(ids) for ids in tokens], True).to(base.device)
        roots = [
            (row, number, root, end)
            for row, i in enumerate(batch)
            for number, (start, end) in enumerate(sequences[i].answers())
            for root in range(start, end - 1)
        ]
        anchors_N2 = torch.tensor([(row, root - 1) for row, _, root, _ in roots], device=base.device).view(-1, 2)
        hidden: dict[Attended | None, Tensor] = {}
        for labels in drafters.values():
            drafted: Iterator[Lattice | Tree] = iter([trees.EMPTY] * len(roots))
            first = decoders[labels[0]]
            if first.head is not None:
                if first.head.attended not in hidden:
                    hidden[first.head.attended] = base.hidden(ids_BL, attended=first.head.attended)
                drafted = _drafted(first, hidden[first.head.attended], ids_BL.roll(-1, dims=1), anchors_N2)
            for (row, number, root, end), one in zip(roots, drafted, strict=True):
                ended = tokens[row][end - 1] in base.eos_ids
                room = trees.ANY_DEPTH if ended else end - root - 2  # a bonus token always follows
                for label in labels:
                    decoder, answer = decoders[label], found[label][batch[row]][number]
                    tree = decoder.tree_of(one, tokens[row][: root + 1], room) if decoder.drafts else trees.EMPTY
                    answer.sources.append(tree.sources(tree.path_of(tokens[row][root + 1 : end].tolist())))
                    answer.expected.append(float(tree.psi.sum()))
    return found


def _drafted(decoder: Decoder, hidden_BLD: Tensor, root_BL: Tensor, anchors_N2: Tensor) -> Iterator[Lattice | Tree]:
    """What the decoder's head drafts for each anchor (sequence, position)."""
    head = decoder.head
    assert head is not None
    hidden_BLD = hidden_BLD.to(next(head.parameters()).dtype)
    for part in anchors_N2.split(ANCHORS):
        batch_N, position_N = part.unbind(1)
        anchors = Anchors.of(batch_N, position_N, len(hidden_BLD))
        yield from head.drafts(hidden_BLD, root_BL, anchors, decoder.vocabulary)
