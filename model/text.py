"""The text of a growing list of tokens: whole characters only, and up to the first stop string."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer decodes part of a character to


class TextStream:
    """Push tokens one by one; `text` is what they say so far.

    stop: strings that end the text; it is cut before the first one that occurs, wherever token boundaries lie.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        self._drafted: list[bool] = []  # of each character: does it come from an accepted draft?
        self._tokens: list[int] = []
        self._before = self._read = 0  # tokens decoded for context, and tokens whose text is in `text`
        self._taken = 0

    def push(self, token: int, drafted: bool = False) -> bool:
        """Append a token; True when it completes a stop string."""
        self._tokens.append(token)
        return self._grow(drafted, whole=True)

    def finish(self) -> None:
        """No token follows: what is left of a broken character belongs to the text too."""
        self._grow(False, whole=False)

    def take(self, final: bool = False) -> list[tuple[str, bool]]:
        """The text since the last call in pieces (text, drafted), without an end that might still turn out to begin
        a stop string."""
        end = len(self.text) if final else len(self.text) - self._held_back()
        fresh = zip(self.text[self._taken : end], self._drafted[self._taken : end], strict=True)
        self._taken = max(end, self._taken)
        return [("".join(c for c, _ in run), drafted) for drafted, run in groupby(fresh, key=lambda pair: pair[1])]

    def _grow(self, drafted: bool, whole: bool) -> bool:
        known = self._decode(self._tokens[self._before : self._read])
        now = self._decode(self._tokens[self._before :])
        if whole and now.endswith(UNFINISHED):
            return False
        old = len(self.text)
        self.text += now[len(known) :]
        self._before, self._read = self._read, len(self._tokens)
        longest = max(map(len, self.stop), default=0)
        found = [at for s in self.stop if (at := self.text.find(s, max(0, old - longest))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        self._drafted = self._drafted[: len(self.text)] + [drafted] * (len(self.text) - old)
        return bool(found)

    def _held_back(self) -> int:
        for length in range(min(len(self.text), max(map(len, self.stop), default=1) - 1), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self.stop):
                return length
        return 0

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
