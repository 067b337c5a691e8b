"""The base's own continuations of many prompts, decoded together: continuous batching over one cache.

A row that ends is taken at once by the next prompt that waits (Yu et al., Orca, OSDI 2022), and keys and values are
written in place.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence, Sized
from typing import Any, TypeVar

from ..base.llm import Base
from ..base.sampling import Sampling
from .decoder import Decoder
from .request import Request

T = TypeVar("T")
POSITIONS = 32768  # that are read together, unless one sequence alone has more
SHORT, ENTRIES = 4096, 131072  # of the cache: entries that any row may have, and all rows together where one has more


def batches_by_length(sequences: Sequence[Sized], batch_size: int) -> list[list[int]]:
    """Numbers of the sequences in batches of like length, shortest first. A batch ends before it holds more than
    POSITIONS, padding included."""
    batches: list[list[int]] = []
    for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
        room = min(batch_size, POSITIONS // max(1, len(sequences[i])))
        if not batches or len(batches[-1]) >= room:
            batches.append([])
        batches[-1].append(i)
    return batches


def continue_all(base: Base, waiting: deque[Request], rows: int) -> Iterator[Request]:
    """Take requests from the left of `waiting`, at most `rows` of them in flight, and yield each when it is done.

    More may be appended to `waiting` whenever one is yielded; the last of them takes its place at once where it goes
    on from there, as the next turn of a conversation does. Greedy tokens are those of transformers' `generate`, sampled
    ones those that `Decoder.generate` draws from the same seed; what else is in flight changes a token only where
    rounding does. The cache grows with the longest row in flight, so long ones come last, in fewer rows. Raises
    ValueError on an empty prompt, or one that leaves no room in the context.
    """
    decoder, longer = Decoder(base), deque[Request]()
    step = decoder.eager_step(rows, 0)

    def admitted(follows: bool = False, row: int | None = None) -> bool:
        """Has one of those that wait been taken into a row?"""
        while waiting:
            request = waiting.pop() if follows else waiting.popleft()
            request.fit(base)
            entries, follows = len(request.prompt) + request.max_new_tokens, False
            if rows == 1 or entries <= max(SHORT, ENTRIES // rows):
                step.cache.reserve(entries)
                step.admit(request, row)
                return True
            longer.append(request)
        return False

    while waiting or step.active:
        while len(step.active) < rows and admitted():
            pass
        for row in reversed(range(len(step.active))):
            while row < len(step.active) and (done := step.active[row]).out.finish:
                yield done
                follows = bool(waiting) and waiting[-1].prompt[: done.length] == done.prompt + done.tokens
                if not admitted(follows, row):
                    step.drop(row)
        if step.active:
            decoder.advance(step)
    if longer:
        del step  # and its cache
        for done in continue_all(base, longer, max(1, rows // 4)):
            yield done
            longer.extend(waiting)
            waiting.clear()


def continued(
    base: Base,
    work: deque[tuple[T, list[int], float, str]],
    top_p: float,
    answers: MutableMapping[str, Any],
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
    waiting: deque[Request] = deque()
    asked: dict[Request, tuple[T, str]] = {}

    def already_known() -> Iterator[tuple[T, list[int]]]:
        while work:
            owner, prompt, temperature, name = work.popleft()
            most = min(max_new_tokens, base.context_length - len(prompt))
            key, _ = work_key(prompt, name if temperature else "", temperature, top_p, most, seed)
            answer = answers.get(key)
            if answer is not None:
                yield owner, answer
                continue
            _, noise = work_key(prompt, name, temperature, seed)
            waiting.append(Request(prompt, most, Sampling(temperature, top_p=top_p), noise))
            asked[waiting[-1]] = owner, key

    yield from already_known()
    for done in continue_all(base, waiting, batch_size):
        owner, key = asked.pop(done)
        answers[key] = done.tokens
        yield owner, done.tokens
        yield from already_known()


def work_key(*parts: Any) -> tuple[str, int]:
    """What work is known by, and the seed of its noise."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
    return digest.hex(), int.from_bytes(digest[:6], "big")
