"""Why outputs may differ below exact arithmetic: the same tokens give other logits in a forward of another shape.

The control puts plain decoding's own tokens through the base N + 1 at a time (model/base/rounding.py). Shape suffix: V
vocabulary.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.rounding import SPACINGS, TIE_GAP, bound_of, forced_logits
from ctcdraft.model.base.sampling import gumbel

from .bench import Setting


@dataclass(frozen=True)
class Divergence:
    """Where speculative output first differs from plain, and what the base's logits say there. Gaps are in logits (of
    temperature times the noisy score, when sampling).

    top2_gap: the best two, as plain decoding sees them. other_gap: the best and what speculative decoding put out
    (None: nothing, it ended). bound: what rounding may explain, see `bound_of`. shape_change: the most that a logit
    moves between the two shapes.
    """

    position: int
    top2_gap: float
    other_gap: float | None
    bound: float
    shape_change: float
    within_bound: bool


@dataclass
class Flips:
    """Positions at which the shape alone, with no draft anywhere, changed the base's choice, and the answers (turns)
    that hold one. near: positions whose best two lie within the bound, where a wrong token could hide."""

    positions: int = 0
    near: int = 0
    flips: int = 0
    turns: int = 0
    largest_gap: float = 0.0


class Control:
    """Of speculative decoding with forwards of `width` rows (root and nodes)."""

    def __init__(self, base: Base, width: int) -> None:
        self.base, self.width = base, width
        self.below_float32 = base.dtype.itemsize < 4

    def flips(self, prompt: list[int], tokens: list[int], setting: Setting) -> Flips:
        """Where plain decoding's `tokens`, put through the base in the speculative shape, are not its choice."""
        found = Flips(len(tokens))
        for i, logits_V in enumerate(forced_logits(self.base, prompt, tokens, self.width)):
            scores_V = scores(logits_V, setting, len(prompt) + i)
            found.near += _top2_gap(scores_V) <= bound_of(logits_V)
            if int(scores_V.argmax()) != tokens[i]:
                found.flips, found.turns = found.flips + 1, 1
                found.largest_gap = max(found.largest_gap, float(scores_V.max() - scores_V[tokens[i]]))
        return found

    def explain(self, prompt: list[int], plain: list[int], drafted: list[int], setting: Setting) -> Divergence | None:
        """The first difference between the tokens of plain and of speculative decoding, if there is one."""
        if drafted == plain:
            return None
        shorter = min(len(drafted), len(plain))
        at = next((i for i in range(shorter) if drafted[i] != plain[i]), shorter)
        other = drafted[at] if at < shorter else None
        before, position = plain[:at], len(prompt) + at
        # of the logits before each of these tokens, the last ones count; what that token is does not
        plain_V, wide_V = (
            deque(forced_logits(self.base, prompt, [*before, 0], width), maxlen=1)[0] for width in (1, self.width)
        )
        scores_V, bound = scores(plain_V, setting, position), bound_of(plain_V)
        other_gap = None if other is None else float(scores_V.max() - scores_V[other])
        return Divergence(
            position=at,
            top2_gap=_top2_gap(scores_V),
            other_gap=other_gap,
            bound=bound,
            shape_change=float((plain_V.double() - wide_V.double()).abs().max()),
            within_bound=other_gap is not None and other_gap <= bound,
        )


def bound_in_words(dtype: torch.dtype) -> str:
    """What a report says of `bound_of`."""
    if dtype.itemsize >= 4:
        return f"{TIE_GAP:g}"
    return f"{SPACINGS} spacings of {str(dtype).removeprefix('torch.')} at the largest logit"


def scores(logits_V: Tensor, setting: Setting, position: int) -> Tensor:
    """What the base's choice at an absolute position is the argmax of, in units of a logit."""
    logits_V = logits_V.double()
    if setting.temperature == 0.0:
        return logits_V
    return logits_V + setting.temperature * gumbel(setting.seed, position, len(logits_V), logits_V.device)


def _top2_gap(scores_V: Tensor) -> float:
    best = scores_V.topk(2).values
    return float(best[0] - best[1])
