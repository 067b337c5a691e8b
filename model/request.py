"""What is asked of the decoder and what comes back: requests on their way, and generations.

Shape suffixes: L positions, D hidden size, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.base import Base
from ctcdraft.model.sampling import Sampling
from ctcdraft.model.text import TextStream

Prompt = str | Sequence[int]


class Settings(TypedDict, total=False):
    """temperature (0: greedy), top_k (0: all), top_p, repetition_penalty: as in transformers, see Sampling.

    seed: of the noise; one number for all requests, which then share their noise, or one for each (for several samples
    of one prompt). stop: strings that end the text. eos: tokens that end a request instead of the base's own.
    """

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int | Sequence[int]
    stop: Sequence[str]
    eos: Sequence[int] | None


class Asked(NamedTuple):
    """Settings, checked."""

    sampling: Sampling
    seed: int | Sequence[int]
    stop: Sequence[str]
    eos: Sequence[int] | None


def asked_of(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    eos: Sequence[int] | None = None,
) -> Asked:
    """Raises ValueError on settings outside their range."""
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop={stop!r}: give a list of non-empty strings")
    return Asked(Sampling(temperature, top_k, top_p, repetition_penalty), seed, stop, eos)


@dataclass
class Generation:
    """New tokens (end of sequence included), their text, and how they came about.

    finish: `eos`, `stop` (a stop string: tokens hold it, text ends before it), `length` or `context`. drafted says of
    each token whether it was an accepted draft. nodes, accepted and expected hold, per step, how many tokens the draft
    had, how many of them were accepted, and the sum of psi that foretold these; accepted_from counts who proposed them:
    `head`, `lookup` or `both`. seconds splits the time of the whole batch into verify, draft, tree and other.
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

    @property
    def tokens_per_step(self) -> float:
        """Growth per base forward after the prompt's, which gives the first token; plain decoding = 1."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


@dataclass(frozen=True)
class Span:
    """What one step added: tokens, and the text that can be shown by now in pieces (text, from a draft?)."""

    tokens: list[int]
    pieces: list[tuple[str, bool]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass
class Request:
    """One sequence on its way. `hidden` [1, L, D] are the base's states that the head has not seen yet, and
    `following` the token after each of them; the last one is the root. `seen` [V] is for the repetition penalty."""

    prompt: list[int]
    limit: int
    at_limit: str
    seed: int
    text: TextStream | None
    out: Generation = field(default_factory=Generation)
    following: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    seen_V: Tensor | None = None

    def __post_init__(self) -> None:
        self._ids = np.array([*self.prompt, *[0] * self.limit])

    @property
    def read(self) -> NDArray[np.int64]:
        """The prompt and the tokens so far, the root last."""
        return self._ids[: self.length]

    @property
    def root(self) -> int:
        return self.out.tokens[-1]

    @property
    def room(self) -> int:
        """How deep a draft may be: a bonus token always follows it."""
        return self.limit - len(self.out.tokens) - 1

    @property
    def length(self) -> int:
        """Tokens so far, the root included: the position of what the base chooses next."""
        return len(self.prompt) + len(self.out.tokens)

    def append(self, accepted: list[int], bonus: int, ends: NDArray[np.int64]) -> None:
        """Take a step's tokens, up to the first that ends the request."""
        self.following = [*accepted, bonus]
        for i, token in enumerate(self.following):
            self._ids[self.length] = token
            self.out.tokens.append(token)
            self.out.drafted.append(i < len(accepted))
            if self.seen_V is not None:
                self.seen_V[token] = True
            if token in ends:
                self.out.finish = "eos"
            elif self.text is not None and self.text.push(token, i < len(accepted)):
                self.out.finish = "stop"
            elif len(self.out.tokens) == self.limit:
                self.out.finish = self.at_limit
            if self.out.finish:
                return

    def finished(self, base: Base) -> Generation:
        """The generation with its text."""
        if self.text is None:
            self.out.text = base.tokenizer.decode(self.out.tokens, skip_special_tokens=True)
        else:
            self.text.finish()
            self.out.text = self.text.text
        return self.out


def requests_of(
    base: Base,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    asked: Asked,
    *,
    streamed: bool,
) -> list[Request]:
    """One request per prompt. Raises ValueError on what cannot be asked."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    seeds = [asked.seed] * len(prompts) if isinstance(asked.seed, int | np.integer) else list(asked.seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one, or one for each")
    out = []
    for prompt, own_seed in zip(prompts, seeds, strict=True):
        tokens = _tokens(base, prompt)
        room = base.context_length - len(tokens)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and {base.name} takes {base.context_length}: shorten it"
            )
        text = TextStream(base.tokenizer, asked.stop, tokens) if streamed or asked.stop else None
        at_limit = "length" if max_new_tokens <= room else "context"
        out.append(Request(tokens, min(max_new_tokens, room), at_limit, int(own_seed), text))
    return out


def _tokens(base: Base, prompt: Prompt) -> list[int]:
    try:
        tokens = (
            list(base.tokenizer(prompt).input_ids) if isinstance(prompt, str) else [index(token) for token in prompt]
        )
    except TypeError:
        raise ValueError("a prompt is a text, or a sequence of whole numbers") from None
    if not tokens:
        raise ValueError("the prompt has no tokens")
    if not all(0 <= token < base.token_count for token in tokens):
        raise ValueError(f"the prompt has a token outside [0, {base.token_count})")
    return tokens
