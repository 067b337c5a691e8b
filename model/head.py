"""The draft heads: `ctc`, and its controls `parallel` and `medusa` (here) and `eagle` (eagle.py), behind one interface.

At position t the base has produced hidden state h_t and the root x_{t+1}; a head fills T slots from which
a lattice over x_{t+2}, x_{t+3}, ... follows. Shape suffixes: B batch, L positions, N anchors, T slots,
D hidden size of the base, S positions with keys and values, Q slots of all anchors of a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ctcdraft.model.base import Base
from ctcdraft.model.budget import Calibration
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.last_layers import LastLayers, layers_to_copy
from ctcdraft.model.lattice import Candidates, Lattice, candidates_of
from ctcdraft.model.layers import Anchors, Attended, Block, KeysAndValues, Sight
from ctcdraft.model.packed import pack
from ctcdraft.model.prompt_lookup import CopyRates
from ctcdraft.model.topology import DIAGONAL, Topology
from ctcdraft.model.transition import Tables, Transition
from ctcdraft.model.tree import Tree
from ctcdraft.model.vocabulary import DraftVocabulary

RARE_BLANK = -2.0  # log-odds that the blank begins with
# What is computed once for the whole vocabulary:
TABLED = ("transition.to_state", "transition.from_context")
# What a damaged config asks for would take hours to build:
Size = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
Layers = Annotated[int, Field(strict=True, ge=1, le=256)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HeadConfig:
    """kind, slots T. layers: of the base's last ones, copied, as the body of `ctc` and `parallel` (last_layers.py;
    where the base's class cannot run them alone, as many blocks in which slots see each other); of medusa residual
    blocks.
    transition: `full`: what a slot emits depends on the token that was collapsed last, by a product of that `rank`
    (transition.py); or `none`. merge, band: of `ctc`, see `Topology`. width, heads, beam: of eagle's layer and tree.
    draft_vocab_size: how many tokens it can draft, see `DraftVocabulary`; None: all of the base's.
    Raises ValueError on an unknown kind or sizes that do not fit.
    """

    kind: Literal["ctc", "parallel", "medusa", "eagle"] = "ctc"
    slots: Size = 7
    layers: Layers = 2
    merge: Annotated[bool, Field(strict=True)] = True
    band: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] | None = None
    transition: Literal["none", "full"] = "none"
    rank: Size = 128
    width: Size = 128
    heads: Size = 4
    beam: Size = 8
    draft_vocab_size: Size | None = None

    def __post_init__(self) -> None:
        if self.kind in ("medusa", "eagle") and self.transition != "none":
            raise ValueError(f"head={self.kind} has no transition: leave head.transition at none")
        if self.kind != "ctc" and (not self.merge or self.band is not None):
            raise ValueError(f"head={self.kind} has no blank: leave out head.merge and head.band")
        if self.merge and self.band is not None:
            raise ValueError(f"head.merge=true takes any number of blanks: use head.band=null, not {self.band}")
        if self.width % (2 * self.heads):
            raise ValueError(f"head.width={self.width} is no even multiple of head.heads={self.heads}")


class Slots(NamedTuple):
    """states [N, T, D], to be multiplied with the base's LM head; the blank's log-odds against all tokens together
    [N, T], or None; A x_t [N, T, R] of a transition, or None."""

    states_NTD: Tensor
    blank_NT: Tensor | None
    slot_NTR: Tensor | None = None


class Vocabulary(NamedTuple):
    """What turns slots into candidates: the draft tokens, how many of them each slot may put forward, tables of the
    transition."""

    tokens: DraftVocabulary
    top_k: int
    tables: Tables | None

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """As the base's first layer gets them, [..., D]."""
        return self.tokens.base.embed(ids).to(dtype)


