"""`diffusion`: a masked-diffusion drafter, whose slots are refined a few times.

Christopher et al., NAACL 2025 (SpecDiff, arXiv 2408.05636), on masked diffusion (Sahoo et al. 2024, arXiv 2406.07524):
in training a share u ~ U(0, 1) of each anchor's slots is masked, the others show their labels, and the masked ones are
learnt. Drafting begins with every slot masked; each fill shows the tokens of the slots that are surest, so that what is
filled next agrees with them. A slot keeps the distribution that it had when its token was shown.

Shape suffixes: N anchors, T slots, U labels, D hidden size of the base, X draft tokens.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ..base.cache import TreeCache
from ..base.context import Anchors, Attended
from ..base.llm import Base
from .head import CHECKED, Slots
from .slots import ParallelConfig, SlotHead
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DiffusionConfig(ParallelConfig):
    """The loss weighs an anchor's masked slots against each other, so that 1/u, which weighs anchors, is left out."""

    kind: Literal["diffusion"] = "diffusion"  # type: ignore[assignment]
    transition: Literal["none"] = "none"
    fills: Annotated[int, Field(strict=True, ge=1)] = 2  # passes over the slots of a draft; 1: all masked

    def __post_init__(self) -> None:
        if self.fills > self.slots:
            raise ValueError(f"head.fills={self.fills}: each shows a slot at least, and head.slots={self.slots}")


class DiffusionHead(SlotHead):
    """The body of `parallel`; a shown token takes the root's place in its slot."""

    config: DiffusionConfig
    reads_labels = True

    def __init__(self, config: DiffusionConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        self.show = nn.Linear(base.hidden_size, base.hidden_size)  # of a shown token, as `enter` of the root
        nn.init.zeros_(self.show.weight)
        nn.init.zeros_(self.show.bias)

    def forward(self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, label_NUD: Tensor | None = None) -> Slots:
        if label_NUD is None:
            return self.fill(hidden_BLD, root_BLD, anchors)
        N, T = len(label_NUD), self.config.slots
        token_NTD = F.pad(label_NUD[:, :T], (0, 0, 0, T - min(T, label_NUD.shape[1])))
        masked_NT = torch.rand(N, T, device=token_NTD.device) < torch.rand(N, 1, device=token_NTD.device)
        masked_NT |= (token_NTD == 0).all(dim=2)
        shown = self._shown(~masked_NT, token_NTD, root_BLD, anchors)
        return Slots(self.states(hidden_BLD, root_BLD, anchors, shown=shown), learnt_NT=masked_NT)

    def fill(
        self,
        hidden_BLX: Tensor,
        root_BLD: Tensor,
        anchors: Anchors,
        cache: TreeCache | None = None,
        tokens: DraftVocabulary | None = None,
    ) -> Slots:
        """Without `tokens` one fill, of masked slots alone."""
        x_NTD = self.states(hidden_BLX, root_BLD, anchors, cache)
        if tokens is None:
            return Slots(x_NTD)
        T, fills = self.config.slots, self.config.fills
        shown_NT = torch.zeros(x_NTD.shape[:2], dtype=torch.bool, device=x_NTD.device)
        token_NTD = torch.zeros_like(x_NTD)
        for number in range(1, fills):
            logits_NTX = tokens.logits(x_NTD).float()
            sure_NT, token_NT = (logits_NTX - logits_NTX.logsumexp(dim=2, keepdim=True)).max(dim=2)
            token_NTD = token_NTD.where(shown_NT.unsqueeze(2), tokens.embed(token_NT).to(x_NTD.dtype))
            surest = sure_NT.masked_fill(shown_NT, torch.inf).topk(-(-T * number // fills), dim=1).indices
            shown_NT = shown_NT.scatter(1, surest, True)
            shown = self._shown(shown_NT, token_NTD, root_BLD, anchors)
            again_NTD = self.states(hidden_BLX, root_BLD, anchors, cache, shown)
            x_NTD = x_NTD.where(shown_NT.unsqueeze(2), again_NTD)
        return Slots(x_NTD)

    def _shown(self, shown_NT: Tensor, token_NTD: Tensor, root_BLD: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """What `states` takes: what shown slots read, and their tokens, the root's in all others."""
        shown_NT1 = shown_NT.unsqueeze(2)
        read_NTD = self.show(F.rms_norm(token_NTD, token_NTD.shape[-1:])) * shown_NT1
        return read_NTD, token_NTD.where(shown_NT1, anchors.own(root_BLD).unsqueeze(1))
