"""Base and head at the same time: PEARL (Liu et al. 2024, arXiv 2408.11850).

While the base verifies a draft, the head drafts anew from where that draft began. What it believed to follow the tokens
that the base then chose is the next draft (post-verify, in the paper's words). Where it did not expect them, the base
reads the root alone while the head drafts (pre-verify). A step takes as long as the slower of the two, and drafts come
a step late. In the paper the drafter goes on behind its own pending tokens; these heads draft from states of the base,
which has not read them.

On a CPU the head has a thread, on a GPU a stream too. What the base wrote is committed when both are done.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from ..base.llm import Base
from ..draft.drafter import Outcome
from ..draft.growth import Drafted, Hints, behind
from ..draft.tree import EMPTY, Tree
from ..lattice.candidates import Lattice
from .request import Request
from .step import EagerStep


class PearlStep(EagerStep):
    """An eager step whose `verify` makes the next draft meanwhile. Of an error on either side, the caller sees one, of
    the base if both fail, when both are done."""

    def __init__(self, base: Base, *given: Any) -> None:
        super().__init__(base, *given)
        self.stream = torch.cuda.Stream(base.device) if base.device.type == "cuda" else None
        self.early: dict[Request, tuple[Lattice | Tree, int]] = {}  # what was drafted, behind so many tokens
        self.beside = ThreadPoolExecutor(1, "head")

    def end(self) -> None:
        self.beside.shutdown()

    def draft(self, hints: Callable[[], Hints]) -> Sequence[Drafted]:
        """What the head expected behind each root before the base chose it."""
        self.hints = hints
        expected = []
        with self.timed("tree"):
            for request in self.active:
                drafted, length = self.early.get(request, (EMPTY, request.length))
                expected.append(behind(drafted, request.read[length:].tolist()))
        return expected

    def verify(self, drafts: Sequence[Tree]) -> list[Outcome]:
        """As the eager step does, and the next draft with it; `draft` seconds are those that the base was done
        before."""
        lengths = [request.length for request in self.active]
        # Made on the base's stream: noise that both look at, and states, whose memory is free once nobody holds them.
        hints, states = self.hints(), [request.hidden for request in self.active]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.base.device))
        drafting = self.beside.submit(self._draft_beside, hints)
        try:
            with self.timed("verify"):
                found, hidden_BQD = self._verified(drafts)
            with self.timed("draft"):
                drafted = drafting.result()
        finally:  # whatever becomes of the base, the head is done before anything else happens
            wait([drafting])
        del states
        with self.timed("other"):
            self._commit(found, hidden_BQD)
        self.early = dict(zip(self.active, zip(drafted, lengths, strict=True), strict=True))
        return found

    def _draft_beside(self, hints: Hints) -> list[Lattice | Tree]:
        if self.stream is None:
            return self._drafted(hints)
        with torch.cuda.stream(self.stream):
            drafted = self._drafted(hints)
        self.stream.synchronize()
        return drafted


def check_angles(base: Base) -> None:
    """Raises ValueError on a base that sets its rotary angles anew by length: a head beside it would do so too."""
    kinds = str(getattr(getattr(base.decoder, "rotary_emb", None), "rope_type", ""))
    if "dynamic" in kinds or "longrope" in kinds:
        raise ValueError(
            f"draft.schedule=pearl: {base.name} sets its rotary angles anew by length, which base and head would do at "
            "the same time: take draft.schedule=serial"
        )
