"""`medusa`: residual blocks on the last hidden state, a stack for each slot.

Shape suffixes: B batch, L positions, N anchors, T slots, D hidden size of the base.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ..base.context import Anchors, Attended
from ..base.llm import Base
from .head import CHECKED, HeadConfig, Layers, OnePassHead, Slots


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class MedusaConfig(HeadConfig):
    kind: Literal["medusa"] = "medusa"
    layers: Layers = 1  # residual blocks per slot


class MedusaHead(OnePassHead):
    """T independent stacks of `layers` residual blocks on h_t: no root, no context (Cai et al. 2024, section 2.1.1)."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        D = base.hidden_size
        self.weight = nn.Parameter(torch.zeros(config.layers, config.slots, D, D))
        self.bias = nn.Parameter(torch.zeros(config.layers, config.slots, 1, D))

    def fill(self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, *seen: Any) -> Slots:
        rows_TND = anchors.own(hidden_BLD).expand(self.config.slots, -1, -1)
        for weight_TDD, bias_T1D in zip(self.weight, self.bias, strict=True):
            rows_TND = rows_TND + F.silu(torch.baddbmm(bias_T1D, rows_TND, weight_TDD))
        return Slots(rows_TND.transpose(0, 1))