class Head(nn.Module):
    """What drafts. Subclasses: `fill` turns a position into T slots.

    one_pass: a draft is one forward, in fixed shapes.
    transition: None where slots do not depend on what was collapsed before.
    attended: layers of the base whose keys and values slots see, or None: of whole sequences they come behind
    each hidden state (`Base.hidden`), of cached ones from the base's cache (`TreeCache.of_base`).
    calibration, copy_rates: what its psi, and copied tokens, were seen to be worth on held-out text, if that was
    measured.
    """

    one_pass = True
    calibration: Calibration | None = None
    copy_rates: CopyRates | None = None
    attended: Attended | None = None
    draft_ids_X: Tensor

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.config, self.hidden_size = config, hidden_size
        self.topology = Topology(config.merge, config.band) if config.kind == "ctc" else DIAGONAL
        self.transition: Transition | None = None
        some = config.draft_vocab_size is not None
        self.register_buffer("draft_ids_X", torch.arange(config.draft_vocab_size or 0), persistent=some)

    def draft_vocabulary(self, base: Base) -> DraftVocabulary:
        """The tokens that it can draft, of its base's."""
        return DraftVocabulary(base, None if self.config.draft_vocab_size is None else self.draft_ids_X)

    def forward(
        self,
        hidden_BLD: Tensor,
        root_BLD: Tensor,
        batch_N: Tensor,
        position_N: Tensor,
        sight: Sight | None = None,
        label_NUD: Tensor | None = None,
    ) -> Slots:
        """Slots of the anchors (batch_N, position_N); root_BLD embeds the token after each position.

        sight: where rows hold several documents, which positions belong together; None: rows are one each.
        label_NUD embeds the labels, for a head that is trained along them.
        """
        sight = sight or Sight(torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device).unsqueeze(0))
        return self.fill(hidden_BLD, root_BLD, Anchors.of(batch_N, position_N, len(hidden_BLD)), sight)

    @torch.no_grad()
    def step(self, hidden_BLD: Tensor, root_BLD: Tensor, counts: Sequence[int], cache: TreeCache) -> Slots:
        """Append counts[b] <= L committed positions of each sequence to the cache, draft from the last of each: N = B.

        Rows past counts[b] are padding.
        """
        last = Anchors.one_per_row(torch.tensor(counts, device=hidden_BLD.device) - 1)
        sight = cache.sight(hidden_BLD.shape[1], hidden_BLD.device)
        cache.keep([range(count) for count in counts])
        return self.fill(hidden_BLD, root_BLD, last, sight, cache)

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        counts: Sequence[int],
        cache: TreeCache,
        vocabulary: Vocabulary,
    ) -> list[Lattice | Tree]:
        """`step`, and what each sequence's slots make of the vocabulary; root_BL: the tokens after each position.

        A Lattice to search, or from a head that scores nodes by itself a Tree of all of them, to choose from.
        """
        slots = self.step(hidden_BLD, vocabulary.embed(root_BL, hidden_BLD.dtype), counts, cache)
        root_N = torch.stack([root_L[count - 1] for root_L, count in zip(root_BL, counts, strict=True)])
        return [*candidates(slots, root_N, self, vocabulary).lattices()]

    @torch.no_grad()
    def drafts_at(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        batch_N: Tensor,
        position_N: Tensor,
        sight: Sight | None,
        vocabulary: Vocabulary,
    ) -> list[Lattice | Tree]:
        """The same at anchors within whole sequences."""
        slots = self(hidden_BLD, vocabulary.embed(root_BL, hidden_BLD.dtype), batch_N, position_N, sight)
        return [*candidates(slots, root_BL[batch_N, position_N], self, vocabulary).lattices()]

    def new_cache(self, batch: int, capacity: int, of_base: TreeCache | None = None) -> TreeCache:
        """Room for `capacity` positions of each of `batch` sequences, padding of the last `step` included; of_base: the
        base's cache, which holds what a `step` commits before it."""
        return TreeCache(0, batch, capacity, of_base)

    def fill(
        self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, sight: Sight, cache: TreeCache | None = None
    ) -> Slots:
        """The T slots of each anchor within whole sequences, or on top of what the cache holds."""
        raise NotImplementedError

    def for_drafting(self, base: Base, dtype: torch.dtype = torch.float32) -> Self:
        """In eval mode, without a gradient, on the base's device, in that dtype or the base's, whichever is wider."""
        return self.to(base.device, torch.promote_types(dtype, base.dtype)).eval().requires_grad_(False)

    def vocabulary(self, base: Base, top_k: int) -> Vocabulary:
        """What drafting needs, anew when the weights change."""
        tokens = self.draft_vocabulary(base)
        return Vocabulary(tokens, top_k, None if self.transition is None else self.transition.tables(tokens))


