"""Can a base be verified against drafts? Tried with a small tree, behind the cache that decoding uses.

Shape suffixes: L positions, Q rows of a tree, R rows of states, D hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..base.cache import TreeCache
from ..base.context import AttentionMask
from ..base.llm import Base
from ..draft.tree import Tree, tree_mask

PROBE_WINDOW, PROBE_SIBLINGS = 3, 12
ONLY_KEYS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # of transformers' caches
NO_TREE = "does not take the mask and the positions of a draft tree as they are"
NO_KEYS = "keeps no keys and values per position, so a rejected draft could not be taken back"


class Refused(Exception):
    """Why a base cannot be verified against drafts, behind its class's name."""


def check_weights(path: str, loading: dict[str, Any]) -> None:
    """Raises ValueError where the files lack weights of the model, by what transformers says of its loading: it would
    draw them at random."""
    absent = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if absent:
        other = "".join(f", and holds {key}" for key in sorted(loading["unexpected_keys"])[:1])
        raise ValueError(
            f"{path} lacks {len(absent)} of the model's weights, {absent[0]} for one, or has them in another shape"
            f"{other}: save or fetch it again"
        )


def check_verifiable(base: Base) -> None:
    """Raises ValueError, in one sentence, where drafts could not be verified exactly."""
    try:
        if base.context_length < 1:
            raise Refused("does not say how many positions it takes")
        _check_states(base)
        _check_tree(base)
        _check_logits(base)
    except Refused as refused:
        raise ValueError(f"base.path={base.path}: {type(base.model).__name__} {refused}") from refused.__cause__


@torch.no_grad()
def windows_work(base: Base) -> bool:
    """Are tree masks that know a window what the model makes of one? Tried with a window of a few tokens, whose width
    transformers reads at each forward."""
    few = dict.fromkeys(base.windows.kinds.values(), PROBE_WINDOW)
    ids_1L = torch.arange(7, device=base.device).unsqueeze(0) % base.vocab_size
    try:
        wide_1LD = base.hidden(ids_1L)
        with patch.dict(vars(base.windows.config), few):
            if torch.equal(wide_1LD, base.hidden(ids_1L)):  # its width is not read where we changed it
                return False
            _check_tree(base)
    except Refused:
        return False
    return True


def _check_states(base: Base) -> None:
    """What transformers itself would keep of the past must be keys and values, and the model must not count distances
    by places in the cache, where a node lies behind its siblings."""
    config = base.model.config.get_text_config()
    kept = DynamicCache(config=base.model.config).layers
    states = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in kept)
    if states:
        raise Refused(f"{NO_KEYS}: {states} of its {len(kept)} layers have one running state")
    others = sorted({type(layer).__name__ for layer in kept} - ONLY_KEYS)
    if others:
        raise Refused(f"keeps more than keys and values ({', '.join(others)}), which the cache of draft trees does not")
    biased = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's windows
    if biased or local:
        counted = "distances (ALiBi)" if biased else "its windows"
        raise Refused(f"{NO_TREE}: it counts {counted} by places in the cache")


@torch.no_grad()
def _check_tree(base: Base) -> None:
    """Nodes of a tree behind the cache that decoding uses must give what their paths give. In low precision one that
    does is enough: there a mixture of experts may send rows of another shape to other experts."""
    *prompt, root, left, right, behind = [i % base.vocab_size for i in (4, 7, 5, 9, 8, 6, 3)]
    siblings = [i % base.vocab_size for i in range(10, 10 + PROBE_SIBLINGS)]  # a node's place is not its depth
    past, precise = len(prompt), base.dtype in (torch.float32, torch.float64)
    bound = 1e-3 if precise else 0.1
    paths_2L = torch.tensor([[*prompt, root, right, behind], [*prompt, root, left, behind]], device=base.device)
    positions_1L = torch.arange(past + 3, device=base.device).unsqueeze(0)
    with _reason("does not run"):
        alone_2LD = base.hidden(paths_2L, AttentionMask(positions_1L.expand(2, -1)))
    if not _close(alone_2LD[0, : past + 1], alone_2LD[1, : past + 1], bound).all():
        raise Refused("lets tokens see those that follow them, so it is no causal LM")

    tokens = np.array([left, *siblings, right, behind])
    parents, depths = np.full(len(tokens), -1), np.ones(len(tokens), np.int64)
    parents[-1], depths[-1] = 0, 2  # the last node stands behind `left`
    tree = Tree(tokens, parents, depths, np.ones(len(tokens), np.float32))
    cache = TreeCache(base.depth, 1, 32)
    with _reason("does not run with a cache of keys and values per position"):
        base.hidden(paths_2L[:1, :past], AttentionMask(positions_1L[:, :past]), cache=cache)
    if not cache.is_filled:
        raise Refused(NO_KEYS)
    cache.commit([range(past)])
    ids_1Q = torch.tensor([[root, *tokens.tolist()]], device=base.device)
    with _reason(NO_TREE):
        nodes_QD = base.hidden(ids_1Q, tree_mask([tree], cache.lengths, base.device), cache=cache)[0]
    good = _close(nodes_QD[-2:], alone_2LD[[0, 1], [past + 1, past + 2]], bound)
    if not (good.all() if precise else good.any()):
        raise Refused(f"{NO_TREE}, so drafts could not be verified exactly")


@torch.no_grad()
def _check_logits(base: Base) -> None:
    ids_1L = torch.arange(min(8, base.vocab_size), device=base.device).unsqueeze(0)
    want = base.model(input_ids=ids_1L, use_cache=False).logits.float()  # rounded as without a cache
    got = base.logits(base.hidden(ids_1L)).float()
    bound = 1e-3 if base.dtype in (torch.float32, torch.float64) else 2e-2  # some cap them before, some after rounding
    if not _close(got[0], want[0], bound).all():
        raise Refused(
            "makes its logits of hidden states in a way that ctcdraft does not know, so drafts could not be verified "
            "exactly"
        )


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
        raise Refused(f"{what} ({type(error).__name__}: {said})") from error
