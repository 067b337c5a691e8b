"""The control `eagle`: one autoregressive layer on the base's features.

Li et al. 2024 (EAGLE, arXiv 2401.15077). A pass reads a token and the feature from which that token was drawn, and
predicts the next feature, which the frozen LM head turns into a distribution.

Shape suffixes: B batch, Q rows of one pass, D hidden size of the base.
"""

from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ...base.context import Attended, AttentionMask
from ...base.llm import Base
from ..block import Block
from ..head import CHECKED, Size
from .beam import OwnCache, StepwiseConfig, StepwiseHead


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class EagleConfig(StepwiseConfig):
    kind: Literal["eagle"] = "eagle"
    width: Size = 128  # of its layer; of states and token tables of mlp: 512
    heads: Size = 4  # attention heads of its layer

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):  # so that it splits into heads with rotary positions
            raise ValueError(f"head.width={self.width} is no even multiple of head.heads={self.heads}")


class EagleHead(StepwiseHead):
    """Its states are features, as large as the base's."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        self.enter = nn.Linear(2 * base.hidden_size, config.width, bias=False)
        self.block = Block(config.width, config.heads)
        self.norm = nn.RMSNorm(config.width)
        self.leave = nn.Linear(config.width, base.hidden_size, bias=False)

    def step(self, state_BQD: Tensor, token_BQD: Tensor, mask: AttentionMask, cache: OwnCache) -> Tensor:
        x = self.enter(torch.cat([token_BQD, state_BQD], dim=-1))
        return self.leave(self.norm(self.block(x, mask, cache)))
