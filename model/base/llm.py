"""The frozen base LLM: any causal LM of transformers, reached through its public accessors."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .cache import PassingCache
from .context import Attended, AttentionMask
from .window import Windows, windows_of

SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True)
class Base:
    """A causal LM in eval mode that requires no gradient, with its tokenizer.

    `plain_template` says that the tokenizer had no chat template and got the plain one; template_args are what the
    template gets beside the messages wherever a chat is rendered, as `enable_thinking`; `date` is the one that the chat
    template writes, None where that writes none.
    """

    model: Any
    tokenizer: Any
    path: str
    eos_ids: tuple[int, ...]
    context_length: int
    plain_template: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None

    @property
    def hidden_size(self) -> int:
        return self.lm_weight.shape[1]

    @property
    def depth(self) -> int:
        """Layers."""
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.lm_weight.shape[0]

    @cached_property
    def token_count(self) -> int:
        """Tokens that it can read and write: a tokenizer may have had others added, which it has no embedding for."""
        return min(self.vocab_size, self._embedding.weight.shape[0])

    def unreadable(self, ids: Iterable[int]) -> str | None:
        """The first of the tokens that it cannot read, in words; None where it can read them all."""
        found = next((token for token in ids if token >= self.token_count), None)
        if found is None:
            return None
        if found >= len(self.tokenizer):
            return f"token {found}, but {self.name} knows {self.token_count}"
        word = self.tokenizer.convert_ids_to_tokens(int(found))
        return (
            f"token {found} ({word!r}) is in {self.name}'s tokenizer, but not among its {self.token_count} embeddings"
        )

    @property
    def lm_weight(self) -> Tensor:
        """The LM head [V, D]."""
        return self._lm_head.weight

    @property
    def lm_bias(self) -> Tensor | None:
        """What it adds [V], where it adds anything."""
        return getattr(self._lm_head, "bias", None)

    @cached_property
    def windows(self) -> Windows:
        return windows_of(self.decoder.config)

    @cached_property
    def decoder(self) -> Any:
        """The model without its LM head, which `get_decoder` does not find in every architecture."""
        found = (self.model.get_decoder(), self.model.base_model, getattr(self.model, "model", None))
        return next((one for one in found if isinstance(one, PreTrainedModel) and one is not self.model), found[0])

    @cached_property
    def _lm_head(self) -> Any:
        return self.model.get_output_embeddings()  # which searches the model, each time

    @cached_property
    def _embedding(self) -> Any:
        return self.model.get_input_embeddings()

    @cached_property
    def logit_scale(self) -> float:
        """What products with the LM head are multiplied with."""
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        return scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    @cached_property
    def _soft_cap(self) -> float | None:
        return getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma

    @property
    def device(self) -> torch.device:
        return self.lm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_weight.dtype

    @property
    def name(self) -> str:
        return model_name(self.path)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, as the base's first layer gets them: [..., D]."""
        embedded, scale = self._embedding(ids), getattr(self.decoder, "embedding_multiplier", 1.0)  # Granite's
        return embedded if scale == 1.0 else embedded * scale

    @torch.no_grad()
    def hidden(
        self,
        ids_BL: Tensor,
        mask: AttentionMask | None = None,
        *,
        cache: Cache | None = None,
        attended: Attended | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, L, D]; the cache, if given, grows by L.

        mask: None: rows are one sequence each, from its beginning on. Layers with a window get it with their window.

        attended: behind each hidden state come the state that entered the first of these layers, and, without a cache,
        the keys and values that they made of its position. In a cache those lie there (`TreeCache.committed`).
        """
        watched = PassingCache(watched=attended.layers) if attended is not None and cache is None else None
        additive: Any = None if mask is None else mask.additive(self.dtype)
        if mask is not None and additive is not None:
            additive = self.windows.masks(additive, mask.positions_BL, cached=cache is not None)
        entered, own = list[Tensor](), get_ident()

        def keep(layer: Any, given: tuple[Tensor, ...], *named: dict[str, Tensor]) -> None:
            if get_ident() == own:  # no other thread's forward, which torch may show without what is named
                entered.append(given[0] if given else named[0]["hidden_states"])

        first = None if attended is None else self.decoder.layers[attended.layers[0]]
        with nullcontext() if first is None else first.register_forward_pre_hook(keep, with_kwargs=True):
            out = self.decoder(
                input_ids=ids_BL,
                attention_mask=additive,
                position_ids=None if mask is None else mask.positions_BL,
                past_key_values=cache if watched is None else watched,
                use_cache=cache is not None or watched is not None,
            )
        parts = [out.last_hidden_state, *entered, *([] if watched is None else [watched.flat()])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @cached_property
    def key_shapes(self) -> dict[int, set[torch.Size]]:
        """Shapes [heads, 1, width] of what each layer makes of a position, where it makes keys and values of its own:
        Gemma 3n's last ones do not."""
        watched = PassingCache(watched=range(self.depth))
        self.hidden(torch.zeros(1, 1, dtype=torch.long, device=self.device), cache=watched)
        return {layer: {part.shape[1:] for part in watched.made[layer]} for layer in sorted(watched.made)}

    def attended(self, count: int) -> Attended | None:
        """The last `count` of the layers in `key_shapes`; None where these have several shapes, or there are none.
        Raises ValueError where the base has not as many layers."""
        if count > self.depth:
            raise ValueError(f"head.layers={count}: {self.name} has {self.depth} layers, choose at most as many")
        layers = tuple(self.key_shapes)[-count:]
        shapes = set[torch.Size]().union(*(self.key_shapes[layer] for layer in layers))
        if len(layers) < count or len(shapes) != 1:
            return None
        heads, _, width = next(iter(shapes))
        return Attended(layers, heads, width, self.hidden_size)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The base's next-token logits [..., V] from what `hidden` gives, keys and values behind it or not."""
        logits = self._lm_head(hidden[..., : self.hidden_size])
        return self.capped(logits if self.logit_scale == 1.0 else logits * self.logit_scale)

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled logits as the base caps them, if it does."""
        cap = self._soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @cached_property
    def identity(self) -> dict[str, str]:
        """What a head is bound to: short hashes of the config, the tokenizer and the LM head; and what else its data
        depends on: the tokens that end a sequence, and the date in the chat template, where that writes one.

        Of the config only what shapes the model counts: the rest differs between versions of transformers.
        """
        config = self.model.config.get_text_config()
        shape = {key: getattr(config, key, None) for key in SHAPE_KEYS}
        weight = self.lm_weight.detach().cpu().contiguous()
        return {
            "name": self.name,
            "config": _short_hash(json.dumps(shape, sort_keys=True).encode()),
            "tokenizer": _short_hash(_tokenizer_bytes(self.tokenizer)),
            "lm_head": _short_hash(weight.to(torch.bfloat16).view(torch.uint8).numpy().data),
            "eos": ",".join(map(str, self.eos_ids)),
            **({"date": self.date} if self.date else {}),
        }

    @cached_property
    def weights(self) -> str:
        """A short hash over every parameter: `identity` says which bases may share a head, this which have the same
        hidden states. The bits of each are summed where they lie, so nothing large leaves a GPU."""
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        named = [(name, p.detach()) for name, p in self.model.named_parameters()]
        sums = [(name, list(p.shape), int(p.view(kinds[p.element_size()]).sum())) for name, p in named]
        return _short_hash(json.dumps(sums).encode())


def model_name(path: str) -> str:
    """The folder's; of a snapshot in the Hub's cache, whose folder is a commit, the model's."""
    folder = Path(os.path.abspath(path))
    return folder.parents[1].name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name


def _tokenizer_bytes(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)  # set by whoever pads a batch: no part of who the tokenizer is
        state.pop("truncation", None)
        return json.dumps(state, sort_keys=True).encode()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()


def _short_hash(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
