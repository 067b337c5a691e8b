"""What the draft of a step may be."""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

CHOICES = {
    "kind": ("tree", "chain", "cape", "ranked"),
    "budget": ("auto", "fixed", "measured"),
    "proposal": ("best", "shared", "sampled"),
    "stop": ("none", "adaedl"),
    "schedule": ("serial", "pearl"),
}
GRAFTS = ("phrases", "shared_phrases", "siblings")


@dataclass(frozen=True)
class DraftConfig:
    """kind `cape`: Du et al. 2024, arXiv 2402.02082; `ranked`: the layouts of Yang et al. 2024, arXiv 2401.06706.

    budget `measured`: by calibrated psi and the time of a step, which for one sequence is measured once, and for
    several as they come: all of these have as many nodes, or the head rests. Tokens do not depend on it; the number of
    steps that they take is another whenever times are.

    proposal `shared`: the noise that the base will choose with is known, and output stays what it is whatever looks at
    it (Daliri et al. 2024, arXiv 2408.07978); `sampled` is accepted so that output has the base's distribution, though
    not the tokens that the seed gives plain decoding (Yang et al. 2024). stop `adaedl`: Agrawal et al. 2024, arXiv
    2410.18351. graft: Zhao et al. 2024 (Ouroboros, arXiv 2402.13720) and Gong et al. 2024 (arXiv 2407.16207);
    `shared_phrases` are of all that the decoder has written: then one user's time tells what another's text holds.
    schedule `pearl`: Liu et al. 2024, arXiv 2408.11850 (model/decode/pearl.py).
    """

    # tree: nodes that are worth most | chain | cape: a chain, more beside it where the head is less sure | ranked: by k
    kind: str = "tree"
    nodes: int = 32  # tokens of a draft, at most
    top_k: int = 512  # tokens that a draft may hold, the likeliest in any slot
    # auto: measured on a CPU, fixed on a GPU | fixed: `nodes` | measured: at most so many, as pay
    budget: str = "auto"
    prompt_lookup: int = 32  # copied tokens, where the last ones were read before; 0: none
    k: list[int] = field(default_factory=lambda: [4, 2, 2, 1, 1, 1])  # of ranked: children of every node, by depth
    # above temperature 0, best: the likeliest | shared: as the base will draw, by its own noise | sampled: drawn
    proposal: str = "best"
    trust: float = 0.8  # of shared noise: the temperature of what it makes the head believe
    stop: str = "none"  # adaedl: nothing behind a prefix that leaves the next token too uncertain
    graft: list[str] = field(default_factory=list)  # of phrases, shared_phrases, siblings: hung into the tree beside
    # serial: the head drafts, then the base verifies | pearl: both at once, drafts are a step old
    schedule: str = "serial"

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                known = " or ".join([", ".join(choices[:-1]), choices[-1]])
                raise ValueError(f"draft.{key}={getattr(self, key)!r} is unknown: choose {known}")
        if unknown := [source for source in self.graft if source not in GRAFTS]:
            raise ValueError(f"draft.graft={unknown} is unknown: choose of {', '.join(GRAFTS)}")
        if self.nodes < 1 or self.top_k < 1 or not all(count >= 1 for count in self.k):
            raise ValueError(f"draft.nodes={self.nodes}, draft.top_k={self.top_k}, draft.k={self.k} must be at least 1")
        if self.prompt_lookup < 0:
            raise ValueError(f"draft.prompt_lookup={self.prompt_lookup} must be at least 0 (no lookup)")
        if not 0.0 < self.trust < float("inf"):
            raise ValueError(f"draft.trust={self.trust} must be above 0")
        if self.proposal == "sampled" and (self.kind != "ranked" or self.prompt_lookup or self.graft):
            raise ValueError(
                "draft.proposal=sampled needs draft.kind=ranked, draft.prompt_lookup=0 and draft.graft=[]: every node "
                "must have been drawn"
            )
        if self.schedule == "pearl" and self.budget == "measured":
            raise ValueError(
                "draft.schedule=pearl takes no draft.budget=measured, which times one part after the other"
            )

    @property
    def most_nodes(self) -> int:
        """No draft has more."""
        return sum(accumulate(self.k, mul)) if self.kind == "ranked" else self.nodes

    @property
    def needs_decoding(self) -> str:
        """The option whose drafts, or what becomes of them, decoding alone can tell; empty where there is none."""
        phrases = [source for source in self.graft if "phrases" in source]
        if self.schedule == "pearl":
            return "draft.schedule=pearl"
        if self.proposal == "sampled":
            return "draft.proposal=sampled"
        return "draft.stop=adaedl" if self.stop == "adaedl" else f"draft.graft={phrases}" if phrases else ""
