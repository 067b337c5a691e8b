"""What the draft of a step may be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftConfig:
    """kind: `tree` or `chain`.

    budget `measured`: by calibrated psi and the time of a step, which is measured once (for one sequence at a time;
    several keep to `nodes`). Tokens do not depend on it; the number of steps that they take is another whenever times
    are. prune: see `tree.search`.
    """

    kind: str = "tree"
    nodes: int = 32  # tokens of a draft, at most
    top_k: int = 512  # tokens that a draft may hold, the likeliest in any slot
    # auto: measured on a CPU, fixed on a GPU | fixed: `nodes` | measured: at most so many, as pay
    budget: str = "auto"
    prune: float = 0.03  # share of a prefix's alignments that the search may leave out; 0: psi is exact
    prompt_lookup: int = 32  # copied tokens, where the last ones were read before; 0: none

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
