"""What the draft of a step may be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftConfig:
    """kind: `tree` or `chain`; nodes: the budget N; top_k: tokens that a draft may hold, the likeliest in any slot.

    budget: `fixed`: always `nodes`; `measured`: at most `nodes`, as many per step as pay by calibrated psi and the time
    of a step, which is measured once (for one sequence at a time; several keep to `nodes`); `auto`: `measured` on a
    CPU, where each row costs, `fixed` elsewhere. Tokens do not depend on it; the number of steps that they take is
    another whenever times are.

    prune: the share of a prefix's alignments that the search may leave out, see `tree.search`; 0: psi is exact.

    prompt_lookup: where the last tokens were read before, at most so many of those that followed are drafted too, see
    `prompt_lookup`; 0: none.
    """

    kind: str = "tree"
    nodes: int = 32
    top_k: int = 512
    budget: str = "auto"
    prune: float = 0.03
    prompt_lookup: int = 32

    def __post_init__(self) -> None:
        if self.kind not in ("tree", "chain"):
            raise ValueError(f"draft.kind={self.kind!r} is unknown: choose tree or chain")
        if self.budget not in ("auto", "fixed", "measured"):
            raise ValueError(f"draft.budget={self.budget!r} is unknown: choose auto, fixed or measured")
        if self.nodes < 1 or self.top_k < 1:
            raise ValueError(f"draft.nodes={self.nodes} and draft.top_k={self.top_k} must be at least 1")
        if not 0.0 <= self.prune < 1.0:
            raise ValueError(f"draft.prune={self.prune} must be at least 0 and below 1")
        if self.prompt_lookup < 0:
            raise ValueError(f"draft.prompt_lookup={self.prompt_lookup} must be at least 0 (no lookup)")
