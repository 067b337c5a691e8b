"""Layers that see a window of the past: the masks that callers give a base, for each kind of its layers.

transformers makes such masks itself where it is given none; one of four dimensions it takes as it is, for all layers.
Shape suffixes: B sequences, Q rows of a forward, K cached and new entries.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FULL = "full_attention"
WIDTHS = {  # kinds of layer by the config's name for how many positions they see
    "sliding_window": "sliding_attention",
    "sliding_window_size": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
}


@dataclass(frozen=True)
class Windows:
    """kinds: of layers that see a window, each with the name of its width in `config`; mixed: others see everything."""

    config: Any
    kinds: dict[str, str]
    mixed: bool

    @property
    def width(self) -> int | None:
        """Of the narrowest window, None where all layers see everything."""
        return min((getattr(self.config, name) for name in self.kinds.values()), default=None)

    def masks(self, mask_BQK: Tensor, positions_BQ: Tensor, cached: bool) -> Tensor | dict[str, Tensor]:
        """What a base takes for an additive mask [B, 1, Q, K]: itself, or one for each kind of layer.

        positions [B, Q] or [1, Q]; cached: entries stand behind those of a cache, as many as the first row's position.
        """
        if self.width is None:
            return mask_BQK
        Q, K = mask_BQK.shape[2:]
        entry_K = torch.arange(K, device=mask_BQK.device)
        row_BK = (entry_K - positions_BQ[:, :1]) if cached else entry_K.expand(len(positions_BQ), -1)
        own_BK = positions_BQ.gather(1, row_BK.clamp(0, Q - 1))  # a node stands at its depth, not at its place
        return self.of(mask_BQK, positions_BQ, torch.where((row_BK >= 0) & (row_BK < Q), own_BK, entry_K))

    def of(self, mask_BQK: Tensor, positions_BQ: Tensor, entries_BK: Tensor) -> Tensor | dict[str, Tensor]:
        """The same, of entries that stand at those positions [B, K] or [1, K]."""
        if self.width is None or mask_BQK.shape[-1] <= self.width:
            return mask_BQK
        at_B1K, from_BQ1, narrow = entries_BK.unsqueeze(1), positions_BQ.unsqueeze(2), {}
        for kind, name in self.kinds.items():
            width, chunked = getattr(self.config, name), kind == "chunked_attention"
            hidden_BQK = from_BQ1 // width != at_B1K // width if chunked else from_BQ1 - at_B1K >= width
            narrow[kind] = mask_BQK.masked_fill(hidden_BQK.unsqueeze(1), torch.finfo(mask_BQK.dtype).min)
        return {FULL: mask_BQK} | narrow if self.mixed or len(narrow) > 1 else next(iter(narrow.values()))


def windows_of(config: Any) -> Windows:
    """Raises ValueError on a kind of window whose width is unknown."""
    listed = set(getattr(config, "layer_types", None) or ())
    widths = {kind: name for name, kind in WIDTHS.items() if getattr(config, name, None)}
    used = getattr(config, "use_sliding_window", True)
    found = {kind: name for kind, name in widths.items() if used and (not listed or kind in listed)}
    unknown = {kind for kind in listed - set(found) if any(word in kind for word in ("sliding", "chunk", "local"))}
    if unknown and widths:
        raise ValueError(f"its layers of kind {', '.join(sorted(unknown))} see a window that ctcdraft does not know")
    return Windows(config, found, bool(listed - set(found)))
