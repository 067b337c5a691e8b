"""The base's own continuations of many prompts: transformers' `generate`, batched by length."""

from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig

from ctcdraft.model.base import Base


def continue_prompts(
    base: Base, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int
) -> Iterator[tuple[int, list[int]]]:
    """(number of the prompt, its greedy continuation), shortest prompts first.

    A continuation ends with an end-of-sequence token unless max_new_tokens or the context ended it.
    Raises ValueError on an empty prompt or one that leaves no room in the context.
    """
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < base.context_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; {base.name} takes 1 to {base.context_length - 1}"
            )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        answers = _continue_batch(base, [prompts[i] for i in numbers], max_new_tokens)
        yield from zip(numbers, answers, strict=True)


def _continue_batch(base: Base, prompts: list[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    pad = base.eos_ids[0] if base.eos_ids else 0
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=min(max_new_tokens, base.context_length - longest),
        eos_token_id=list(base.eos_ids) or None,
        pad_token_id=pad,
    )
    with torch.no_grad():
        out = base.model.generate(ids.to(base.device), attention_mask=mask.to(base.device), generation_config=settings)
    return [_until_eos(row, base.eos_ids) for row in out[:, longest:].tolist()]


def _until_eos(tokens: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
