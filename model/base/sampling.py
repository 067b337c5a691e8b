"""Which token the base chooses: argmax, or an exact sample whose noise depends on seed and position alone.

Gumbel-argmax: argmax(log p + g) with g a standard Gumbel per token is a sample of p (Gumbel 1954; Maddison et al.
2014). With the noise keyed by (seed, absolute position) plain and speculative decoding draw the same token wherever
the base's distribution is the same: seeded output is equal token for token.

Shape suffixes: R rows (positions that choose), V vocabulary.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

LEAST_TEMPERATURE = 1e-30  # any below gives the same tokens, and float32 could not divide by it


@dataclass(frozen=True)
class Sampling:
    """Applied in transformers' order: repetition penalty, temperature, top_k, top_p. Raises ValueError where one is out
    of its range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # the likeliest tokens with this probability in all
    repetition_penalty: float = 1.0  # above 1: tokens that were read before are less likely

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if not isinstance(self.top_k, SupportsIndex) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or a larger whole number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be a positive number")

    def choose(
        self, logits_RV: Tensor, seen_RV: Tensor | None, noise_RV: Tensor | None, *, captured: bool = False
    ) -> Tensor:
        """The chosen token of each row [R]. `seen` marks the tokens that the penalty is about; `noise` is
        gumbel(...) of each row's position, and is not looked at when temperature is 0. captured: by operations of the
        device alone, the same ones whatever the numbers are."""
        host = logits_RV.device.type == "cpu" and not captured
        logits_RV = logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV
        if seen_RV is not None:
            logits_RV = self.penalised(logits_RV, seen_RV)
        if self.temperature == 0.0 or noise_RV is None:
            return torch.from_numpy(logits_RV.numpy().argmax(axis=-1)) if host else logits_RV.argmax(dim=-1)
        if host:
            return self._chosen_on_host(logits_RV, noise_RV)
        return (self.warped(logits_RV).double() + noise_RV).argmax(dim=-1)

    def _chosen_on_host(self, logits_RV: Tensor, noise_RV: Tensor) -> Tensor:
        """The same by numpy, whose argmax is ten times as fast as torch's, and without sorting a vocabulary for top_p,
        which takes a good part of a step per row.

        Who is best among all tokens is within top_p where the likelier ones have less than that together. Where it is
        not, neither is any token less likely.
        """
        warped_RV = replace(self, top_p=1.0).warped(logits_RV)
        allowed_RV, noise = warped_RV.numpy(), noise_RV.numpy()
        if self.top_p == 1.0:
            return torch.from_numpy((allowed_RV + noise).argmax(axis=-1))
        p_RV = warped_RV.softmax(dim=-1).numpy()
        while True:
            best_R1 = (allowed_RV + noise).argmax(axis=-1, keepdims=True)
            likelier_RV = allowed_RV > np.take_along_axis(allowed_RV, best_R1, axis=-1)
            beyond_R1 = np.where(likelier_RV, p_RV, 0.0).sum(axis=-1, keepdims=True) >= self.top_p
            if not beyond_R1.any():
                return torch.from_numpy(best_R1[:, 0])
            allowed_RV = np.where(beyond_R1 & ~likelier_RV, -np.inf, allowed_RV)

    def penalised(self, logits_RV: Tensor, seen_RV: Tensor) -> Tensor:
        """Logits of the tokens that were seen, less likely by the repetition penalty."""
        factor = self.repetition_penalty
        return torch.where(seen_RV, torch.where(logits_RV < 0, logits_RV * factor, logits_RV / factor), logits_RV)

    def probabilities(self, logits_RV: Tensor) -> Tensor:
        """What `choose` draws from at a temperature above 0, without a penalty: [R, V]."""
        return self.warped(logits_RV).softmax(dim=-1)

    def warped(self, logits_RV: Tensor) -> Tensor:
        """Logits over the temperature, the largest at 0: over 1e-45 they would all be infinite, and alike. -inf where
        top_k and top_p leave a token out."""
        logits_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        logits_RV = logits_RV / max(self.temperature, LEAST_TEMPERATURE)
        warpers: list[Any] = [TopKLogitsWarper(index(self.top_k))] if self.top_k else []
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1.0 else []
        for warper in warpers:
            logits_RV = warper(None, logits_RV)
        return logits_RV


# What noise is for: the base's own choices; and of multi-candidate drafting the drawn candidates, what accepts them,
# and what is drawn where none was accepted.
CHOICE, PROPOSAL, ACCEPTANCE, RESIDUAL = range(4)
GOLDEN = 0x9E3779B97F4A7C15  # of splitmix64 (Steele, Lea, Flood 2014)
MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def noise_key(seed: int, position: int, stream: int = CHOICE) -> int:
    """Names the noise of a position; each stream has its own."""
    words = f"{seed} {position}" + (f" {stream}" if stream else "")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=128)
def gumbel(seed: int, position: int, vocab: int, device: torch.device, stream: int = CHOICE) -> Tensor:
    """Standard Gumbel noise [V] in float64: of token v a hash of (seed, position, v), so that `gumbel_of` has the same
    for any of them. Not to be written into: the same position is asked for again, by drafts and by what verifies them.
    """
    if device.type == "cpu":
        return torch.from_numpy(gumbel_of(np.arange(vocab), seed, position, stream))
    return _gumbel_on(device, noise_key(seed, position, stream), vocab)


def _gumbel_on(device: torch.device, key: int, vocab: int) -> Tensor:
    """`gumbel_of` all tokens, by operations of a device that has no unsigned numbers."""
    x_V = torch.arange(1, vocab + 1, device=device) * _signed(GOLDEN) + _signed(key)
    for shift, factor in MIX:
        x_V = (x_V ^ _shifted(x_V, shift)) * _signed(factor)
    uniform_V = (_shifted(x_V ^ _shifted(x_V, 31), 12).double() + 0.5) * 2.0**-52
    return uniform_V.log_().neg_().log_().neg_()


def gumbel_of(tokens: NDArray[np.int64], seed: int, position: int, stream: int = CHOICE) -> NDArray[np.float64]:
    """What `gumbel` has for these tokens, on the host: elsewhere to the last bits of a logarithm."""
    x = _uniform(tokens, np.uint64(noise_key(seed, position, stream)))
    np.negative(np.log(x, out=x), out=x)
    return np.negative(np.log(x, out=x), out=x)


@njit(cache=True)
def _uniform(tokens: NDArray[np.int64], key: np.uint64) -> NDArray[np.float64]:
    found = np.empty(len(tokens))
    for i, token in enumerate(tokens):
        x = (np.uint64(token) + np.uint64(1)) * np.uint64(GOLDEN) + key
        x = (x ^ (x >> np.uint64(MIX[0][0]))) * np.uint64(MIX[0][1])
        x = (x ^ (x >> np.uint64(MIX[1][0]))) * np.uint64(MIX[1][1])
        x ^= x >> np.uint64(31)
        found[i] = (np.float64(x >> np.uint64(12)) + 0.5) * 2.0**-52
    return found


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
