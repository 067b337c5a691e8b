"""What the draft of a step may be."""

from dataclasses import field
from itertools import accumulate
from operator import mul
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DraftConfig:
    """kind `cape`: Du et al. 2024, arXiv 2402.02082; `ranked`: the layouts of Yang et al. 2024, arXiv 2401.06706.

    budget `measured`: by psi and the time of a step, which for one sequence is measured once, and for
    several as they come: all of these have as many nodes, or the head rests. Tokens do not depend on it, steps do.

    proposal `shared`: the noise that the base will choose with is known, and output stays what it is whatever looks at
    it (Daliri et al. 2024, arXiv 2408.07978); `sampled` is accepted so that output has the base's distribution, though
    not the tokens that the seed gives plain decoding (Yang et al. 2024). stop `adaedl`: Agrawal et al. 2024,
    arXiv 2410.18351. graft: Zhao et al. 2024 (Ouroboros, arXiv 2402.13720) and Gong et al. 2024 (arXiv 2407.16207).
    schedule `pearl`: Liu et al. 2024, arXiv 2408.11850 (model/decode/pearl.py).
    """

    # tree: nodes that are worth most | chain | cape: a chain, more beside it where the head is less sure | ranked: by k
    kind: Literal["tree", "chain", "cape", "ranked"] = "tree"
    nodes: PositiveInt = 32  # tokens of a draft, at most; kind=ranked has those of k
    top_k: PositiveInt = 512  # tokens that a draft may hold, the likeliest in any slot
    # auto: measured on a CPU, fixed on a GPU | fixed: `nodes` | measured: at most so many, as pay
    budget: Literal["auto", "fixed", "measured"] = "auto"
    prompt_lookup: NonNegativeInt = 32  # copied tokens, where the last ones were read before; 0: none
    # of ranked: children of every node, by depth
    k: list[PositiveInt] = field(default_factory=lambda: [4, 2, 2, 1, 1, 1])
    # above temperature 0, best: the likeliest | shared: as the base will draw, by its own noise | sampled: drawn
    proposal: Literal["best", "shared", "sampled"] = "best"
    # of shared noise: the temperature of what it makes the head believe
    trust: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.8
    # of shared noise: the share of belief that does not look at it, since a head is unsure of a sure base
    doubt: Annotated[float, Field(ge=0, lt=1)] = 0.3
    stop: Literal["none", "adaedl"] = "none"  # adaedl: nothing behind a prefix that leaves the next token too uncertain
    # hung into the tree beside: phrases of the request's text, what follows the same tokens elsewhere in the tree
    graft: list[Literal["phrases", "siblings"]] = field(default_factory=list)
    # serial: the head drafts, then the base verifies | pearl: both at once, drafts are a step old
    schedule: Literal["serial", "pearl"] = "serial"

    def __post_init__(self) -> None:
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
        options = {
            "draft.schedule=pearl": self.schedule == "pearl",
            "draft.proposal=sampled": self.proposal == "sampled",
            "draft.stop=adaedl": self.stop == "adaedl",
            "draft.graft=[phrases]": "phrases" in self.graft,
        }
        return next((option for option, asked in options.items() if asked), "")
