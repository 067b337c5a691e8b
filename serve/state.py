"""What a head drafts from inside an engine, and its drafts. No engine is imported here.

A one-pass head sees the newest hidden state, which every forward brings anew, and the keys and values of the base's
last layers, which lie in the engine's pages, by its block tables. So there is nothing to keep for a request.

Shape suffixes: B requests, N rows of a forward, X numbers of a hidden state (and of the one that enters the first
attended layer), P pages of K positions, M pages of a request, H key heads, W width of a head, S positions seen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model import Base, DraftConfig, Head
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.draft.drafter import Drafter, Frontier
from ctcdraft.model.draft.tree import EMPTY, Tree
from ctcdraft.model.heads.head import OnePassHead
from ctcdraft.model.lattice.candidates import Lattice


class Pages:
    """Keys and values of layers, [P, K, H, W] each, and the block tables that say which positions are whose.

    `head.drafts` takes it for a cache: of the requests that `show` named last.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.layers = layers
        self.page_size = next(iter(layers.values()))[0].shape[1]
        self._table_BM, self._seen = torch.zeros(0, 0, dtype=torch.long), 0

    @staticmethod
    def like(keys: Tensor, values: Tensor, layers: Sequence[int], pages: int, page_size: int) -> "Pages":
        """Room of its own for pages that the engine keeps in a layout of its own; keys, values [N, H, W]."""

        def room(part: Tensor) -> Tensor:
            return part.new_zeros((pages, page_size, *part.shape[1:]))

        return Pages({layer: (room(keys), room(values)) for layer in layers})

    def write(self, layer: int, keys_NHW: Tensor, values_NHW: Tensor, slots_N: Tensor) -> None:
        """At places `page * K + position in it`; rows whose place is negative are padding."""
        rows = (slots_N >= 0).nonzero().squeeze(1)
        page_N, place_N = slots_N[rows] // self.page_size, slots_N[rows] % self.page_size
        for pages, made_NHW in zip(self.layers[layer], (keys_NHW, values_NHW), strict=True):
            pages[page_N, place_N] = made_NHW[rows]

    def show(self, table_BM: Tensor, lengths: Sequence[int]) -> None:
        """The requests to come, whose first lengths[b] positions lie in the pages table[b]."""
        self._seen = max(lengths)
        self._table_BM = table_BM[:, : -(-self._seen // self.page_size)].long()

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, W] up to the longest of the requests; behind a shorter one's is anything."""
        keys, values = (pages[self._table_BM].flatten(1, 2)[:, : self._seen] for pages in self.layers[layer])
        return keys.transpose(1, 2), values.transpose(1, 2)


class ServedHead:
    """A head and prompt lookup, which draft together what `Decoder` would: chains, or trees.

    pages: where the keys and values of the head's attended layers lie; None: it attends to none, or they are not there
    yet. Raises ValueError on a head that takes a pass per depth.
    """

    def __init__(self, base: Base, head: Head, draft: DraftConfig, pages: Pages | None = None) -> None:
        if not isinstance(head, OnePassHead):
            raise ValueError(
                f"a head of kind {head.config.kind} takes a pass per depth, which no engine serves: decode with "
                "ctcdraft's own decoder"
            )
        self.base, self.head, self.pages = base, head, pages
        self.drafter = Drafter(draft)
        self.vocabulary = head.vocabulary(base, draft.top_k)
        self.dtype = next(head.parameters()).dtype

    def drafts(
        self, hidden_BX: Tensor | None, read: Sequence[NDArray[np.int64]], table_BM: Tensor, rooms: Sequence[int]
    ) -> list[Tree]:
        """A draft for each request, at most rooms[b] deep.

        read[b]: its tokens so far, the root last; hidden[b]: the state of the position before the root, and the one
        that entered the first attended layer there; None: a draft of copies alone; table[b]: its pages.
        """
        drafted: Sequence[Lattice | Tree] = [EMPTY] * len(read)
        if hidden_BX is not None:  # the slots of all requests in one pass
            device, lengths = hidden_BX.device, [len(tokens) - 1 for tokens in read]
            if self.pages is not None:
                self.pages.show(table_BM, lengths)
            root_B1 = torch.tensor([[int(tokens[-1])] for tokens in read], device=device)
            position_B1 = torch.tensor(lengths, device=device).unsqueeze(1) - 1
            anchors = Anchors.one_per_row(torch.zeros_like(position_B1[:, 0]), AttentionMask(position_B1))
            hidden_B1X = hidden_BX.to(self.dtype).unsqueeze(1)
            cache: Any = self.pages  # of a cache a one-pass head asks what is committed, and nothing else
            drafted = self.head.drafts(hidden_B1X, root_B1, anchors, self.vocabulary, cache)
        ends = [Frontier(tokens, self.base.eos_ids, room) for tokens, room in zip(read, rooms, strict=True)]
        return [self.drafter.tree(one, end) for one, end in zip(drafted, ends, strict=True)]
