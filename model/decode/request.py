"""What is asked of the decoder and what comes back: requests on their way, and generations.

Shape suffixes: L positions, D hidden size, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..base.llm import Base
from ..base.sampling import Sampling
from ..draft.drafter import Frontier
from ..draft.grafts import Phrases
from ..draft.tree import Tree
from .text import TextStream

Prompt = str | Sequence[int]


class Settings(TypedDict, total=False):
    """temperature (0: greedy), top_k (0: all), top_p, repetition_penalty: as in transformers, see Sampling.

    seed: of the noise; one number for all requests, which then share their noise, or one for each (for several samples
    of one prompt). stop: strings that end the text. eos: tokens that end a request instead of the base's own.
    keep_trees: the generation keeps every draft.
    """

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int | Sequence[int]
    stop: Sequence[str]
    eos: Sequence[int] | None
    keep_trees: bool


@dataclass
class Generation:
    """New tokens (end of sequence included), their text, and how they came about.

    finish: `eos`, `stop` (a stop string: tokens hold it, text ends before it), `length` or `context`. drafted says of
    each token whether it was an accepted draft. nodes, accepted and expected hold, per step, how many tokens the draft
    had, how many of them were accepted, and the sum of psi that foretold these; accepted_from counts who proposed them:
    `head`, `lookup` or `both`. seconds splits the time of the whole batch into verify, draft, tree and other.
    trees: each step's draft and its accepted nodes, where they were asked for.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    drafted: list[bool] = field(default_factory=list)
    steps: int = 0
    nodes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_from: Counter[str] = field(default_factory=Counter)
    expected: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    trees: list[tuple[Tree, list[int]]] | None = None

    @property
    def tokens_per_step(self) -> float:
        """Growth per base forward after the prompt's, which gives the first token; plain decoding = 1."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


@dataclass(frozen=True)
class Chunk:
    """What one step added: tokens, and the text that can be shown by now in pieces (text, from a draft?)."""

    tokens: list[int]
    pieces: list[tuple[str, bool]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(eq=False)
class Request:
    """A prompt and at most `max_new_tokens` behind it, on their way through the decoder.

    sampling, seed: how its tokens are chosen, and of their noise. eos: tokens that end it; None: the base's. text: what
    looks for stop strings and gives the text by and by; None: there are none. `hidden`: in pieces [L, D] the base's
    states of the last positions before the root, those that the head has not seen yet. `seen` [V] is for the
    repetition penalty, `phrases` for drafts that are grafted.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    text: TextStream | None = None
    eos: Sequence[int] | None = None
    out: Generation = field(default_factory=Generation)
    at_limit: str = "length"
    hidden: list[Tensor] = field(default_factory=list)
    seen_V: Tensor | None = None
    phrases: Phrases = field(default_factory=Phrases)

    def fit(self, base: Base) -> None:
        """Keep it within the context, and end it as the base ends. Raises ValueError where its prompt is empty, or
        leaves no room there."""
        room = base.context_length - len(self.prompt)
        if not self.prompt or room < 1:
            raise ValueError(
                f"a prompt has {len(self.prompt)} tokens; {base.name} takes 1 to {base.context_length - 1} of them"
            )
        if room < self.max_new_tokens:
            self.max_new_tokens, self.at_limit = room, "context"
        self.eos = base.eos_ids if self.eos is None else self.eos
        self._ids = np.array([*self.prompt, *[0] * self.max_new_tokens])

    @property
    def tokens(self) -> list[int]:
        """Those so far, an end of sequence included."""
        return self.out.tokens

    @property
    def read(self) -> NDArray[np.int64]:
        """The prompt and the tokens so far, the root last."""
        return self._ids[: self.length]

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def room(self) -> int:
        """How deep a draft may be: a bonus token always follows it."""
        return self.max_new_tokens - len(self.tokens) - 1

    @property
    def frontier(self) -> Frontier:
        """Where its next draft begins."""
        return Frontier(self.read, self.eos or (), self.room, self.sampling, self.seed, self.phrases)

    @property
    def length(self) -> int:
        """Tokens so far, the root included: the position of what the base chooses next."""
        return len(self.prompt) + len(self.tokens)

    def append(self, accepted: list[int], bonus: int) -> None:
        """Take a step's tokens, up to the first that ends the request."""
        for i, token in enumerate([*accepted, bonus]):
            self._ids[self.length] = token
            self.tokens.append(token)
            self.out.drafted.append(i < len(accepted))
            if self.seen_V is not None:
                self.seen_V[token] = True
            stopped = self.text is not None and self.text.push(token, i < len(accepted))
            if stopped:
                self.out.finish = "stop"
            elif token in (self.eos or ()):
                self.out.finish = "eos"
            elif len(self.tokens) == self.max_new_tokens:
                self.out.finish = self.at_limit
            if self.out.finish:
                return

    def seen_behind(self, tree: Tree, row: int) -> Tensor:
        """The tokens [V] that stand before what is chosen behind the root (row 0) or node row - 1 of its draft."""
        assert self.seen_V is not None
        seen_V, node = self.seen_V.clone(), row - 1
        while node >= 0:
            seen_V[int(tree.tokens[node])] = True
            node = int(tree.parents[node])
        return seen_V

    def finished(self, base: Base) -> Generation:
        """The generation with its text."""
        if self.text is None:
            self.out.text = base.tokenizer.decode(self.tokens, skip_special_tokens=True)
        else:
            self.text.finish()
            self.out.text = self.text.text
        return self.out


def requests_of(
    base: Base,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    streamed: bool = False,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    eos: Sequence[int] | None = None,
    keep_trees: bool = False,
    **sampling: Any,
) -> list[Request]:
    """One request per prompt; sampling: fields of `Sampling`. Raises ValueError on what cannot be asked."""
    (most,) = _whole([max_new_tokens], f"max_new_tokens={max_new_tokens!r} must be a whole number")
    if most < 1:
        raise ValueError(f"max_new_tokens={most} must be at least 1")
    listed = isinstance(stop, Iterable) and not isinstance(stop, str)
    if not listed or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop={stop!r}: give a list of non-empty strings")
    ends = None if eos is None else _whole(eos, f"eos={eos!r}: give a list of tokens")
    several: Any = seed if isinstance(seed, Iterable) and getattr(seed, "ndim", 1) != 0 else [seed] * len(prompts)
    seeds = _whole(several, f"seed={seed!r}: give a whole number, or one for each prompt")
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one, or one for each")
    chosen_by, requests = Sampling(**sampling), []
    for prompt, own_seed in zip(prompts, seeds, strict=True):
        tokens = _tokens(base, prompt)
        text = TextStream(base.tokenizer, stop, tokens) if streamed or stop else None
        out = Generation(trees=[] if keep_trees else None)
        requests.append(Request(tokens, most, chosen_by, own_seed, text, ends, out=out))
        requests[-1].fit(base)
    return requests


def _tokens(base: Base, prompt: Prompt) -> list[int]:
    ids = base.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    tokens = _whole(ids, "a prompt is a text, or a sequence of whole numbers")
    if problem := "a token below 0" if min(tokens, default=0) < 0 else base.unreadable(tokens):
        raise ValueError(f"the prompt cannot be read: {problem}")
    return tokens


def _whole(numbers: Iterable[SupportsIndex], otherwise: str) -> list[int]:
    """Raises ValueError, which says `otherwise`, where they are no whole numbers."""
    try:
        return [index(number) for number in numbers]
    except TypeError:
        raise ValueError(otherwise) from None
