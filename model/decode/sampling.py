"""Which token the base chooses: argmax, or an exact sample whose noise depends on seed and position alone.

Gumbel-argmax: argmax(log p + g) with g a standard Gumbel per token is a sample of p (Gumbel 1954; Maddison et al.
2014). With the noise keyed by (seed, absolute position) plain and speculative decoding draw the same token wherever
the base's distribution is the same: seeded output is equal token for token.

Shape suffixes: R rows (positions that choose), V vocabulary.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

LEAST_TEMPERATURE = 1e-30  # any below gives the same tokens, and float32 could not divide by it


@dataclass(frozen=True)
class Sampling:
    """temperature 0: argmax. Applied in transformers' order: repetition penalty, temperature, top_k, top_p.

    top_k 0 and top_p 1 keep every token. Raises ValueError on values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be a positive number")

    def choose(self, logits_RV: Tensor, seen_RV: Tensor | None, noise_RV: Tensor | None) -> Tensor:
        """The chosen token of each row [R]. `seen` marks the tokens that the penalty is about; `noise` is
        gumbel(...) of each row's position, and is not looked at when temperature is 0."""
        logits_RV = logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV
        if self.repetition_penalty != 1.0 and seen_RV is not None:
            factor = self.repetition_penalty
            penalised = torch.where(logits_RV < 0, logits_RV * factor, logits_RV / factor)
            logits_RV = torch.where(seen_RV, penalised, logits_RV)
        if self.temperature == 0.0 or noise_RV is None:
            return logits_RV.argmax(dim=-1)
        return (self._warped(logits_RV).double() + noise_RV).argmax(dim=-1)

    def probabilities(self, logits_RV: Tensor) -> Tensor:
        """What `choose` draws from at a temperature above 0, without a penalty: [R, V]."""
        return self._warped(logits_RV).softmax(dim=-1)

    def _warped(self, logits_RV: Tensor) -> Tensor:
        """Logits over the temperature, the largest at 0: over 1e-45 they would all be infinite, and alike. -inf where
        top_k and top_p leave a token out."""
        logits_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        logits_RV = logits_RV / max(self.temperature, LEAST_TEMPERATURE)
        warpers: list[Any] = [TopKLogitsWarper(self.top_k)] if self.top_k else []
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1.0 else []
        for warper in warpers:
            logits_RV = warper(None, logits_RV)
        return logits_RV


def gumbel(seed: int, position: int, vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [V] in float64, a function of (seed, position) on this kind of device."""
    key = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
    exponential = torch.empty(vocab, dtype=torch.float64, device=device).exponential_(generator=generator)
    return exponential.log_().neg_()
