"""Raw rows -> conversations, texts or token sequences; a row that cannot be used is a RowError with the reason.

Conversations: ShareGPT rows (`conversations` with `from`/`value`), `messages` (`role`/`content`), or prompts only
(`turns`, `prompt`). Texts: strings, `{"text": ...}`. Tokens: `input_ids` with `loss_mask`.
"""

import hashlib
import json
import marshal
from dataclasses import dataclass, field
from typing import Any

from ctcdraft.data.sources import RowError

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
FOLLOWERS = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # what a template may read beside the content
TEXT_KEYS = ("text", "story", "content", "prompt")


@dataclass(frozen=True)
class Conversation:
    """Messages `{"role", "content", ...}`: an optional system turn, then user and assistant in turn, with tool
    turns after an assistant's; or user turns alone. tools: the schemas that the template shows."""

    id: str
    messages: tuple[Message, ...]
    tools: list[Any] | None = None

    @property
    def opening(self) -> str:
        """The first thing that the user says: what decides the split."""
        return next(m["content"] for m in self.messages if m["role"] == "user")

    @property
    def digest(self) -> bytes:
        """Equal for equal content."""
        return _digest([self.messages, self.tools])


@dataclass(frozen=True)
class Text:
    """A document that the base continues from some point."""

    id: str
    text: str

    @property
    def opening(self) -> str:
        return self.text

    @property
    def digest(self) -> bytes:
        return _digest(self.text)


@dataclass(frozen=True)
class Tokens:
    """A sequence that is tokenised already; mask is 1 on the assistant's tokens."""

    id: str
    ids: list[int] = field(repr=False)
    mask: list[int] = field(repr=False)

    @property
    def prompt(self) -> list[int]:
        """What stands before the first answer."""
        return self.ids[: self.mask.index(1)]

    @property
    def opening(self) -> str:
        return str(self.prompt or self.ids)

    @property
    def digest(self) -> bytes:
        return _digest([self.ids, self.mask])


Record = Conversation | Text | Tokens


def record_of(row: Any, name: str, kind: str) -> Record:
    """The record in a row of data of that kind: `text`; `sharegpt`: conversations, or tokens; `mixed`: any of them.

    Raises RowError with what is wrong.
    """
    if kind == "text":
        return text_of(row, name)
    if isinstance(row, dict) and "input_ids" in row:
        return tokens_of(row, name)
    if kind == "mixed" and (isinstance(row, str) or (isinstance(row, dict) and "text" in row)):
        return text_of(row, name)
    return conversation_of(row, name)


def conversation_of(row: Any, name: str | int) -> Conversation:
    """The conversation in a row. Raises RowError with what is wrong and in which turn."""
    row = _object(row)
    messages = _prompts(row)
    if messages is None:
        turns = row.get("conversations", row.get("messages"))
        if not isinstance(turns, list) or not turns:
            raise RowError("no list under 'conversations' or 'messages'")
        messages = tuple(_message(turn, i) for i, turn in enumerate(turns))
        _check_order(messages)
    return Conversation(str(row.get("id", name)), messages, _tools(row.get("tools")))


def text_of(row: Any, name: str | int) -> Text:
    """The text in a row. Raises RowError when there is none."""
    if isinstance(row, RowError):
        raise row
    if isinstance(row, dict):
        name = row.get("id", name)
        row = next((row[key] for key in TEXT_KEYS if key in row), None)
    if not isinstance(row, str):
        raise RowError(f"neither a string nor an object with one of {', '.join(TEXT_KEYS)}")
    if not row.strip():
        raise RowError("empty text")
    return Text(encodable(str(name), "its id"), encodable(row, "the text"))


def tokens_of(row: Any, name: str | int) -> Tokens:
    """The tokens in a row. Raises RowError when they are none or do not fit their mask."""
    row = _object(row)
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    for key, found in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(found, list) or not all(type(x) in (int, bool) and x >= 0 for x in found):
            raise RowError(f"no list of numbers under '{key}'")
    assert isinstance(ids, list)
    assert isinstance(mask, list)
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise RowError(f"{len(mask)} entries of loss_mask (0 or 1) for {len(ids)} of input_ids")
    if not any(mask):
        raise RowError("loss_mask marks no token")
    return Tokens(str(row.get("id", name)), ids, [int(m) for m in mask])


def _digest(content: Any) -> bytes:
    """Of plain JSON types, to be compared within one process: marshal is several times as fast as json."""
    return hashlib.blake2b(marshal.dumps(content, 0), digest_size=12).digest()


def _object(row: Any) -> dict[str, Any]:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"an object is needed, this is a {type(row).__name__}")
    return row


def _prompts(row: dict[str, Any]) -> tuple[Message, ...] | None:
    """User turns alone: MT-Bench's `turns`, or one `prompt`."""
    if "conversations" in row or "messages" in row or not {"turns", "prompt"} & set(row):
        return None
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns:
        raise RowError("no list of questions under 'turns'")
    return tuple(_message({"role": "user", "content": turn}, i) for i, turn in enumerate(turns))


def _check_order(messages: tuple[Message, ...]) -> None:
    before = ""
    for i, message in enumerate(messages):
        role, due = message["role"], FOLLOWERS[before]
        if role == "system" and i == 0:
            continue
        if role not in due:
            where = f"turn {i} is from" if before else "starts with"
            raise RowError(f"{where} the {role} where the {due[0]} is due")
        before = role
    if not before:
        raise RowError("no user turn")


def _message(turn: Any, index: int) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"turn {index} is no object")
    role = turn.get("from", turn.get("role"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"turn {index} has the unknown role {role!r}")
    message = {"role": ROLES[role], "content": _content(turn.get("value", turn.get("content")), index)}
    extra = {key: turn[key] for key in KEPT if turn.get(key)} if len(turn) > 2 else {}
    message |= extra
    if not message["content"].strip() and not (message["role"] == "assistant" and message.get("tool_calls")):
        raise RowError(f"turn {index} (from the {message['role']}) is empty")
    encodable(message["content"], f"turn {index}")
    if extra:
        encodable(json.dumps(extra, ensure_ascii=False), f"turn {index}")
    return message


def _content(content: Any, index: int) -> str:
    """Plain text; of a list of parts, as chat APIs have them, the text parts joined."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type", "no text") if isinstance(part, dict) else type(part).__name__
                raise RowError(f"turn {index} holds a part that is no text ({kind})")
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _tools(tools: Any) -> list[Any] | None:
    """A list of schemas, or the JSON of one, as files that know no nested columns have it."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise RowError("'tools' is no JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("'tools' is no list of objects")
    return tools


def encodable(text: str, where: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{where} holds half a character (a lone surrogate) at {error.start}") from error
    return text
