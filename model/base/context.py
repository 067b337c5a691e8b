"""What rows of a forward see: positions and masks, anchors, keys and values of the base.

Shape suffixes: B batch, L positions, S positions attended to, N anchors, A of them in a
row (padded).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionMask(NamedTuple):
    """Where rows stand, and which of the cached and new entries they see.

    positions [B, L] (or [1, L]); allowed [B, 1, L, S], True where a row may look, or None: at itself and those before
    it.
    """

    positions_BL: Tensor
    allowed_BLS: Tensor | None = None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add, for a base: its eager attention takes boolean masks for numbers, silently."""
        if self.allowed_BLS is None:
            return None
        return torch.zeros_like(self.allowed_BLS, dtype=dtype).masked_fill_(~self.allowed_BLS, torch.finfo(dtype).min)


class Anchors(NamedTuple):
    """Positions that are drafted from: position[n] of row batch[n], the place[n]-th of at most `most` anchors there.

    mask: of the positions of rows; None: rows are one sequence each, from its beginning on.
    """

    batch_N: Tensor
    position_N: Tensor
    place_N: Tensor
    rows: int
    most: int
    mask: AttentionMask | None = None

    @staticmethod
    def of(batch_N: Tensor, position_N: Tensor, rows: int, mask: AttentionMask | None = None) -> "Anchors":
        before_NB = F.pad(F.one_hot(batch_N, rows).cumsum(dim=0), (0, 0, 1, 0))  # of each row, before each anchor
        place_N = before_NB[:-1].gather(1, batch_N.unsqueeze(1)).squeeze(1)
        return Anchors(batch_N, position_N, place_N, rows, max(1, int(before_NB[-1].max())), mask)

    @staticmethod
    def one_per_row(position_B: Tensor, mask: AttentionMask) -> "Anchors":
        """Without a wait for the device."""
        rows_B = torch.arange(len(position_B), device=position_B.device)
        return Anchors(rows_B, position_B, torch.zeros_like(rows_B), len(position_B), 1, mask)

    def own(self, values_BL: Tensor) -> Tensor:
        """Of each anchor what stands at its position: [N, ...] of [B, L, ...]."""
        return values_BL[self.batch_N, self.position_N]

    def context(self, entries: int) -> tuple[Tensor, Tensor]:
        """Where they stand [B, A], and which of so many entries each of them sees [B, A, S]."""
        positions_BL, allowed_BLS = self.mask or (None, None)
        stands_N = self.position_N if positions_BL is None else self.own(positions_BL.expand(self.rows, -1))
        if allowed_BLS is None:
            seen_NS = torch.arange(entries, device=stands_N.device) <= stands_N.unsqueeze(1)
        else:
            seen_NS = self.own(allowed_BLS[:, 0, :, :entries].expand(self.rows, -1, -1))
        return self.spread(stands_N), self.spread(seen_NS)

    @property
    def places_BS(self) -> Tensor | None:
        """Where the entries stand that they see; None: each at its own number."""
        return None if self.mask is None or self.mask.allowed_BLS is None else self.mask.positions_BL

    def spread(self, values_N: Tensor) -> Tensor:
        """[B, A, ...] of [N, ...], A = most: 0 where a row has no such anchor."""
        spread = values_N.new_zeros((self.rows, self.most, *values_N.shape[1:]))
        return spread.index_put((self.batch_N, self.place_N), values_N)

    def gathered(self, values_BA: Tensor) -> Tensor:
        """What `spread` spread: [N, ...] of [B, A, ...]."""
        return values_BA[self.batch_N, self.place_N]


KeysAndValues = Mapping[int, tuple[Tensor, Tensor]]  # by layer: [B, heads, S, width] of the positions to look at


class Attended(NamedTuple):
    """The base's last layers that a head copies: what it needs of each position is the state [D] that enters the first
    of them, and the keys and values that each of them has, of that many heads of that width. scale: how large such
    states are (root mean square)."""

    layers: tuple[int, ...]
    heads: int
    width: int
    hidden_size: int
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Numbers of a position: the entering state, then keys and values of all layers."""
        return self.hidden_size + 2 * len(self.layers) * self.heads * self.width

    def keys_and_values(self, states_BLX: Tensor) -> KeysAndValues:
        """Those of each layer from what `Base.hidden` puts behind the hidden and the entering states."""
        B, L, _ = states_BLX.shape
        both = states_BLX[..., 2 * self.hidden_size :].view(B, L, 2, len(self.layers), self.heads, self.width)
        keys, values = both.permute(2, 3, 0, 4, 1, 5)
        return dict(zip(self.layers, zip(keys, values, strict=True), strict=True))
