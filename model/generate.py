"""The base's own continuations of many prompts, decoded together: continuous batching over one cache.

A row that ends is taken at once by the next prompt that waits (Yu et al., Orca, OSDI 2022), and keys and values are
written in place. Shape suffixes: B rows in flight, V vocabulary.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ctcdraft.model.attention import decoding_attention
from ctcdraft.model.base import Base
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.sampling import Sampling, gumbel

CAPACITY_STEP = 256  # cache entries per row are a multiple of this
T = TypeVar("T")


class Answers(Protocol):
    """Answers by what was asked, which may outlive a process, as data.store.Journal does."""

    def get(self, key: str) -> Any: ...
    def put(self, key: str, value: Any) -> None: ...


def batches_by_length(sequences: Sequence[Sized], batch_size: int) -> list[list[int]]:
    """Numbers of the sequences in batches of like length, shortest first."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@dataclass(eq=False)
class Continuation:
    """A prompt and at most `max_new_tokens` behind it; `tokens` are those so far, an end-of-sequence token included.

    seed: of the noise, at a temperature above 0.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far: the position of the next one."""
        return len(self.prompt) + len(self.tokens)


def continue_all(base: Base, waiting: deque[Continuation], rows: int) -> Iterator[Continuation]:
    """Take continuations from the left of `waiting`, at most `rows` of them in flight, and yield each when it is done.

    More may be appended to `waiting` whenever one is yielded; the last of them takes its place at once where it goes
    on from there, as the next turn of a conversation does. Greedy tokens are those of transformers' `generate`, sampled
    ones those that `Decoder.generate` draws from the same seed; what else is in flight changes a token only where
    rounding does. The cache grows with the longest row in flight. Raises ValueError on an empty prompt, or one that
    leaves no room in the context.
    """
    layers = base.model.config.get_text_config().num_hidden_layers
    cache = TreeCache(layers, rows, CAPACITY_STEP, in_use=0)
    active: list[Continuation] = []
    while waiting or active:
        while waiting and len(active) < rows:
            _prefill(base, cache, active, cache.add(), waiting.popleft())
        for row in reversed(range(len(active))):
            while row < len(active) and _is_done(base, active[row]):
                done = active[row]
                yield done
                if waiting:
                    follows = waiting[-1].prompt[: done.length] == done.prompt + done.tokens
                    _prefill(base, cache, active, row, waiting.pop() if follows else waiting.popleft())
                    continue
                last = active.pop()
                if last is not done:  # as the cache moves its last row
                    active[row] = last
                cache.drop(row)
        if active:
            _step(base, cache, active)


def continued(
    base: Base,
    work: deque[tuple[T, list[int], float, str]],
    top_p: float,
    answers: Answers,
    *,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> Iterator[tuple[T, list[int]]]:
    """(owner, continuation) of each (owner, prompt, temperature, name), as they are done, `batch_size` in flight.

    More may be appended to `work` whenever one is given. The noise of a sample goes by its prompt and name. An answer
    is in `answers` before it is given, known by what was asked: one that was in flight when a process was killed is
    decoded again beside others, and may then differ where rounding decides (in bf16 it does now and then).
    """
    waiting: deque[Continuation] = deque()
    asked: dict[Continuation, tuple[T, str]] = {}

    def already_known() -> Iterator[tuple[T, list[int]]]:
        while work:
            owner, prompt, temperature, name = work.popleft()
            most = min(max_new_tokens, base.context_length - len(prompt))
            key, _ = work_key(prompt, name if temperature else "", temperature, top_p, most, seed)
            answer = answers.get(key)
            if answer is not None:
                yield owner, answer
                continue
            noise = work_key(prompt, name, temperature, seed)[1]
            waiting.append(Continuation(prompt, most, Sampling(temperature, top_p=top_p), noise))
            asked[waiting[-1]] = owner, key

    yield from already_known()
    for done in continue_all(base, waiting, batch_size):
        owner, key = asked.pop(done)
        answers.put(key, done.tokens)
        yield owner, done.tokens
        yield from already_known()


def work_key(*parts: Any) -> tuple[str, int]:
    """What work is known by, and the seed of its noise."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
    return digest.hex(), int.from_bytes(digest[:6], "big")


def _check(base: Base, one: Continuation) -> None:
    if not 0 < len(one.prompt) < base.context_length:
        raise ValueError(
            f"a prompt has {len(one.prompt)} tokens; {base.name} takes 1 to {base.context_length - 1} of them"
        )
    one.max_new_tokens = min(one.max_new_tokens, base.context_length - len(one.prompt))


def _is_done(base: Base, one: Continuation) -> bool:
    return len(one.tokens) >= one.max_new_tokens or one.tokens[-1] in base.eos_ids


@torch.no_grad()
def _prefill(base: Base, cache: TreeCache, active: list[Continuation], row: int, one: Continuation) -> None:
    """Let a row hold another prompt, or the first row that is free, and choose its first token. What the prompt has in
    common with one of the rows, its own end included, is copied from there: a system prompt, earlier turns."""
    _check(base, one)
    cache.reserve(-(-(len(one.prompt) + one.max_new_tokens) // CAPACITY_STEP) * CAPACITY_STEP)
    shared = [_shared_length(one.prompt[:-1], other.prompt + other.tokens[:-1]) for other in active]
    source = max(range(len(active)), key=shared.__getitem__, default=row)
    cache.begin(row, source, shared[source] if active else 0)
    active[row : row + 1] = [one]
    cache.alone(row)
    ids = torch.tensor([one.prompt[cache.get_seq_length() :]], device=base.device)
    sight = cache.sight(ids.shape[1], base.device)
    mask = sight.additive(base.dtype)
    hidden = base.hidden(ids, attention_mask=mask, position_ids=sight.positions_BL, cache=cache)
    cache.alone(None)
    cache.lengths[row] = len(one.prompt)
    one.tokens += _choose(base.logits(hidden[:, -1]), [one])


def _shared_length(left: list[int], right: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@torch.no_grad()
def _step(base: Base, cache: TreeCache, active: list[Continuation]) -> None:
    """One more token for every row."""
    ids = torch.tensor([[one.tokens[-1]] for one in active], device=base.device)
    sight = cache.sight(1, base.device)
    mask = sight.additive(base.dtype)
    with decoding_attention(base.model):
        hidden = base.hidden(ids, attention_mask=mask, position_ids=sight.positions_BL, cache=cache)
    cache.keep([[0]] * len(active))
    chosen = _choose(base.logits(hidden[:, 0]), active)
    for one, token in zip(active, chosen, strict=True):
        one.tokens.append(token)


def _choose(logits_BV: Tensor, active: list[Continuation]) -> list[int]:
    """The next token of each row, rows of one kind of sampling together."""
    V, chosen = logits_BV.shape[1], [0] * len(active)
    for sampling in {one.sampling for one in active}:
        rows = [row for row, one in enumerate(active) if one.sampling == sampling]
        noise_BV = None
        if sampling.temperature:
            noise_BV = torch.stack([gumbel(active[r].seed, active[r].length, V, logits_BV.device) for r in rows])
        found = sampling.choose(logits_BV if len(rows) == len(active) else logits_BV[rows], None, noise_BV)
        for row, token in zip(rows, found.tolist(), strict=True):
            chosen[row] = token
    return chosen
