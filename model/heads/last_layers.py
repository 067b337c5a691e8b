"""The base's last decoder layers, copied: the body of a head. Slots go through them on the base's own keys and values.

Why copies: docs/method.md, "The head". A drafter whose layers look at the keys and values of the base's last ones:
GliDe (Du et al. 2024, arXiv 2402.02082), whose own begin at random.

Shape suffixes: B sequences, Q new positions of each, S positions before them, D hidden size.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..base.cache import PassingCache, TreeCache
from ..base.context import Attended, AttentionMask
from ..base.llm import Base
from ..base.window import windows_of

TRIED, CLOSE = 6, 1e-2  # positions of the trial, and how far from the base its result may be, of the largest number


class LastLayers(nn.Module):
    """Copies of the layers that `layers_to_copy` found and of the norm behind them, to be trained, in float32.

    On a base in bfloat16 they are trained in mixed precision (autocast).
    """

    def __init__(self, base: Base, attended: Attended) -> None:
        super().__init__()
        self.decoder = _shortened(base.decoder, attended.layers)
        self.decoder.layers = copy.deepcopy(self.decoder.layers)
        for name, part in base.decoder.named_children():
            if name != "layers" and not isinstance(part, nn.Embedding) and any(True for _ in part.parameters()):
                del vars(self.decoder)[name]
                setattr(self.decoder, name, copy.deepcopy(part))  # as the last norm: drafts need not be as sharp
        self.decoder.requires_grad_(True).float()
        self.mixed = base.dtype == torch.bfloat16
        self.windows = windows_of(self.decoder.config)

    def train(self, mode: bool = True) -> "LastLayers":
        """Dropout, which some configs ask for, stays off: a resumed run would draw other numbers."""
        return super().train(False)

    def forward(self, x_BQD: Tensor, mask: AttentionMask, cache: PassingCache | TreeCache) -> Tensor:
        """States after the final norm [B, Q, D]; mask: of the S entries of the cache and of the Q rows, within the
        window of a layer that has one."""
        own = next(self.decoder.layers.parameters()).dtype
        mixed = self.mixed and torch.is_grad_enabled()
        masks: Any = mask.additive(torch.bfloat16 if mixed else own)
        if self.windows.width is not None and masks is not None:
            (B, Q), S = x_BQD.shape[:2], masks.shape[-1] - x_BQD.shape[1]
            places_BS = cache.places_BS if isinstance(cache, PassingCache) else None
            places_BS = torch.arange(S, device=x_BQD.device) if places_BS is None else places_BS
            entries_BK = torch.cat([places_BS.expand(B, S), mask.positions_BL.expand(B, Q)], dim=1)
            masks = self.windows.of(masks, mask.positions_BL, entries_BK)
            if isinstance(cache, PassingCache) and cache.keeps:
                cache.places_BS = entries_BK
        with torch.autocast(x_BQD.device.type, torch.bfloat16, enabled=mixed):
            found_BQD = _run(self.decoder, x_BQD.to(own), masks, mask.positions_BL, cache)
        return found_BQD.to(x_BQD.dtype)


@torch.no_grad()
def layers_to_copy(base: Base, count: int) -> Attended | None:
    """The last `count` layers of a base whose class can run them alone; None where it cannot: tried at one position.
    None of those that are quantised: copies could not be trained.
    Where the base's layers have no weights (device `meta`), an engine runs them, and a head was tried in its training.

    Raises ValueError where there are not as many.
    """
    attended = base.attended(count)
    if attended is None or not hasattr(base.decoder, "layers") or getattr(base.model, "hf_quantizer", None):
        return None
    if any(p.is_meta for p in base.decoder.parameters()):
        return attended
    D = base.hidden_size
    ids_BL = torch.arange(1, 1 + TRIED, device=base.device).unsqueeze(0) % base.vocab_size
    try:
        states_BLX = base.hidden(ids_BL, attended=attended)
        pairs = attended.keys_and_values(states_BLX).items()
        read = {layer: (keys[:, :, :-1], values[:, :, :-1]) for layer, (keys, values) in pairs}
        want, entering = states_BLX[:, -1:, :D], states_BLX[:, -1:, D : 2 * D]
        mask = entering.new_zeros(1, 1, 1, TRIED)
        at = torch.full((1, 1), TRIED - 1, device=base.device)
        got = _run(_shortened(base.decoder, attended.layers), entering, mask, at, PassingCache(read))
        wrong = float((got - want).abs().max() / want.abs().max())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None
    return attended._replace(scale=float(entering.float().square().mean().sqrt())) if wrong < CLOSE else None


def _run(decoder: Any, x_BQD: Tensor, masks: Any, positions_BQ: Tensor, cache: Cache) -> Tensor:
    out = decoder(
        inputs_embeds=x_BQD,
        attention_mask=masks,
        position_ids=positions_BQ,
        past_key_values=cache,
        use_cache=True,
    )
    return out.last_hidden_state


def _shortened(decoder: Any, numbers: Sequence[int]) -> Any:
    """A decoder of some of the layers of another, which stay where they are. Nothing else is registered as its own."""
    short = copy.copy(decoder)
    own = {name: copy.copy(part) if isinstance(part, dict) else part for name, part in vars(decoder).items()}
    short.__dict__ = own | decoder._modules  # found as attributes, registered nowhere; hooks are each one's own
    short._modules = {}
    del short.__dict__["layers"]
    short.layers = nn.ModuleList(decoder.layers[number] for number in numbers)
    if hasattr(decoder, "embedding_multiplier"):  # Granite's, of what enters its first layer
        short.embedding_multiplier = 1.0
    short.config = copy.deepcopy(decoder.config)
    short.config.num_hidden_layers = len(numbers)
    if getattr(decoder.config, "layer_types", None):
        short.config.layer_types = [decoder.config.layer_types[number] for number in numbers]
    return short
