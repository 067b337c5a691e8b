"""What a chat template leaves out of messages and tools, by name."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .messages import Message

NO_TOOLS = "tools (the template shows none)"
SOME_TOOLS = "tools (the template shows a part of them)"
SCHEMA_WORDS = (".name", ".description", ".properties")  # templates have ways of their own to write types


def unshown(messages: Sequence[Message], tools: list[Any] | None, texts: Sequence[str]) -> list[str]:
    """A name for each value of the messages that none of the texts shows; and one for the tools."""
    found = [
        f"{name} (the template does not show it)"
        for message in messages
        for name, value in _values(message, "turn")
        if not any(value.strip() in text or ("reasoning" not in name and shows(text, value)) for text in texts)
    ]
    words = [value for name, value in _values(tools or [], "tools") if name.endswith(SCHEMA_WORDS)]
    schemas = [any(shows(text, value) for text in texts) for value in words]
    return found + ([] if all(schemas) else [SOME_TOOLS if any(schemas) else NO_TOOLS])


def _values(found: Any, name: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every text in a message or a schema, the names of properties included; what a call gives to its
    tool has one name, its keys included."""
    if isinstance(found, str):
        yield name, found
    elif isinstance(found, list):
        for inner in found:
            yield from _values(inner, name)
    elif isinstance(found, dict) and name.endswith("arguments"):
        yield from _values([*found, *found.values()], name)
    elif isinstance(found, dict):
        for key, inner in found.items():
            if name.endswith(".properties"):
                yield name, key
            if key not in ("role", "type") or not isinstance(inner, str):
                yield from _values(inner, f"{name}.{key}")


def shows(text: str, value: str) -> bool:
    """Is the value in it, as it is, or trimmed, or escaped in some way?"""
    return value in text or value.strip() in text or all(run in text for run in re.findall(r"\w+", value))
