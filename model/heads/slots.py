"""`ctc`, a lattice of tokens and blanks, and `parallel`, its control without a blank: one body.

Shape suffixes: B batch, L positions, N anchors, A of them in a row (padded), T slots, D hidden size of the base, X what
`Base.hidden` gives per position, S positions with keys and values, Q slots of all anchors of a row, R rank.
"""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ..base.cache import PassingCache, TreeCache
from ..base.context import Anchors, Attended, AttentionMask
from ..base.llm import Base
from ..lattice.topology import Topology
from .block import Block
from .head import CHECKED, HeadConfig, Layers, OnePassHead, Size, Slots
from .last_layers import LastLayers
from .transition import Transition

RARE_BLANK = -2.0  # log-odds that the blank begins with


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ParallelConfig(HeadConfig):
    """layers: see last_layers.py; transition, rank: see transition.py."""

    kind: Literal["parallel"] = "parallel"
    slots: Size = 5  # tokens or blanks per draft; a real base accepts 2 to 4 at a time
    layers: Layers = 2  # of the base's last ones, copied: the body, which sees the base's own keys and values
    transition: Literal["none", "full"] = "none"  # on the token collapsed before: none | full
    rank: Size = 128  # of the transition's matrices


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CtcConfig(ParallelConfig):
    """merge, band: see `Topology`."""

    kind: Literal["ctc"] = "ctc"  # type: ignore[assignment]
    transition: Literal["none", "full"] = "full"
    # true, with band=null: equal neighbours are one token, as in CTC; false: two
    merge: Annotated[bool, Field(strict=True)] = False
    # most blanks before a token; null: any number
    band: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] | None = 1

    def __post_init__(self) -> None:
        if self.merge and self.band is not None:
            raise ValueError(f"head.merge=true takes any number of blanks: use head.band=null, not {self.band}")

    @property
    def topology(self) -> Topology:
        return Topology(self.merge, self.band)


class SlotHead(OnePassHead):
    """`ctc` and `parallel`: T slots, which see the context and each other in copies of the base's last layers.

    They are one body: `ctc` has a blank (a trained vector and bias), `parallel` has none. Slot t stands where its token
    would be read if nothing were blank, t + 1 positions behind the anchor; slot 0 begins as the root itself. Without
    layers to copy (`attended`) blocks take its place in which slots see each other alone.
    """

    scale: Tensor  # what is learnt of an input is as small as other weights, and states are not

    def __init__(self, config: ParallelConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        D, T = base.hidden_size, config.slots
        self.state_gain = nn.Parameter(torch.ones(T, 1))
        self.root_gain = nn.Parameter(torch.ones(T, 1))
        self.slot = nn.Parameter(torch.zeros(T, D))
        self.enter = nn.Linear(2 * D, D, bias=False)
        nn.init.zeros_(self.enter.weight)
        self.register_buffer("scale", torch.tensor(1.0 if attended is None else attended.scale))
        self.body = None if attended is None else LastLayers(base, attended)
        if self.body is None:
            heads = next(n for n in range(max(1, D // 64), 0, -1) if D % (2 * n) == 0)  # 64 wide, or what fits
            self.blocks = nn.ModuleList(Block(D, heads) for _ in range(config.layers))
            self.norm = nn.RMSNorm(D)
        with_blank = isinstance(config, CtcConfig)
        self.blank = nn.Linear(D, 1) if with_blank else None
        if self.blank is not None:
            nn.init.zeros_(self.blank.weight)
            nn.init.constant_(self.blank.bias, RARE_BLANK)
        if config.transition != "none":
            self.transition = Transition(D, config.rank, with_blank=with_blank)

    def fill(
        self, hidden_BLX: Tensor, root_BLD: Tensor, anchors: Anchors, cache: TreeCache | None = None, *tokens: Any
    ) -> Slots:
        x_NTD = self.states(hidden_BLX, root_BLD, anchors, cache)
        blank_NT = None if self.blank is None else self.blank(x_NTD).squeeze(-1)
        slot_NTR = None if self.transition is None else self.transition.from_slot(x_NTD)
        return Slots(x_NTD, blank_NT, slot_NTR)

    def states(
        self,
        hidden_BLX: Tensor,
        root_BLD: Tensor,
        anchors: Anchors,
        cache: TreeCache | None = None,
        shown: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[N, T, D]. shown: a vector for each slot beside its own [N, T, D], and an embedded token that stands there in
        the root's place [N, T, D]."""
        D = self.hidden_size
        hidden_ND = anchors.own(hidden_BLX[..., : 2 * D])
        root_ND = anchors.own(root_BLD)
        hidden_ND, entering_ND = hidden_ND[:, :D], hidden_ND[:, -D:]
        read_ND = self.enter(torch.cat([F.rms_norm(root_ND, (D,)), F.rms_norm(hidden_ND, (D,))], dim=-1))
        place_NTD, token_NTD = (self.slot, root_ND.unsqueeze(1)) if shown is None else (self.slot + shown[0], shown[1])
        own_NTD = self.state_gain * entering_ND.unsqueeze(1) + self.root_gain * token_NTD
        x_NTD = own_NTD + self.scale * (read_ND.unsqueeze(1) + place_NTD)
        if self.body is None:
            T = self.config.slots
            everywhere = AttentionMask(x_NTD.new_zeros(1, T), x_NTD.new_ones(1, 1, T, T, dtype=torch.bool))
            for block in self.blocks:
                x_NTD = block(x_NTD, everywhere)
            x_NTD = self.norm(x_NTD)
        else:  # each slot sees the positions up to its anchor, and all slots of that anchor
            read = self.keys_and_values(hidden_BLX, cache)
            B, _, S, _ = next(iter(read.values()))[0].shape
            A, T, device = anchors.most, self.config.slots, x_NTD.device
            position_BA, context_BAS = anchors.context(S)
            position_BQ = (position_BA.unsqueeze(2) + 1 + torch.arange(T, device=device)).view(B, A * T)
            anchor_Q = torch.arange(A, device=device).repeat_interleave(T)
            own_BQQ = (anchor_Q == anchor_Q.unsqueeze(1)).expand(B, -1, -1)
            seen_BQS = torch.cat([context_BAS.repeat_interleave(T, dim=1), own_BQQ], dim=2)
            rows_BQD = anchors.spread(x_NTD).view(B, A * T, D)
            context = PassingCache(read, places_BS=anchors.places_BS)
            rows_BQD = self.body(rows_BQD, AttentionMask(position_BQ, seen_BQS.unsqueeze(1)), context)
            x_NTD = anchors.gathered(rows_BQD.view(B, A, T, D))
        return x_NTD
