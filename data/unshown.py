"""What a chat template leaves out of messages and tools, by name."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .messages import Message

NO_TOOLS = "tools (the template shows none)"
SOME_TOOLS = "tools (the template shows a part of them)"


def unshown(messages: Sequence[Message], tools: list[Any] | None, texts: Sequence[str]) -> list[str]:
    """A name for each value of the messages that none of the texts shows; and one for the tools."""
    found = [
        f"{name} (the template does not show it)"
        for message in messages
        for name, value in _values(message, "turn")
        if not any(value.strip() in text or ("reasoning" not in name and shows(text, value)) for text in texts)
    ]
    schemas = [any(shows(text, value) for text in texts) for value in _words_of(tools or [])]
    return found + ([] if all(schemas) else [SOME_TOOLS if any(schemas) else NO_TOOLS])


def _values(found: Any, name: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every text in a message; what a call gives to its tool has one name, its keys included."""
    if isinstance(found, str):
        yield name, found
    elif isinstance(found, list):
        for inner in found:
            yield from _values(inner, name)
    elif isinstance(found, dict) and name.endswith("arguments"):
        yield from _values([*found, *found.values()], name)
    elif isinstance(found, dict):
        for key, inner in found.items():
            yield from () if key in ("role", "type") else _values(inner, f"{name}.{key}")


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


def shows(text: str, value: str) -> bool:
    """Is the value in it, as it is, or trimmed, or escaped in some way?"""
    return value in text or value.strip() in text or all(run in text for run in re.findall(r"\w+", value))
