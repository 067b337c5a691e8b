"""The frozen base LLM: any causal LM of transformers, reached through its public accessors."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers import logging as hf_logging
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ctcdraft.model.cache import TreeCache, Watched
from ctcdraft.model.gguf import convert_gguf, is_gguf
from ctcdraft.model.layers import Attended
from ctcdraft.model.packed import pack
from ctcdraft.model.precision import resolve_dtype
from ctcdraft.model.template_date import PINNED_DATE, with_date, writes_date
from ctcdraft.model.window import Windows, windows_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)

VICUNA_TEMPLATE = (  # FastChat's vicuna_v1.1
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions.{% endif %}{{ ' ' }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}ASSISTANT:{% generation %} {{ message['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEMPLATES = {"plain": PLAIN_TEMPLATE, "vicuna": VICUNA_TEMPLATE}


@dataclass(frozen=True)
class Base:
    """A causal LM in eval mode that requires no gradient, with its tokenizer.

    `plain_template` says that the tokenizer had no chat template and got PLAIN_TEMPLATE; template_args are what the
    template gets beside the messages wherever a chat is rendered, as `enable_thinking`; `date` is the one that the chat
    template writes, None where that writes none.
    """

    model: Any
    tokenizer: Any
    path: str
    eos_ids: tuple[int, ...]
    context_length: int
    plain_template: bool
    template: str | None = None
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
    def _logit_scale(self) -> tuple[float, float | None]:
        """What logits are multiplied with, and what they are capped at softly."""
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        return scale, getattr(config, "final_logit_softcapping", None)  # Gemma

    @property
    def device(self) -> torch.device:
        return self.lm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_weight.dtype

    @property
    def name(self) -> str:
        """The folder's; of a snapshot in the Hub's cache, whose folder is a commit, the model's."""
        folder = Path(self.path)
        return folder.parents[1].name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, as the base's first layer gets them: [..., D]."""
        return self._embedding(ids)

    @torch.no_grad()
    def hidden(
        self,
        ids_BL: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        attended: Attended | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, L, D]; the cache, if given, grows by L.

        attention_mask: of padding [B, L], or additive [B, 1, L, K], which layers with a window get with their window.

        attended: behind each hidden state come the state that entered the first of these layers, and, without a cache,
        the keys and values that they made of its position. In a cache those lie there (`TreeCache.committed`).
        """
        watched = Watched(attended.layers) if attended is not None and cache is None else None
        seen: Any = attention_mask
        if attention_mask is not None and attention_mask.dim() == 4:
            assert position_ids is not None, "a window is counted from them"
            seen = self.windows.masks(attention_mask, position_ids, cached=cache is not None)
        with _entering(self.decoder, attended) as entered:
            out = self.decoder(
                input_ids=ids_BL,
                attention_mask=seen,
                position_ids=position_ids,
                past_key_values=cache if watched is None else watched,
                use_cache=cache is not None or watched is not None,
            )
        parts = [out.last_hidden_state, *entered, *([] if watched is None else [watched.taken()])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def attended(self, count: int) -> Attended | None:
        """The last `count` of the layers that make keys and values of their own (Gemma 3n's last ones do not); None
        where these have several shapes, or there are none. Raises ValueError where the base has not as many layers."""
        if count > self.depth:
            raise ValueError(f"head.layers={count}: {self.name} has {self.depth} layers, choose at most as many")
        made = Watched(tuple(range(self.depth)))
        self.hidden(torch.zeros(1, 1, dtype=torch.long, device=self.device), cache=made)
        layers = tuple(made.made[-count:])
        shapes = {part.shape[1:] for layer in layers for part in made.of(layer)}
        if len(layers) < count or len(shapes) != 1:
            return None
        heads, _, width = next(iter(shapes))
        return Attended(layers, heads, width, self.hidden_size)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The base's next-token logits [..., V] from what `hidden` gives, keys and values behind it or not."""
        scale, cap = self._logit_scale
        logits = self._lm_head(hidden[..., : self.hidden_size])
        logits = logits if scale == 1.0 else logits * scale
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
        sums = [(name, list(p.shape), int(_bits(p).sum())) for name, p in self.model.named_parameters()]
        return _short_hash(json.dumps(sums).encode())


def check_dtype(dtype: str) -> None:
    """Raises ValueError on a dtype that a base cannot be loaded in."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"base.dtype={dtype!r} is unknown: choose one of {('auto', *DTYPES)}")


def load_base(
    path: str,
    dtype: str = "fp32",
    device: str = "auto",
    template: str | None = None,
    trust_remote_code: bool = False,
    cache: str | Path = ".cache",
    eos: str | int | Sequence[str | int] | None = None,
    date: str | None = None,
) -> Base:
    """Load a frozen base and its tokenizer from a local folder or the Hub: safetensors alone, never pickles, and none
    of its Python code unless trust_remote_code asks for it. A GGUF file is converted in `cache` first (gguf.py).

    dtype: fp32, bf16, fp64, or auto, which is bf16 where the machine is faster in it (precision.py).
    On a CPU its linear layers are packed (packed.py), which takes the memory of its weights once more.
    template names a built-in chat template (TEMPLATES) for a tokenizer that comes without one, or with
    another; None keeps the tokenizer's own, and gives one that has none the plain format.
    eos: the tokens (texts or ids) that end a sequence instead of those that the folder names. date: YYYY-MM-DD, what
    the chat template writes as today's (None: PINNED_DATE).
    Raises ValueError, in one sentence, when the path holds no causal LM or tokenizer, or when the model
    makes its logits in a way that ctcdraft does not know (drafts would then be verified wrongly).
    """
    check_dtype(dtype)
    if device == "auto":
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    dtype = resolve_dtype(dtype, Path(cache), device)
    if template is not None and template not in TEMPLATES:
        raise ValueError(f"base.template={template!r} is unknown: choose one of {tuple(TEMPLATES)}")
    if is_gguf(path):
        path = str(convert_gguf(Path(path).expanduser(), Path(cache)))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not folder.is_dir():
        raise ValueError(f"base.path={path}: no such folder")
    source = str(folder) if folder.is_dir() else path
    with _quiet_transformers():
        try:
            trusted = {"trust_remote_code": trust_remote_code}
            AutoConfig.from_pretrained(source, **trusted)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=DTYPES[dtype], use_safetensors=True, **trusted
            )
            tokenizer = AutoTokenizer.from_pretrained(source, **trusted)
        except Exception as error:  # whatever a broken folder makes transformers raise
            raise ValueError(f"base.path={path}: {_why_not(folder, error)}") from error
    tokenizer.model_max_length = 10**9  # lengths are checked, and refused with a sentence, where they matter
    model = model.to(device).eval().requires_grad_(False)
    pack(model)
    plain = template is None and tokenizer.chat_template is None
    if plain or template:
        tokenizer.chat_template = TEMPLATES[template or "plain"]
    tokenizer.chat_template = with_date(tokenizer.chat_template, date or PINNED_DATE)
    eos_ids = _eos_ids(model, tokenizer) if eos is None else _chosen_eos(eos, model, tokenizer, path)
    # Penalties and forced tokens that the folder may bring along would not be the model's own greedy words.
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids) or None, pad_token_id=(*eos_ids, 0)[0])
    found = base_of(model, tokenizer, path, eos_ids=eos_ids, plain_template=plain, template=template)
    return replace(found, date=date or PINNED_DATE) if writes_date(tokenizer.chat_template) else found


@contextmanager
def _entering(decoder: Any, attended: Attended | None) -> Iterator[list[Tensor]]:
    """The state that enters the first of these layers, once a forward has been there; nothing without them."""
    found: list[Tensor] = []
    if attended is None:
        yield found
        return

    def keep(layer: Any, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        found.append(given[0] if given else named["hidden_states"])

    hook = decoder.layers[attended.layers[0]].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _why_not(folder: Path, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0][:200]
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own; where you have read it, base.trust_remote_code=true runs it"
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        return "it holds its weights as pickles (*.bin), which can run code: save it again as safetensors"
    return f"not a causal LM with a tokenizer ({reason})"


def base_of(
    model: Any,
    tokenizer: Any,
    path: str,
    *,
    eos_ids: tuple[int, ...] | None = None,
    plain_template: bool = False,
    template: str | None = None,
) -> Base:
    """A base from a model that is already there, by default with its own ends of sequence.

    Raises ValueError where it cannot be verified against drafts.
    """
    length, ends = _context_length(model), _eos_ids(model, tokenizer) if eos_ids is None else eos_ids
    base = Base(model, tokenizer, path, ends, length, plain_template, template)
    if base.dtype == torch.float64:  # transformers' default for experts multiplies no such matrices
        model.set_experts_implementation("eager")
    try:
        if length < 1:
            raise _Refused("does not say how many positions it takes")
        _check_states(base)
        _check_tree(base)
        _check_logits(base)
    except _Refused as refused:
        raise ValueError(f"base.path={path}: {type(model).__name__} {refused}") from refused.__cause__
    window = base.windows.width
    if window is not None and window < length and not _windows_work(base):
        warnings.warn(
            f"{base.name} gets a context of {window} tokens, its window: its {type(model).__name__} takes no mask that "
            "would let a draft tree see a window",
            stacklevel=2,
        )
        base = replace(base, context_length=window)
    return base


def warn_if_plain(base: Base) -> None:
    """The one warning that a base without a chat template gets, where chat is rendered with it."""
    if base.plain_template:
        warnings.warn(
            f"{base.name} has no chat template: conversations are written as 'User: ... Assistant: ...'",
            stacklevel=2,
        )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    rows = model.get_output_embeddings().weight.shape[0]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None and i < rows}))


def _chosen_eos(eos: str | int | Sequence[str | int], model: Any, tokenizer: Any, path: str) -> tuple[int, ...]:
    """The ids of tokens that a user named. Raises ValueError on one that the base does not know."""
    chosen = [eos] if isinstance(eos, str | int) else list(eos)
    if not chosen:
        raise ValueError("base.eos=[]: give at least one token, or leave it out for the base's own")
    rows, known = model.get_output_embeddings().weight.shape[0], tokenizer.get_vocab()
    ids = [token if isinstance(token, int) else known.get(token, -1) for token in chosen]
    for token, number in zip(chosen, ids, strict=True):
        if not 0 <= number < rows:
            what = f"its tokens are 0 to {rows - 1}" if isinstance(token, int) else "its tokenizer has no such token"
            what = f"it has no embedding for that token ({number})" if number >= rows and token != number else what
            raise ValueError(f"base.eos={token}: base.path={path}: {what}")
    return tuple(sorted(set(ids)))


def _context_length(model: Any) -> int:
    """Positions that may be used: no more than from where longrope turns every row of a forward by other angles, since
    a draft beyond it would change its own root's."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = all(isinstance(one, dict) for one in rope.values())  # some have one for each kind of layer
    ropes = rope.values() if of_kinds else [rope]
    short = [one["original_max_position_embeddings"] for one in ropes if one.get("rope_type") == "longrope"]
    return min([longest, *short])


@torch.no_grad()
def _check_logits(base: Base) -> None:
    ids = torch.arange(min(8, base.vocab_size), device=base.device).unsqueeze(0)
    want = base.model(input_ids=ids, use_cache=False).logits.float()  # rounded as without a cache
    got = base.logits(base.hidden(ids)).float()
    bound = 1e-3 if base.dtype in (torch.float32, torch.float64) else 2e-2  # some cap them before, some after rounding
    if not _close(got[0], want[0], bound).all():
        raise _Refused(
            "makes its logits of hidden states in a way that ctcdraft does not know, so drafts could not be verified "
            "exactly"
        )


PROBE_WINDOW, PROBE_SIBLINGS = 3, 12
ONLY_KEYS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # of transformers' caches
NO_TREE = "does not take the mask and the positions of a draft tree as they are"
NO_KEYS = "keeps no keys and values per position, so a rejected draft could not be taken back"


class _Refused(Exception):
    """Why a base cannot be verified against drafts, behind its class's name."""


def _check_states(base: Base) -> None:
    """What transformers itself would keep of the past must be keys and values, and the model must not count distances
    by places in the cache, where a node lies behind its siblings."""
    config = base.model.config.get_text_config()
    kept = DynamicCache(config=base.model.config).layers
    states = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in kept)
    if states:
        raise _Refused(f"{NO_KEYS}: {states} of its {len(kept)} layers have one running state")
    others = sorted({type(layer).__name__ for layer in kept} - ONLY_KEYS)
    if others:
        raise _Refused(
            f"keeps more than keys and values ({', '.join(others)}), which the cache of draft trees does not"
        )
    biased = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's windows
    if biased or local:
        raise _Refused(
            f"{NO_TREE}: it counts {'distances (ALiBi)' if biased else 'its windows'} by places in the cache"
        )


