"""The draft heads: `ctc`, and its controls `parallel` and `medusa` (here) and `eagle` (eagle.py), behind one interface.

At position t the base has produced hidden state h_t and the root x_{t+1}; a head fills T slots from which
a lattice over x_{t+2}, x_{t+3}, ... follows. Shape suffixes: B batch, L positions, N anchors, T slots,
D hidden size of the base, W width of the context encoder.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.model.base import Base
from ctcdraft.model.budget import Calibration
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.lattice import Candidates, Lattice, candidates_of
from ctcdraft.model.layers import Anchors, Attended, BaseAttention, Block, Memory, Sight
from ctcdraft.model.prompt_lookup import CopyRates
from ctcdraft.model.topology import DIAGONAL, Topology
from ctcdraft.model.transition import Tables, Transition
from ctcdraft.model.tree import Tree
from ctcdraft.model.vocabulary import DraftVocabulary

KINDS = ("ctc", "parallel", "medusa", "eagle")
TRANSITIONS = ("none", "full")
MOST_LAYERS, MOST_WIDE = 256, 1 << 16  # what a damaged config asks for would take hours to build
# What is computed once for the whole vocabulary:
TABLED = ("transition.to_state", "transition.from_context")


@dataclass(frozen=True)
class HeadConfig:
    """kind, slots T; width, heads, layers of the context encoder; the same for the mixer among slots.

    transition: `full`: what a slot emits depends on the token that was collapsed last, by a product of that `rank`
    (transition.py); or `none`. base_layers: slots attend
    to the keys and values that so many layers of the base, evenly spread, have of these; None: one, where the base
    allows it (`head_on`). slots_per_query: so many neighbours share what one of them finds. merge, band: of `ctc`, see
    `Topology`. beam: of eagle's tree. draft_vocab_size: how many tokens it can draft, see `DraftVocabulary`; None: all
    of the base's.
    Raises ValueError on an unknown kind or sizes that do not fit.
    """

    kind: str = "ctc"
    slots: int = 9
    width: int = 128
    heads: int = 4
    layers: int = 1
    mixer_width: int = 128
    mixer_heads: int = 4
    mixer_layers: int = 1
    merge: bool = True
    band: int | None = None
    transition: str = "none"
    rank: int = 128
    base_layers: int | None = 0
    slots_per_query: int = 1
    beam: int = 8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"head.kind={self.kind!r} is unknown: choose one of {KINDS}")
        if self.transition not in TRANSITIONS:
            raise ValueError(f"head.transition={self.transition!r} is unknown: choose one of {TRANSITIONS}")
        bare = self.kind in ("medusa", "eagle")
        if bare and self.transition != "none":
            raise ValueError(f"head={self.kind} has no transition: leave head.transition at none")
        if not isinstance(self.merge, bool):
            raise ValueError(f"head.merge must be true or false, not {type(self.merge).__name__}")
        if self.kind != "ctc" and (not self.merge or self.band is not None):
            raise ValueError(f"head={self.kind} has no blank: leave out head.merge and head.band")
        if self.merge and self.band is not None:
            raise ValueError(f"head.merge=true takes any number of blanks: use head.band=null, not {self.band}")
        if bare and self.base_layers != 0:
            raise ValueError(f"head={self.kind} has no slots that could look back: leave head.base_layers at 0")
        for name, value in asdict(self).items():
            absent = name in ("band", "base_layers", "draft_vocab_size") and value is None
            if absent or name in ("kind", "transition", "merge"):
                continue
            if type(value) is not int:
                raise ValueError(f"head.{name} must be a whole number, not {type(value).__name__}")
            most = MOST_LAYERS if name.endswith("layers") else MOST_WIDE
            if value > most:
                raise ValueError(f"head.{name} must be at most {most}")
            least = 0 if name in ("band", "base_layers") else 1
            if value < least:
                raise ValueError(f"head.{name}={value} must be at least {least}")
        for width, heads in ((self.width, self.heads), (self.mixer_width, self.mixer_heads)):
            if width % (2 * heads):
                raise ValueError(f"a width of {width} is no even multiple of its {heads} attention heads")


class Slots(NamedTuple):
    """states [N, T, D], to be multiplied with the base's LM head; blank logits [N, T], or None; A x_t [N, T, R] of a
    transition, or None."""

    states_NTD: Tensor
    blank_NT: Tensor | None
    slot_NTR: Tensor | None = None


class Context(NamedTuple):
    """Encoded positions [B, L, W]; what slots may look at of what layers of the base made of them and of the cached
    ones."""

    states_BLW: Tensor
    of_base: Sequence[Memory] = ()


class Vocabulary(NamedTuple):
    """What turns slots into candidates: the draft tokens, how many of them each slot may put forward, tables of the
    transition."""

    tokens: DraftVocabulary
    top_k: int
    tables: Tables | None

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """As the base's first layer gets them, [..., D]."""
        return self.tokens.base.embed(ids).to(dtype)


