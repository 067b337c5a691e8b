"""Tokens per step without decoding: drafts along answers that are known to be the base's own greedy ones.

Greedy decoding is lossless, so that where a draft begins, what of it is accepted and where the next one begins all
follow from the answer. The base reads each sequence once, several at a time; then only heads draft. What is counted is
what `Decoder.generate` would count at temperature 0 (tests/eval/test_replay.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.data.sources import read_rows
from ctcdraft.model import tree as trees
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder
from ctcdraft.model.generate import batches_by_length
from ctcdraft.model.head import Head, candidates
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.layers import Anchors, Sight
from ctcdraft.model.tree import Tree

SEQUENCES = 8  # that the base reads, and heads draft for, together
Drafts = Callable[[Tensor, Tensor], Sequence[Lattice | Tree]]  # of anchors (batch_N, position_N)


class Known(NamedTuple):
    """A sequence of tokens, and which of them [L] the base has said."""

    tokens: NDArray[np.int64]
    said: NDArray[np.bool_]

    def answers(self) -> list[tuple[int, int]]:
        """Where each answer begins and ends."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.said.astype(np.int8), [0]])))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@dataclass
class Replayed:
    """What drafting along the answers came to; fields as in `Generation`."""

    grown: int = 0
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    accepted_from: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        return self.grown / self.steps if self.steps else 1.0


def known_rows(path: str) -> Iterator[Known]:
    """Rows of a file with `input_ids` and `loss_mask`. Raises ValueError on a row that has not both."""
    for number, row in enumerate(read_rows(path)):
        try:
            known = Known(np.array(row["input_ids"], np.int64), np.array(row["loss_mask"], bool))
            good = known.tokens.ndim == 1 and known.tokens.shape == known.said.shape
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(f"{path}: row {number} has no input_ids with a loss_mask as long: give tokenised answers")
        yield known


@torch.no_grad()
def replay(base: Base, decoders: Mapping[str, Decoder], sequences: Sequence[Known]) -> dict[str, Replayed]:
    """Per decoder of that base, what it makes of the answers."""
    found = {label: Replayed() for label in decoders}
    batches = batches_by_length([known.tokens for known in sequences], SEQUENCES)
    for batch in tqdm(batches, "answers", unit="batch", mininterval=1):
        several = [sequences[i] for i in batch]
        ids_BL = pad_sequence([torch.from_numpy(known.tokens) for known in several], True).to(base.device)
        hidden: dict[tuple[int, ...], Tensor] = {}
        for label, decoder in decoders.items():
            drafts = None
            if decoder.head is not None:
                layers = decoder.head.attended_layers
                if layers not in hidden:
                    hidden[layers] = base.hidden(ids_BL, layers=layers)
                drafts = _drafts_of(decoder.head, decoder, hidden[layers], ids_BL.roll(-1, dims=1))
            _walk(decoder, drafts, several, found[label])
    return found


def _drafts_of(head: Head, decoder: Decoder, hidden_BLD: Tensor, root_BL: Tensor) -> Drafts:
    hidden_BLD, vocabulary = hidden_BLD.to(next(head.parameters()).dtype), decoder.vocabulary
    if not head.one_pass:
        return lambda b_N, p_N: head.drafts_at(hidden_BLD, root_BL, b_N, p_N, None, vocabulary)
    sight = Sight.one_document(hidden_BLD)
    context = head.encode(hidden_BLD, vocabulary.embed(root_BL, hidden_BLD.dtype), sight)

    def drafts(batch_N: Tensor, position_N: Tensor) -> list[Lattice | Tree]:
        slots = head.fill(context, Anchors.of(batch_N, position_N), sight)
        return [*candidates(slots, root_BL[batch_N, position_N], head, vocabulary).lattices()]

    return drafts


def _walk(decoder: Decoder, drafts: Drafts | None, sequences: Sequence[Known], out: Replayed) -> None:
    """All answers of the sequences side by side, root after root."""
    device, eos = decoder.base.device, decoder.base.eos_ids
    going = [[row, start, end] for row, known in enumerate(sequences) for start, end in known.answers()]
    out.grown += sum(end - start - 1 for _, start, end in going)
    while going := [answer for answer in going if answer[1] < answer[2] - 1]:
        drafted: Sequence[Lattice | Tree] = [trees.EMPTY] * len(going)
        if drafts is not None:
            anchors = torch.tensor([(row, root - 1) for row, root, _ in going], device=device)
            drafted = drafts(anchors[:, 0], anchors[:, 1])
        for answer, one in zip(going, drafted, strict=True):
            row, root, end = answer
            tokens = sequences[row].tokens
            room = None if tokens[end - 1] in eos else end - root - 2  # a bonus token always follows
            tree = decoder.tree_of(one, tokens[: root + 1], room) if decoder.drafts else trees.EMPTY
            path = tree.path_of(tokens[root + 1 : end].tolist())
            out.steps += 1
            out.accepted.append(len(path))
            out.expected.append(float(tree.psi.sum()))
            out.accepted_from.update(tree.sources(path))
            answer[1] += len(path) + 1
