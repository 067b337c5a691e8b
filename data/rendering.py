"""What a chat template writes of messages, how far it had looked when it wrote it, and what it leaves out.

Most templates write a message before they look at the next one. What stands there until then is the same however a
conversation goes on, so that an answer needs no rendering of its own to be seen as it was when it was the last.
"""

import re
from collections import UserList
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateSyntaxError
from transformers.utils.chat_template_utils import _compile_jinja_template

from ctcdraft.data.messages import Message

NO_TOOLS = "tools (the template shows none)"
SOME_TOOLS = "tools (the template shows a part of them)"


@dataclass(frozen=True)
class RenderedText:
    """marks: the characters [start, end) that the template's {% generation %} marks cover.

    settled: for each message how much was written when the template first looked at it, and then the whole length. Of
    messages[:i] alone it writes text[: settled[i]] too, before it ends (or refuses them).
    """

    text: str
    marks: list[tuple[int, int]]
    settled: list[int]


def compiled(template: str) -> Template:
    """The template as transformers compiles it. Raises ValueError where the text is none."""
    try:
        return _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error


def render_text(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> RenderedText:
    """Raises what the template raises."""
    try:
        return _render(template, messages, variables, watch=True)
    except Exception:  # it may ask of a list what a sequence does not know, as `tojson` does
        return _render(template, messages, variables, watch=False)


def _render(template: str, messages: Sequence[Message], variables: Mapping[str, Any], *, watch: bool) -> RenderedText:
    written, marks = list[str](), list[tuple[int, int]]()
    looked = [] if watch else [0] * len(messages)
    seen = _Watched(messages, written, looked) if watch else list(messages)
    found = compiled(template)
    with found.environment.activate_tracker(written, marks):  # type: ignore[attr-defined]
        for piece in found.generate(messages=seen, documents=None, **variables):
            written.append(piece)
    text = "".join(written)
    return RenderedText(text, marks, looked + [len(text)] * (len(messages) + 1 - len(looked)))


class _Watched(UserList[Message]):
    """The messages from `first` on; notes in `looked`, for each at the first look at it, how much is `written`. Whoever
    does anything but read one after the other looks at them all."""

    def __init__(self, messages: Sequence[Message], written: list[str], looked: list[int], first: int = 0) -> None:
        self._messages, self._written, self._looked, self._first = messages, written, looked, first

    def _look(self, last: int) -> None:
        new = min(last + 1, len(self._messages)) - len(self._looked)
        if new > 0:
            self._looked += [sum(map(len, self._written))] * new

    @property
    def data(self) -> list[Message]:  # type: ignore[override]  # which all other methods of a UserList read
        self._look(len(self._messages))
        return list(self._messages[self._first :])

    def __getitem__(self, index: Any) -> Any:
        match index:
            case slice(start=int() | None as start, stop=None, step=None) if (start or 0) >= 0:
                return _Watched(self._messages, self._written, self._looked, self._first + (start or 0))
            case int() if index >= 0:
                self._look(self._first + index)
                return self._messages[self._first + index]
        return self.data[index]

    def __iter__(self) -> Iterator[Message]:
        for index in range(self._first, len(self._messages)):
            self._look(index)
            yield self._messages[index]

    def __bool__(self) -> bool:
        self._look(self._first)
        return self._first < len(self._messages)


def unshown(messages: Sequence[Message], tools: list[Any] | None, texts: Sequence[str]) -> list[str]:
    """A name for each value of the messages, but for thoughts, that none of the texts shows; and one for the tools."""
    found = [
        f"turn.{name} (the template does not show it)"
        for message in messages
        for name, value in _values(message)
        if not any(_shows(text, value) for text in texts)
    ]
    schemas = [any(_shows(text, value) for text in texts) for value in _words_of(tools or [])]
    return found + ([] if all(schemas) else [SOME_TOOLS if any(schemas) else NO_TOOLS])


def _values(message: Message) -> Iterator[tuple[str, str]]:
    for name in ("content", "name", "tool_call_id"):
        if name in message:
            yield name, message[name]
    for call in message.get("tool_calls", ()):
        yield "tool_calls.id", call.get("id", "")
        yield "tool_calls.function.name", call["function"]["name"]
        for word in _strings(call["function"]["arguments"]):
            yield "tool_calls.function.arguments", word


def _strings(value: Any) -> Iterator[str]:
    """Every text in it, keys too."""
    if isinstance(value, str):
        yield value
    for inner in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(inner)


def _words_of(schema: Any) -> Iterator[str]:
    """The names and descriptions in schemas of tools: templates have ways of their own to write types."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _words_of(inner)
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            if key in ("name", "description") and isinstance(inner, str):
                yield inner
            if key == "properties" and isinstance(inner, dict):
                yield from inner
                yield from _words_of(list(inner.values()))
            else:
                yield from _words_of(inner)


def _shows(text: str, value: str) -> bool:
    """Is the value in it, as it is, or trimmed, or escaped in some way?"""
    return value in text or value.strip() in text or all(run in text for run in re.findall(r"\w+", value))
