"""The text of a growing list of tokens: whole characters only, and up to the first stop string."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer decodes part of a character to
LONGEST_CHARACTER = 4  # bytes in UTF-8


class _Decoded:
    """`text` of the tokens so far, behind those of `context`, and `rest`, which is still part of a character."""

    def __init__(self, tokenizer: Any, context: Sequence[int] = (), **options: bool) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.text = self.rest = ""
        self._tokens = [*context]
        # tokens before those decoded for context, and tokens whose text is in `text`
        self._before, self._read = 0, len(context)

    def push(self, token: int) -> None:
        self._tokens.append(token)
        known = self.decode(self._tokens[self._before : self._read])
        self.rest = self.decode(self._tokens[self._before :])[len(known) :]
        if not self.rest.endswith(UNFINISHED):
            self.finish()

    def finish(self) -> None:
        """No token follows: the rest is text too."""
        if self.rest:  # a token without text is no context: the next one would be decoded as a text's first
            self._before = self._read
        self.text, self.rest = self.text + self.rest, ""
        self._read = len(self._tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, **self.options) if tokens else ""


class TextStream:
    """Push tokens one by one; `text` is what they say so far, without special tokens.

    stop: strings that end the text; it is cut before the first one that occurs, wherever token boundaries lie. As for
    transformers' `stop_strings`, special tokens are text too, and one may begin in the prompt.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self.stop, self.ended = tuple(stop), False
        self._shown = _Decoded(tokenizer, skip_special_tokens=True)
        before = tokenizer.all_special_ids[:1]  # the space that a text's first token begins with would not be shown
        self._all = _Decoded(tokenizer, before, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for token in self._tail(prompt) if self.stop else ():
            self._all.push(token)
        self._seen = self._whole  # characters before which no stop string ends
        self._marks = [(len(self._all.text), 0)]  # behind each token: characters of all text, and of what is shown
        self._drafted: list[bool] = []  # of each shown character: does it come from an accepted draft?
        self._taken = 0

    @property
    def text(self) -> str:
        return self._shown.text

    def push(self, token: int, drafted: bool = False) -> bool:
        """Append a token; True when it completes a stop string."""
        self._shown.push(token)
        if self.stop:
            self._all.push(token)
        return self._grown(drafted)

    def finish(self) -> None:
        """No token follows: what is left of a broken character belongs to the text too."""
        if not self.ended:
            self._shown.finish()
            self._all.finish()
            self._grown(False)

    def take(self, final: bool = False) -> list[tuple[str, bool]]:
        """The text since the last call in pieces (text, drafted), without an end that might still turn out to begin
        a stop string."""
        end = len(self.text) if final or not self.stop else self._shown_at(len(self._all.text) - self._held_back())
        fresh = zip(self.text[self._taken : end], self._drafted[self._taken : end], strict=True)
        self._taken = max(end, self._taken)
        return [("".join(c for c, _ in run), drafted) for drafted, run in groupby(fresh, key=lambda pair: pair[1])]

    def _tail(self, prompt: Sequence[int]) -> Sequence[int]:
        """As much of the prompt's end as a stop string may begin in, from the beginning of a character on."""
        longest = max(len(s.encode()) for s in self.stop)
        first = max(0, len(prompt) - longest - 1)
        for start in range(first, max(-1, first - LONGEST_CHARACTER), -1):
            if not self._all.decode(prompt[start:]).startswith(UNFINISHED):
                return prompt[start:]
        return prompt[first:]

    @property
    def _whole(self) -> int:
        return len(self._all.text) + len(self._all.rest.rstrip(UNFINISHED))

    def _grown(self, drafted: bool) -> bool:
        if self.stop:
            self._marks.append((len(self._all.text), len(self.text)))
            seen, self._seen = self._seen, self._whole
            start = max(0, seen - max(map(len, self.stop)) + 1)
            fresh = self._all.text[start:] + self._all.rest
            found = [start + at for s in self.stop if (at := fresh.find(s, max(0, seen - start - len(s) + 1))) >= 0]
            if found:
                self._shown.finish()
                self._marks.append((start + len(fresh), len(self.text)))
                self._shown.text = self.text[: self._shown_at(min(found))]
                self.ended = True
        del self._drafted[len(self.text) :]
        self._drafted += [drafted] * (len(self.text) - len(self._drafted))
        return self.ended

    def _shown_at(self, place: int) -> int:
        """How much of the shown text lies before a place in all text."""
        after = bisect_right(self._marks, place, key=itemgetter(0))
        if after == 0:  # in the prompt
            return 0
        _, shown = self._marks[after - 1]
        if after == len(self._marks):
            return shown
        end, most = self._marks[after]
        return max(shown, most - (end - place))  # from its end: of a first token the space before it may not be shown

    def _held_back(self) -> int:
        text = self._all.text
        for length in range(min(len(text), max(map(len, self.stop)) - 1), 0, -1):
            if any(s.startswith(text[-length:]) for s in self.stop):
                return length
        return 0
