"""The base's own continuations of many prompts: transformers' `generate`, batched by length."""

from collections.abc import Sequence, Sized

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ctcdraft.model.base import Base
from ctcdraft.model.sampling import Sampling, gumbel


def batches_by_length(sequences: Sequence[Sized], batch_size: int) -> list[list[int]]:
    """Numbers of the sequences in batches of like length, shortest first."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def continue_batch(
    base: Base,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seeds: Sequence[int] = (),
) -> list[list[int]]:
    """The base's continuations of a few prompts at once: greedy at temperature 0, else sampled, one seed per prompt.

    A sample is what `Decoder.generate` draws from that seed: which prompts share the batch changes a token only where
    rounding does. Raises ValueError on an empty prompt or one that leaves no room in the context.
    """
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < base.context_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; {base.name} takes 1 to {base.context_length - 1}"
            )
    longest = max(map(len, prompts))
    pad = base.eos_ids[0] if base.eos_ids else 0
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    settings = GenerationConfig(
        max_new_tokens=min(max_new_tokens, base.context_length - longest),
        eos_token_id=list(base.eos_ids) or None,
        pad_token_id=pad,
        do_sample=False,
    )
    padding = [longest - len(prompt) for prompt in prompts]
    drawn = [_Drawn(Sampling(temperature, top_p=top_p), seeds, padding)] if temperature else []
    with torch.no_grad():
        out = base.model.generate(
            ids.to(base.device),
            attention_mask=mask.to(base.device),
            generation_config=settings,
            logits_processor=LogitsProcessorList(drawn),
        )
    return [_until_eos(row, base.eos_ids) for row in out[:, longest:].tolist()]


class _Drawn(LogitsProcessor):
    """Leaves each row the one token that its seed draws at its position, for argmax to find."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], padding: Sequence[int]) -> None:
        self.sampling, self.rows = sampling, list(zip(seeds, padding, strict=True))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        at, (_, V) = input_ids.shape[1], scores.shape
        noise_BV = torch.stack([gumbel(seed, at - padding, V, scores.device) for seed, padding in self.rows])
        chosen_B = self.sampling.choose(scores, None, noise_BV)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen_B.unsqueeze(1), 0.0)


def _until_eos(tokens: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