@torch.no_grad()
def _check_tree(base: Base) -> None:
    """Nodes of a tree behind the cache that decoding uses must give what their paths give. In low precision one that
    does is enough: there a mixture of experts may send rows of another shape to other experts."""
    device = base.device
    *prompt, root, left, right, behind = [i % base.vocab_size for i in (4, 7, 5, 9, 8, 6, 3)]
    siblings = [i % base.vocab_size for i in range(10, 10 + PROBE_SIBLINGS)]  # a node's place is not its depth
    past, precise = len(prompt), base.dtype in (torch.float32, torch.float64)
    bound = 1e-3 if precise else 0.1
    paths = torch.tensor([[*prompt, root, right, behind], [*prompt, root, left, behind]], device=device)
    with _reason("does not run"):
        alone = base.hidden(paths, position_ids=torch.arange(past + 3, device=device).expand(2, -1))
    if not _close(alone[0, : past + 1], alone[1, : past + 1], bound).all():
        raise _Refused("lets tokens see those that follow them, so it is no causal LM")
    nodes = torch.tensor([[root, left, *siblings, right, behind]], device=device)
    depths = torch.tensor([[0, *[1] * (len(siblings) + 2), 2]], device=device)
    Q = nodes.shape[1]
    sees_QQ = torch.eye(Q, dtype=torch.bool, device=device)
    sees_QQ[:, 0] = sees_QQ[-1, 1] = True  # the last node stands behind `left`
    mask = torch.zeros(1, 1, Q, past + Q, dtype=base.dtype, device=device)
    mask[..., past:].masked_fill_(~sees_QQ, torch.finfo(base.dtype).min)
    cache = TreeCache(base.depth, 1, past + Q)
    with _reason("does not run with a cache of keys and values per position"):
        base.hidden(paths[:1, :past], position_ids=torch.arange(past, device=device).unsqueeze(0), cache=cache)
    if not cache.is_filled:
        raise _Refused(NO_KEYS)
    cache.keep([range(past)])
    with _reason(NO_TREE):
        got = base.hidden(nodes, attention_mask=mask, position_ids=past + depths, cache=cache)[0, -2:]
    good = _close(got, alone[[0, 1], [past + 1, past + 2]], bound)
    if not (good.all() if precise else good.any()):
        raise _Refused(f"{NO_TREE}, so drafts could not be verified exactly")


