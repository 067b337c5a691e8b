"""What all heads are: `Head`, and `OnePassHead` for those that fill all slots in one forward.

At position t the base has produced hidden state h_t and the root x_{t+1}; a head fills T slots from which
a lattice over x_{t+2}, x_{t+3}, ... follows. Shape suffixes: B batch, L positions, N anchors, T slots, U labels,
V vocabulary, R rank, X draft tokens, or of states what `Base.hidden` gives, D hidden size of the base.
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, NamedTuple, Self

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ..base.cache import TreeCache
from ..base.context import Anchors, Attended, KeysAndValues
from ..base.llm import Base
from ..base.packed import pack
from ..draft.growth import NO_HINTS, Hints
from ..draft.tree import Tree
from ..lattice.candidates import Candidates, Lattice, Tables, candidates_of
from ..lattice.topology import ONE_TO_ONE, Topology
from .last_layers import LastLayers
from .transition import Slots, Transition
from .vocabulary import DraftVocabulary

# What a damaged config asks for would take hours to build:
Size = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
Layers = Annotated[int, Field(strict=True, ge=1, le=256)]
CHECKED = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class HeadConfig:
    """What each kind has. slots: T. draft_vocab_size: see `DraftVocabulary`. Raises ValueError on sizes that do not
    fit."""

    kind: str
    slots: Size = 12  # tokens per draft
    # tokens it can draft: the most frequent of its training answers; null: all
    draft_vocab_size: Size | None = 16384

    @property
    def topology(self) -> Topology:
        """Which alignments of its slots count."""
        return ONE_TO_ONE


class Vocabulary(NamedTuple):
    """What turns slots into candidates: the draft tokens, how many of them each slot may put forward, tables of the
    transition."""

    tokens: DraftVocabulary
    top_k: int
    tables: Tables | None


class Head(nn.Module, ABC):
    """What drafts.

    transition: None where slots do not depend on what was collapsed before.
    attended: layers of the base whose keys and values slots see, or None: of whole sequences they come behind
    each hidden state (`Base.hidden`), of cached ones from the base's cache.
    """

    reads_labels: ClassVar[bool] = False  # is it trained along the labels?
    draft_ids_X: Tensor

    def __init__(self, config: HeadConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = base.hidden_size
        self.topology = config.topology
        self.attended = attended
        self.transition: Transition | None = None
        some = config.draft_vocab_size is not None
        self.register_buffer("draft_ids_X", torch.arange(config.draft_vocab_size or 0), persistent=some)

    @abstractmethod
    def forward(self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, label_NUD: Tensor | None = None) -> Slots:
        """Slots of the anchors; root_BLD embeds the token after each position, label_NUD the labels, for a head that is
        trained along them: zeros where there is none."""

    @abstractmethod
    def drafts(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        anchors: Anchors,
        vocabulary: Vocabulary,
        cache: TreeCache | None = None,
        hints: Hints = NO_HINTS,
        own: TreeCache | None = None,
    ) -> list[Lattice | Tree]:
        """Of each anchor a Lattice to search, or from a head that scores nodes by itself a Tree of all of them, to
        choose from. root_BL: the tokens after each position.

        Rows are whole sequences; with the base's cache, in which they are committed already, its newest positions, and
        the anchor of each is the last that is no padding. own: what `new_cache` gave, which then holds them too.
        """

    def embedded(self, tokens: DraftVocabulary, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What it reads of tokens of the base, [..., F]: as the base's first layer gets them."""
        return tokens.base.embed(ids).to(dtype)

    def new_cache(self, batch: int, capacity: int) -> TreeCache | None:
        """Room for `capacity` positions of each of `batch` sequences. None: it drafts from the base's cache alone."""
        return None

    def keys_and_values(self, hidden_BLX: Tensor, cache: TreeCache | None = None) -> KeysAndValues:
        """Of the attended layers: of whole sequences from behind the hidden states, else from the base's cache."""
        if self.attended is None:
            return {}
        if cache is None:
            return self.attended.keys_and_values(hidden_BLX)
        return {layer: cache.committed(layer) for layer in self.attended.layers}

    def for_drafting(self, base: Base, dtype: torch.dtype = torch.float32) -> Self:
        """In eval mode, without a gradient, on the base's device, in that dtype or the base's, whichever is wider.
        Copied layers: in the precision of the base's own."""
        self.to(base.device, torch.promote_types(dtype, base.dtype)).eval().requires_grad_(False)
        for part in self.children():
            if isinstance(part, LastLayers):
                pack(part.to(base.dtype))
        return self

    def warm_start(self, base: Base) -> None:
        """What a new head takes over from its base where that needs to know the draft tokens."""

    def draft_vocabulary(self, base: Base) -> DraftVocabulary:
        """The tokens that it can draft, of its base's."""
        return DraftVocabulary(base, None if self.config.draft_vocab_size is None else self.draft_ids_X)

    def vocabulary(self, base: Base, top_k: int) -> Vocabulary:
        """What drafting needs, anew when the weights change."""
        tokens = self.draft_vocabulary(base)
        return Vocabulary(tokens, top_k, None if self.transition is None else self.transition.tables(tokens))


class OnePassHead(Head):
    """A draft is one forward, in fixed shapes: `fill` turns a position into T slots."""

    @abstractmethod
    def fill(
        self,
        hidden_BLD: Tensor,
        root_BLD: Tensor,
        anchors: Anchors,
        cache: TreeCache | None = None,
        tokens: DraftVocabulary | None = None,
    ) -> Slots:
        """The T slots of each anchor within whole sequences, or on top of what the base's cache holds; tokens: for a
        head that looks at its own slots' tokens on the way."""

    def forward(self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, label_NUD: Tensor | None = None) -> Slots:
        return self.fill(hidden_BLD, root_BLD, anchors)

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        anchors: Anchors,
        vocabulary: Vocabulary,
        cache: TreeCache | None = None,
        hints: Hints = NO_HINTS,
        own: TreeCache | None = None,
    ) -> list[Lattice | Tree]:
        root_BLD = self.embedded(vocabulary.tokens, root_BL, hidden_BLD.dtype)
        slots = self.fill(hidden_BLD, root_BLD, anchors, cache, vocabulary.tokens)
        return [*self.candidates(slots, anchors.own(root_BL), vocabulary, hints.noise_NTV).lattices()]

    @torch.no_grad()
    def candidates(
        self, slots: Slots, root_N: Tensor, vocabulary: Vocabulary, noise_NTV: Tensor | None = None
    ) -> Candidates:
        """What each anchor's slots put forward of the vocabulary; root_N: the token before its first slot."""
        tokens, top_k, tables = vocabulary
        logits_NTX = tokens.logits(slots.states_NTD)
        moved = None
        if slots.slot_NTR is not None and tables is not None:
            moved = slots.slot_NTR, tokens.numbered(root_N), tables
        noise_NTX = None if noise_NTV is None else noise_NTV[:, :, tokens.ids]
        return candidates_of(
            logits_NTX, slots.blank_NT, top_k, self.topology, ids=tokens.host_ids, moved=moved, noise_NTV=noise_NTX
        )