class SlotHead(Head):
    """`ctc` and `parallel`: T slots, which see the context and each other in copies of the base's last layers.

    They are one body: `ctc` has a blank (a trained vector and bias), `parallel` has none. Slot t stands where its token
    would be read if nothing were blank, t + 1 positions behind the anchor; slot 0 begins as the root itself. Without
    `body` blocks take its place in which slots see each other alone.
    """

    scale: Tensor  # what is learnt of an input is as small as other weights, and states are not

    def __init__(self, config: HeadConfig, hidden_size: int, body: LastLayers | None = None) -> None:
        super().__init__(config, hidden_size)
        D, T = hidden_size, config.slots
        self.state_gain = nn.Parameter(torch.ones(T, 1))
        self.root_gain = nn.Parameter(torch.ones(T, 1))
        self.slot = nn.Parameter(torch.zeros(T, D))
        self.enter = nn.Linear(2 * D, D, bias=False)
        nn.init.zeros_(self.enter.weight)
        self.register_buffer("scale", torch.tensor(1.0 if body is None else body.attended.scale))
        self.body = body
        if body is None:
            self.blocks = nn.ModuleList(Block(D, _heads_of(D)) for _ in range(config.layers))
            self.norm = nn.RMSNorm(D)
        else:
            self.attended = body.attended
        self.blank = nn.Linear(D, 1) if config.kind == "ctc" else None
        if self.blank is not None:
            nn.init.zeros_(self.blank.weight)
            nn.init.constant_(self.blank.bias, RARE_BLANK)
        if config.transition != "none":
            self.transition = Transition(D, D, config.rank, with_blank=config.kind == "ctc")

    def for_drafting(self, base: Base, dtype: torch.dtype = torch.float32) -> Self:
        """The same, copied layers in the precision of the base's own."""
        super().for_drafting(base, dtype)
        if self.body is not None:
            pack(self.body.to(base.dtype))
        return self

    def fill(
        self, hidden_BLX: Tensor, root_BLD: Tensor, anchors: Anchors, sight: Sight, cache: TreeCache | None = None
    ) -> Slots:
        D = self.hidden_size
        hidden_ND, root_ND = anchors.own(hidden_BLX[..., : 2 * D]), anchors.own(root_BLD)
        hidden_ND, entering_ND = hidden_ND[:, :D], hidden_ND[:, -D:]
        read_ND = self.enter(torch.cat([F.rms_norm(root_ND, (D,)), F.rms_norm(hidden_ND, (D,))], dim=-1))
        own_NTD = self.state_gain * entering_ND.unsqueeze(1) + self.root_gain * root_ND.unsqueeze(1)
        x_NTD = own_NTD + self.scale * (read_ND.unsqueeze(1) + self.slot)
        if self.body is None:
            T = self.config.slots
            everywhere = Sight(x_NTD.new_zeros(1, T), x_NTD.new_ones(1, 1, T, T, dtype=torch.bool))
            for block in self.blocks:
                x_NTD = block(x_NTD, everywhere)
            x_NTD = self.norm(x_NTD)
        elif cache is None:
            x_NTD = self._through_layers(x_NTD, self.body.attended.keys_and_values(hidden_BLX), anchors, sight)
        else:
            assert cache.of_base is not None
            read = {layer: cache.of_base.committed(layer) for layer in self.body.attended.layers}
            x_NTD = self._through_layers(x_NTD, read, anchors, sight)
        blank_NT = None if self.blank is None else self.blank(x_NTD).squeeze(-1)
        slot_NTR = None if self.transition is None else self.transition.from_slot(x_NTD)
        return Slots(x_NTD, blank_NT, slot_NTR)

    def _through_layers(self, x_NTD: Tensor, read: KeysAndValues, anchors: Anchors, sight: Sight) -> Tensor:
        """Slots after the copied layers: each sees the positions up to its anchor, and all slots of that anchor."""
        assert self.body is not None
        B, _, S, _ = next(iter(read.values()))[0].shape
        A, (_, T, D) = anchors.most, x_NTD.shape
        position_BA, context_BAS = sight.of_anchors(anchors, S)
        position_BQ = (position_BA.unsqueeze(2) + 1 + torch.arange(T, device=x_NTD.device)).view(B, A * T)
        anchor_Q = torch.arange(A, device=x_NTD.device).repeat_interleave(T)
        own_BQQ = (anchor_Q == anchor_Q.unsqueeze(1)).expand(B, -1, -1)
        seen_BQS = torch.cat([context_BAS.repeat_interleave(T, dim=1), own_BQQ], dim=2)
        rows_BQD = anchors.spread(x_NTD).view(B, A * T, D)
        rows_BQD = self.body(rows_BQD, Sight(position_BQ, seen_BQS.unsqueeze(1)), read)
        return anchors.gathered(rows_BQD.view(B, A, T, D))


