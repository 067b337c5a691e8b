"""Several requests on their way through the decoder together, and where their time goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctcdraft.model.cache import TreeCache
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.request import Request
from ctcdraft.model.sampling import Sampling
from ctcdraft.model.static import StaticDecoder
from ctcdraft.model.tree import Tree


class Clock:
    """Seconds per part. `verify` and `draft` end with a copy to the host, so they wait for an accelerator."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start


@dataclass
class Batch:
    """The requests that have not ended, and sequence b of both caches for `active[b]`.

    ends: tokens that end a request. static: the fixed-shape steps, where they apply; `drafted` then holds what the
    last of them drafted.
    """

    active: list[Request]
    cache: TreeCache
    head_cache: TreeCache | None
    sampling: Sampling
    ends: NDArray[np.int64]
    static: StaticDecoder | None = None
    drafted: list[Lattice | Tree] | None = None
    clock: Clock = field(default_factory=Clock)

    def release(self) -> None:
        """Give the fixed-shape steps back."""
        if self.static is not None:
            self.static.in_use = False

    def retire(self) -> None:
        """Drop the requests that have ended."""
        for number in range(len(self.active) - 1, -1, -1):
            if self.active[number].out.finish:
                self.cache.drop(number)
                if self.head_cache is not None:
                    self.head_cache.drop(number)
                self.active[number] = self.active[-1]
                self.active.pop()
