"""Tokens per step without decoding: drafts along answers that are known to be the base's own greedy ones.

Greedy decoding is lossless, so that where a draft begins, what of it is accepted and where the next one begins all
follow from the answer. The base reads each sequence once, several at a time; then only heads draft, at every position.
What is counted along the walk is what `Decoder.generate` would count at temperature 0 (tests/eval/test_replay.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.data.sources import read_rows
from ctcdraft.model import tree as trees
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, Generation
from ctcdraft.model.generate import batches_by_length
from ctcdraft.model.head import Head, candidates
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.layers import Anchors, Attended, Sight
from ctcdraft.model.tree import Tree

SEQUENCES = 8  # that the base reads together
ANCHORS = 64  # that a head drafts for together
Drafts = Callable[[Tensor, Tensor], Sequence[Lattice | Tree]]  # of anchors (batch_N, position_N)


@dataclass(frozen=True)
class Known:
    """A sequence of tokens, and which of them [L] the base has said."""

    tokens: NDArray[np.int64]
    said: NDArray[np.bool_]

    def answers(self) -> list[tuple[int, int]]:
        """Where each answer begins and ends."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.said.astype(np.int8), [0]])))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@dataclass(frozen=True)
class Draft:
    """What became of the draft behind one root: accepted nodes by who proposed them, and how many psi expected."""

    sources: tuple[str, ...]
    expected: float

    @property
    def accepted(self) -> int:
        return len(self.sources)


@dataclass
class Replayed:
    """Of one sequence: per answer its tokens, and the drafts behind each of its roots, in order."""

    answers: list[tuple[list[int], list[Draft]]]

    @property
    def drafts(self) -> list[Draft]:
        """Behind every root."""
        return [draft for _, drafts in self.answers for draft in drafts]

    @property
    def generations(self) -> list[Generation]:
        """What decoding would count of each answer: the next root lies behind what was accepted."""
        return [_generation(tokens, list(_walked(drafts))) for tokens, drafts in self.answers]


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
def replay(
    base: Base, decoders: Mapping[str, Decoder], sequences: Sequence[Known], *, progress: bool = True
) -> dict[str, list[Replayed]]:
    """Per decoder of that base, what it makes of each sequence. Decoders with the same head share its drafts."""
    found = {label: [_undrafted(known) for known in sequences] for label in decoders}
    batches = batches_by_length([known.tokens for known in sequences], SEQUENCES)
    for batch in tqdm(batches, "answers", unit="batch", mininterval=1, disable=not progress):
        several = [sequences[i] for i in batch]
        ids_BL = pad_sequence([torch.from_numpy(known.tokens) for known in several], True).to(base.device)
        hidden: dict[Attended | None, Tensor] = {}
        for drafter, labels in _by_drafter(decoders).items():
            drafts = None
            if drafter.head is not None:
                attended = drafter.head.attended
                if attended not in hidden:
                    hidden[attended] = base.hidden(ids_BL, attended=attended)
                drafts = _drafts_of(drafter.head, drafter, hidden[attended], ids_BL.roll(-1, dims=1))
            for row, answer, draft in _along(drafts, [decoders[label] for label in labels], several):
                for label, one in zip(labels, draft, strict=True):
                    found[label][batch[row]].answers[answer][1].append(one)
    return found


def _by_drafter(decoders: Mapping[str, Decoder]) -> dict[Decoder, list[str]]:
    """Labels of the decoders whose candidates are the same, under one of them."""
    groups: dict[tuple[int, int], list[str]] = {}
    for label, decoder in decoders.items():
        groups.setdefault((id(decoder.head), decoder.draft.top_k), []).append(label)
    return {decoders[labels[0]]: labels for labels in groups.values()}


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


def _along(
    drafts: Drafts | None, decoders: Sequence[Decoder], sequences: Sequence[Known]
) -> Iterator[tuple[int, int, list[Draft]]]:
    """(sequence, answer, what each decoder drafts) behind every root of the answers, in order."""
    device = decoders[0].base.device
    places = [
        (row, number, root, end)
        for row, known in enumerate(sequences)
        for number, (start, end) in enumerate(known.answers())
        for root in range(start, end - 1)
    ]
    for first in range(0, len(places), ANCHORS):
        part = places[first : first + ANCHORS]
        drafted: Sequence[Lattice | Tree] = [trees.EMPTY] * len(part)
        if drafts is not None:
            anchors = torch.tensor([(row, root - 1) for row, _, root, _ in part], device=device)
            drafted = drafts(anchors[:, 0], anchors[:, 1])
        for (row, number, root, end), one in zip(part, drafted, strict=True):
            tokens = sequences[row].tokens
            yield row, number, [_draft(decoder, one, tokens, root, end) for decoder in decoders]


def _draft(decoder: Decoder, drafted: Lattice | Tree, tokens: NDArray[np.int64], root: int, end: int) -> Draft:
    if not decoder.drafts:
        return Draft((), 0.0)
    room = None if tokens[end - 1] in decoder.base.eos_ids else end - root - 2  # a bonus token always follows
    tree = decoder.tree_of(drafted, tokens[: root + 1], room)
    path = tree.path_of(tokens[root + 1 : end].tolist())
    return Draft(tuple(tree.sources(path)), float(tree.psi.sum()))


def _undrafted(known: Known) -> Replayed:
    return Replayed([(known.tokens[start:end].tolist(), []) for start, end in known.answers()])


def _walked(drafts: list[Draft]) -> Iterator[Draft]:
    at = 0
    while at < len(drafts):
        yield drafts[at]
        at += drafts[at].accepted + 1


def _generation(tokens: list[int], steps: list[Draft]) -> Generation:
    return Generation(
        tokens,
        steps=len(steps),
        accepted=[draft.accepted for draft in steps],
        accepted_from=Counter(source for draft in steps for source in draft.sources),
        expected=[draft.expected for draft in steps],
    )
