"""`glide`: a causal LM of a few layers, which look at the keys and values of the base's last ones.

Du et al. 2024 (GliDe with a CaPE, ICML, arXiv 2402.02082, section 3.1): layer l of n looks at layer L - n + l of the
base. Theirs begins at random, and looks there between its own attention and its MLP. Here its layers are copies of
those whose keys they look at, and one attention sees these and those of the draft's own tokens. Words come from the
base's embedding and go to its LM head.

Shape suffixes: B batch, Q rows of one pass, D hidden size of the base.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ...base.context import Attended, AttentionMask
from ...base.llm import Base
from ..head import CHECKED, Layers
from ..last_layers import LastLayers
from .beam import OwnCache, StepwiseConfig, StepwiseHead


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class GlideConfig(StepwiseConfig):
    kind: Literal["glide"] = "glide"
    layers: Layers = 2  # of the base's last ones, copied
    cross: bool = True  # attention to the base's keys and values; false: to those of its own layers, the control


class GlideHead(StepwiseHead):
    """Its states are what meets the LM head; no pass reads them. With `cross` keys and values up to the anchor are all
    that it takes of the base's work."""

    config: GlideConfig
    scale: Tensor  # what is learnt of an input is as small as other weights, and states are not

    def __init__(self, config: GlideConfig, base: Base, attended: Attended) -> None:
        super().__init__(config, base, attended if config.cross else None)
        D = base.hidden_size
        self.encodes, self.own_layers = not config.cross, attended.layers
        self.gain = nn.Parameter(torch.ones(1))
        self.enter = nn.Linear(D, D, bias=False)
        nn.init.zeros_(self.enter.weight)
        self.register_buffer("scale", torch.tensor(attended.scale))
        self.body = LastLayers(base, attended)

    def step(self, state_BQD: Tensor, token_BQD: Tensor, mask: AttentionMask, cache: OwnCache) -> Tensor:
        x_BQD = self.gain * token_BQD + self.scale * self.enter(F.rms_norm(token_BQD, token_BQD.shape[-1:]))
        # A row reads the token behind its position, and that is where the base's keys expect it.
        mask = mask._replace(positions_BL=mask.positions_BL + (not self.encodes))
        return self.body(x_BQD, mask, cache)