def _close(got_RD: Tensor, want_RD: Tensor, bound: float) -> Tensor:
    apart_R = torch.linalg.vector_norm((got_RD - want_RD).float(), dim=1)
    return apart_R <= bound * torch.linalg.vector_norm(want_RD.float(), dim=1)


@contextmanager
def _reason(what: str) -> Iterator[None]:
    """Whatever a model raises is the reason that its user reads."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip() or "no message").split("\n")[0][:200]
        raise _Refused(f"{what} ({type(error).__name__}: {said})") from error


@torch.no_grad()
def _windows_work(base: Base) -> bool:
    """Are tree masks that know a window what the model makes of one? Tried with a window of a few tokens."""
    ids = torch.arange(7, device=base.device).unsqueeze(0) % base.vocab_size
    try:
        wide = base.hidden(ids)
        with base.windows.narrowed(PROBE_WINDOW):
            if torch.equal(wide, base.hidden(ids)):  # its width is not read where we changed it
                return False
            _check_tree(base)
    except _Refused:
        return False
    return True


def _tokenizer_bytes(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)  # set by whoever pads a batch: no part of who the tokenizer is
        state.pop("truncation", None)
        return json.dumps(state, sort_keys=True).encode()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()


def _bits(parameter: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return parameter.detach().view(kinds[parameter.element_size()])


def _short_hash(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()