class Head(nn.Module, ABC):
    """What drafts. Subclasses: `encode` sees positions, `fill` turns a position into T slots.

    one_pass: a draft is one forward, in fixed shapes.
    transition: None where slots do not depend on what was collapsed before.
    attended: layers of the base whose keys and values slots attend to, or None: of whole sequences they come behind
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

    @property
    def attended_layers(self) -> tuple[int, ...]:
        """Of the base: what `Base.hidden` is asked for."""
        return () if self.attended is None else self.attended.layers

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
        sight = sight or Sight.one_document(hidden_BLD)
        return self.fill(self.encode(hidden_BLD, root_BLD, sight), Anchors.of(batch_N, position_N), sight)

    @torch.no_grad()
    def step(self, hidden_BLD: Tensor, root_BLD: Tensor, counts: Sequence[int], cache: TreeCache) -> Slots:
        """Append counts[b] <= L committed positions of each sequence to the cache, draft from the last of each: N = B.

        Rows past counts[b] are padding.
        """
        return self._step(hidden_BLD, root_BLD, Anchors.last_of(counts, hidden_BLD), counts, cache)

    def _step(
        self, hidden_BLD: Tensor, root_BLD: Tensor, last: Anchors, counts: Sequence[int], cache: TreeCache
    ) -> Slots:
        sight = cache.sight(hidden_BLD.shape[1], hidden_BLD.device)
        context = self.encode(hidden_BLD, root_BLD, sight, cache)
        cache.keep([range(count) for count in counts])
        return self.fill(context, last, sight)

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
        last = Anchors.last_of(counts, hidden_BLD)
        slots = self._step(hidden_BLD, vocabulary.embed(root_BL, hidden_BLD.dtype), last, counts, cache)
        return [*candidates(slots, last.own(root_BL), self, vocabulary).lattices()]

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
        base's cache, which holds what a `step` commits before it. A head that does not attend to it needs none."""
        return TreeCache(0, batch, capacity)

    @abstractmethod
    def encode(self, hidden_BLD: Tensor, root_BLD: Tensor, sight: Sight, cache: TreeCache | None = None) -> Context:
        """Every position, on top of what the cache holds."""

    @abstractmethod
    def fill(self, context: Context, anchors: Anchors, sight: Sight) -> Slots:
        """The T slots of each anchor."""

    def vocabulary(self, base: Base, top_k: int) -> Vocabulary:
        """What drafting needs, anew when the weights change."""
        tokens = self.draft_vocabulary(base)
        return Vocabulary(tokens, top_k, None if self.transition is None else self.transition.tables(tokens))


class SlotHead(Head):
    """`ctc` and `parallel`: causal context encoder, T slot states, bidirectional mixer, frozen LM head.

    They are one body: `ctc` has a blank (a trained vector and bias), `parallel` has none.
    """

    def __init__(self, config: HeadConfig, hidden_size: int, attended: Attended | None = None) -> None:
        super().__init__(config, hidden_size)
        W, M, T = config.width, config.mixer_width, config.slots
        self.enter = nn.Linear(2 * hidden_size, W, bias=False)
        self.context = nn.ModuleList(Block(W, config.heads) for _ in range(config.layers))
        self.context_norm = nn.RMSNorm(W)
        self.to_slot = nn.Linear(W, M, bias=False)
        self.slot = nn.Parameter(torch.randn(T, M) * 0.5)
        self.mixer = nn.ModuleList(Block(M, config.mixer_heads) for _ in range(config.mixer_layers))
        self.norm = nn.RMSNorm(M)
        self.leave = nn.Linear(M, hidden_size, bias=False)
        self.blank = nn.Linear(M, 1) if config.kind == "ctc" else None
        self.attended = attended
        self.of_base = None if attended is None else BaseAttention(M, attended, T, config.slots_per_query)
        if config.transition != "none":
            self.transition = Transition(M, hidden_size, config.rank, with_blank=config.kind == "ctc")

    def new_cache(self, batch: int, capacity: int, of_base: TreeCache | None = None) -> TreeCache:
        return TreeCache(self.config.layers, batch, capacity, of_base)

    def encode(self, hidden_BLD: Tensor, root_BLD: Tensor, sight: Sight, cache: TreeCache | None = None) -> Context:
        hidden_BLD, of_base = self._apart(hidden_BLD, cache)
        x = self.enter(torch.cat([root_BLD, hidden_BLD], dim=-1))
        for layer, block in enumerate(self.context):
            x = block(x, sight, cache, layer)
        return Context(self.context_norm(x), of_base)

    def _apart(self, states_BLX: Tensor, cache: TreeCache | None) -> tuple[Tensor, Sequence[Memory]]:
        """Hidden states, and the keys and values of the layers that slots attend to."""
        if self.attended is None:
            return states_BLX, ()
        if cache is None:
            return self.attended.apart(states_BLX, self.hidden_size)
        assert cache.of_base is not None
        kept = [cache.of_base.committed(layer) for layer in self.attended.layers]
        return states_BLX, [Memory(k.to(states_BLX.dtype), v.to(states_BLX.dtype)) for k, v in kept]

    def fill(self, context: Context, anchors: Anchors, sight: Sight) -> Slots:
        x = self.to_slot(anchors.own(context.states_BLW)).unsqueeze(1) + self.slot
        if self.of_base is not None:
            x = x + self.of_base(x, context.of_base, anchors, sight)
        for block in self.mixer:
            x = block(x)
        x = self.norm(x)
        blank_NT = None if self.blank is None else self.blank(x).squeeze(-1)
        slot_NTR = None if self.transition is None else self.transition.from_slot(x)
        return Slots(self.leave(x), blank_NT, slot_NTR)