def _heads_of(width: int) -> int:
    """Attention heads of a block of that width: of 64 numbers each, or the next number of them that fits."""
    return next(heads for heads in range(max(1, width // 64), 0, -1) if width % (2 * heads) == 0)


class MedusaHead(Head):
    """T independent stacks of `layers` residual blocks on h_t: no root, no context (Cai et al. 2024, section 2.1.1)."""

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.weight = nn.Parameter(torch.zeros(config.layers, config.slots, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.layers, config.slots, 1, hidden_size))

    def fill(
        self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, sight: Sight, cache: TreeCache | None = None
    ) -> Slots:
        rows_TND = anchors.own(hidden_BLD).expand(self.config.slots, -1, -1)
        for weight_TDD, bias_T1D in zip(self.weight, self.bias, strict=True):
            rows_TND = rows_TND + F.silu(torch.baddbmm(bias_T1D, rows_TND, weight_TDD))
        return Slots(rows_TND.transpose(0, 1), None)


def build_head(config: HeadConfig, hidden_size: int, body: LastLayers | None = None) -> Head:
    """A freshly initialised head on a base of that hidden size; body: of `ctc` and `parallel` (`head_on`)."""
    from ctcdraft.model.eagle import EagleHead  # which is built on this module

    if config.kind in ("medusa", "eagle"):
        return (MedusaHead if config.kind == "medusa" else EagleHead)(config, hidden_size)
    return SlotHead(config, hidden_size, body)


def head_on(base: Base, config: HeadConfig) -> Head:
    """A freshly initialised head for that base, of a draft vocabulary no larger than the base's. Raises ValueError
    where the base has fewer layers."""
    attended = attended_on(base, config)
    drafted = config.draft_vocab_size
    drafted = None if drafted is None or drafted >= base.vocab_size else drafted
    body = None if attended is None else LastLayers(base, attended)
    return build_head(replace(config, draft_vocab_size=drafted), base.hidden_size, body)


def attended_on(base: Base, config: HeadConfig) -> Attended | None:
    """The layers of the base that a head of that config copies, if any. Raises ValueError as `head_on` does."""
    return layers_to_copy(base, config.layers) if config.kind in ("ctc", "parallel") else None


def parameters_of(module: nn.Module) -> int:
    """How many parameters a head, or what trains it, has."""
    return sum(p.numel() for p in module.parameters())


def flops_per_draft(head: Head, base: Base) -> tuple[int, int]:
    """(body, LM head) multiply-adds of one draft, the attention over the context and a transition's products left
    out."""
    config, body = head.config, 0
    rows = config.slots if head.one_pass else 1 + (config.slots - 1) * config.beam  # of the LM head
    once = ("enter", "weight") if head.one_pass else ()
    for name, p in head.named_parameters():
        if p.dim() >= 2 and name.endswith("weight") and not name.startswith(TABLED):
            body += p.numel() * (1 if name.startswith(once) else rows)
    return body, rows * (config.draft_vocab_size or base.vocab_size) * base.hidden_size


@torch.no_grad()
def candidates(slots: Slots, root_N: Tensor, head: Head, vocabulary: Vocabulary) -> Candidates:
    """What each anchor's slots put forward of the vocabulary; root_N: the token before its first slot."""
    tokens, top_k, tables = vocabulary
    logits_NTX = tokens.logits(slots.states_NTD)
    moved = None
    if slots.slot_NTR is not None and tables is not None:
        moved = slots.slot_NTR, tokens.numbered(root_N), tables
    return candidates_of(logits_NTX, slots.blank_NT, top_k, head.topology, tokens.host_ids, moved)