class MedusaHead(Head):
    """T independent stacks of `layers` residual blocks on h_t: no root, no context (Cai et al. 2024, section 2.1.1)."""

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.weight = nn.Parameter(torch.zeros(config.layers, config.slots, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.layers, config.slots, 1, hidden_size))

    def encode(self, hidden_BLD: Tensor, root_BLD: Tensor, sight: Sight, cache: TreeCache | None = None) -> Context:
        return Context(hidden_BLD)

    def fill(self, context: Context, anchors: Anchors, sight: Sight) -> Slots:
        rows_TND = anchors.own(context.states_BLW).expand(self.config.slots, -1, -1)
        for weight_TDD, bias_T1D in zip(self.weight, self.bias, strict=True):
            rows_TND = rows_TND + F.silu(torch.baddbmm(bias_T1D, rows_TND, weight_TDD))
        return Slots(rows_TND.transpose(0, 1), None)


def build_head(config: HeadConfig, hidden_size: int, attended: Attended | None = None) -> Head:
    """A freshly initialised head on a base of that hidden size; attended: what config.base_layers are (`head_on`)."""
    from ctcdraft.model.eagle import EagleHead  # which is built on this module

    if bool(config.base_layers) != (attended is not None):
        raise ValueError(f"head.base_layers={config.base_layers}: which layers of the base these are is not known")
    if config.kind in ("medusa", "eagle"):
        return (MedusaHead if config.kind == "medusa" else EagleHead)(config, hidden_size)
    return SlotHead(config, hidden_size, attended)


def head_on(base: Base, config: HeadConfig) -> Head:
    """A freshly initialised head for that base; of base_layers=None it makes the number that the base allows, of
    a draft vocabulary no smaller than the base's all of it. Raises ValueError where it has no such layers."""
    attended = attended_on(base, config)
    layers = 0 if attended is None else len(attended.layers)
    drafted = config.draft_vocab_size
    drafted = None if drafted is None or drafted >= base.vocab_size else drafted
    return build_head(replace(config, base_layers=layers, draft_vocab_size=drafted), base.hidden_size, attended)


def attended_on(base: Base, config: HeadConfig) -> Attended | None:
    """The layers whose keys and values a head of that config attends to. Raises ValueError as `head_on` does."""
    return base.attended(int(base.can_be_attended) if config.base_layers is None else config.base_layers)


def parameters_of(module: nn.Module) -> int:
    """How many parameters a head, or what trains it, has."""
    return sum(p.numel() for p in module.parameters())


def flops_per_draft(head: Head, base: Base) -> tuple[int, int]:
    """(body, LM head) multiply-adds of one draft, the attention over the context and a transition's products left
    out."""
    config, body = head.config, 0
    rows = config.slots if head.one_pass else 1 + (config.slots - 1) * config.beam  # of the LM head
    once = ("enter", "context", "to_slot", "weight") if head.one_pass else ()
    for name, p in head.named_parameters():
        if p.dim() >= 2 and name.endswith("weight") and not name.startswith(TABLED):
            body += p.numel() * (1 if name.startswith(once) else rows)
    return body, rows * (config.draft_vocab_size or base.vocab_size) * base.hidden_size


@torch.no_grad()
def candidates(slots: Slots, root_N: Tensor, head: Head, vocabulary: Vocabulary) -> Candidates:
    """What each anchor's slots put forward of the vocabulary; root_N: the token before its first slot."""
    tokens, top_k, tables = vocabulary
    N, T, D = slots.states_NTD.shape
    states_MD = slots.states_NTD.reshape(N * T, D).to(tokens.lm_weight.dtype)
    logits_NTX = (states_MD @ tokens.lm_weight.T).view(N, T, -1)
    moved = None
    if slots.slot_NTR is not None and tables is not None:
        moved = slots.slot_NTR, tokens.numbered(root_N), tables
    return candidates_of(logits_NTX, slots.blank_NT, top_k, head.topology, tokens.host_ids, moved)
