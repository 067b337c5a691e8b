"""Raw rows -> conversations, texts or token sequences; a row that cannot be used is a RowError with the reason.

Conversations: a list of turns (`conversations`, `messages`), or question and answer in columns of their own, or
questions alone. Texts: strings, `{"text": ...}`. Tokens: `input_ids` with a mask. Null columns are absent columns.
"""

import hashlib
import json
import marshal
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from typing import Any

from .messages import ROLES, THOUGHT_KEYS, Message, encodable, filled, read_tools, read_turn, taken
from .sources import RowError

FOLLOWERS = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
# Columns by what they hold. Where a row has several of a line, the first is read and the others are named as unread.
LISTS = ("conversations", "messages", "conversation", "dialogue", "dialog", "chat", "data")
SYSTEM = ("system", "system_prompt", "system_message")
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")
INPUTS = ("input", "context")  # alpaca's and dolly's: what the instruction is about
ANSWERS = ("completion", "response", "output", "answer", "chosen", "solution")
TOOLS = ("tools", "functions")
TEXTS = ("text", "story", "content", "prompt")
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
READ_ELSEWHERE = ("id", "question_id", "category")  # or nowhere, and no loss
IGNORED_LABEL = -100  # in a column `labels`, as torch's cross-entropy has it


@dataclass(frozen=True)
class _Row:
    """unread: columns of the row, and keys of its turns, that have no known meaning. Neither id nor unread is a part of
    its content."""

    id: str
    unread: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def digest(self) -> bytes:
        """Equal for equal content, within one process: marshal is several times as fast as json."""
        content = [value for name, value in vars(self).items() if name not in ("id", "unread")]
        return hashlib.blake2b(marshal.dumps(content, 0), digest_size=12).digest()


@dataclass(frozen=True)
class Conversation(_Row):
    """Messages in the form of data/messages.py: an optional system turn, then user and assistant in turn, with tool
    turns after an assistant's; or user turns alone. tools: the schemas that the template shows."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None

    @property
    def opening(self) -> str:
        """The first thing that the user says: what decides the split."""
        return next(m["content"] for m in self.messages if m["role"] == "user")

    @property
    def question(self) -> dict[str, Any]:
        """`turns` of the user, up to a tool's result, since a base need not call that tool; `system` and `tools`, where
        there are any."""
        messages = list(takewhile(lambda message: message["role"] != "tool", self.messages))
        found: dict[str, Any] = {"turns": [m["content"] for m in messages if m["role"] == "user"]}
        if messages[0]["role"] == "system":
            found["system"] = messages[0]["content"]
        return found | ({"tools": self.tools} if self.tools else {})


@dataclass(frozen=True)
class Text(_Row):
    """A document that the base continues from some point."""

    text: str

    @property
    def opening(self) -> str:
        return self.text


@dataclass(frozen=True)
class Tokens(_Row):
    """A sequence that is tokenised already; mask is 1 on the assistant's tokens."""

    ids: list[int] = field(repr=False)
    mask: list[int] = field(repr=False)

    @property
    def prompt(self) -> list[int]:
        """What stands before the first answer."""
        return self.ids[: self.mask.index(1)]

    @property
    def opening(self) -> str:
        return str(self.prompt or self.ids)


Record = Conversation | Text | Tokens


def record_of(row: Any, name: str, kind: str) -> Record:
    """The record in a row of data of that kind: `text`; `sharegpt`: conversations, or tokens; `mixed`: any of them.

    Raises RowError with what is wrong.
    """
    columns = filled(row) if isinstance(row, dict) else {}
    is_text = isinstance(row, str) or ("text" in columns and not _listing(columns))
    try:
        if kind != "text" and "input_ids" in columns:
            return tokens_of(row, name)
        return text_of(row, name) if kind == "text" or (kind == "mixed" and is_text) else conversation_of(row, name)
    except RecursionError:
        raise RowError("nested too deeply") from None


def conversation_of(row: Any, name: str | int) -> Conversation:
    """The conversation in a row. Raises RowError with what is wrong and in which turn."""
    left = _columns(row)
    unread: list[str] = []
    messages = [m for i, turn in enumerate(_turns(left)) for m in read_turn(turn, f"turn {i}", unread)]
    questions_alone = all(message["role"] == "user" for message in messages) and not _listing(row)
    before = ""
    for i, message in enumerate(messages):
        role, due = message["role"], FOLLOWERS[before]
        if role != "tool" and not message["content"].strip() and "tool_calls" not in message:
            raise RowError(f"turn {i} (from the {role}) is empty")
        if questions_alone or (role == "system" and i == 0):
            continue
        if role not in due:
            where = f"turn {i} is from" if before else "starts with"
            raise RowError(f"{where} the {role} where the {due[0]} is due")
        before = role
    if not before and not (questions_alone and messages):
        raise RowError("no user turn")
    system = taken(left, SYSTEM)
    if system is not None and messages[0]["role"] != "system":
        messages = [*read_turn({"role": "system", "content": system}, "the system column", unread), *messages]
    elif system is not None and system != messages[0]["content"]:
        unread.append("system (beside a system turn)")
    tools = read_tools(taken(left, TOOLS))
    return Conversation(str(row.get("id", name)), tuple(messages), tools, unread=(*unread, *_unread(left)))


def text_of(row: Any, name: str | int) -> Text:
    """The text in a row. Raises RowError when there is none."""
    left = _columns({"text": row} if isinstance(row, str) else row)
    name, text = left.get("id", name), taken(left, TEXTS)
    if not isinstance(text, str) or not text.strip():
        raise RowError(f"no text under any of {', '.join(TEXTS)}")
    return Text(encodable(str(name), "its id"), encodable(text, "the text"), unread=_unread(left))


def tokens_of(row: Any, name: str | int) -> Tokens:
    """The tokens in a row. Raises RowError when they are none or do not fit their mask."""
    left = _columns(row)
    ids: Any = left.pop("input_ids", None)
    mask: Any = taken(left, MASKS)
    if mask is None and isinstance(left.get("labels"), list):
        mask = [int(label != IGNORED_LABEL) for label in left.pop("labels")]
    for key, found in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(found, list) or not all(type(x) in (int, bool) and x >= 0 for x in found):
            raise RowError(f"no list of numbers under '{key}'")
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise RowError(f"{len(mask)} entries of loss_mask (0 or 1) for {len(ids)} of input_ids")
    if not any(mask):
        raise RowError("loss_mask marks no token")
    return Tokens(str(row.get("id", name)), ids, [int(m) for m in mask], unread=_unread(left))


def turns_of_text(text: str) -> list[Any]:
    """The turns in a column that knows no lists: in JSON text, or the one question itself."""
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # "[INST] ..."
            pass
    return [text]


def _columns(row: Any) -> dict[str, Any]:
    """Those that hold anything."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"an object is needed, this is a {type(row).__name__}")
    return {key: value for key, value in filled(row).items() if value == value}  # NaN is pandas' null


def _unread(left: dict[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in left if key not in READ_ELSEWHERE)


def _turns(left: dict[str, Any]) -> list[Any]:
    """The turns of a row in order, raw; the columns that they come from are taken out."""
    columns = ", ".join(left) or "none"
    listing = _listing(left)
    if isinstance(left.get("turns"), list | str) and not listing:  # MT-Bench's
        asked = left.pop("turns")
        return _as_turns(turns_of_text(asked) if isinstance(asked, str) else asked, "user")
    asked = taken(left, listing or QUESTIONS)
    if listing:
        asked = turns_of_text(asked) if isinstance(asked, str) else asked
        if len(asked) > 1 and all(isinstance(turn, str) for turn in asked):  # UltraChat's
            asked = [{"role": role, "content": turn} for role, turn in zip(cycle(("user", "assistant")), asked)]
        if not asked or _said_by(asked[-1]) != "user":
            return asked
    answer = taken(left, [key for key in ANSWERS if isinstance(left.get(key), str | list | dict)])
    if asked is None and answer is None:
        raise RowError(f"no list under 'conversations' or 'messages', and no question (its columns: {columns})")
    about = next((key for key in INPUTS if isinstance(left.get(key), str)), None)
    if about and isinstance(asked, str):
        asked = f"{asked}\n{left.pop(about)}"  # as LLaMA-Factory joins them
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer} | {k: left.pop(k) for k in THOUGHT_KEYS if k in left}
    prompt, answers = _as_turns(asked, "user"), _as_turns(answer, "assistant")
    if answers and _said_by(answers[0]) in ("system", "user"):  # TRL's implicit prompt
        again = [turn.get("value", turn.get("content")) for turn in answers]
        prompt = [turn for turn in prompt if turn.get("value", turn.get("content")) not in again]
    pairs = left.pop("history", [])  # LLaMA-Factory's earlier turns: pairs of question and answer
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowError("'history' is no list of pairs")
    earlier = [turn for asked, said in pairs for turn in (*_as_turns(asked, "user"), *_as_turns(said, "assistant"))]
    return [*earlier, *prompt, *answers]


def _listing(columns: dict[str, Any]) -> list[str]:
    """The columns that hold a list of turns, as one or as JSON text."""
    there = [key for key in LISTS if key in columns]
    return [key for key in there if isinstance(columns[key], list) or str(columns[key]).lstrip().startswith("[")]


def _said_by(turn: Any) -> str | None:
    """Whose a raw turn is; None where it does not say."""
    return ROLES.get(str(turn.get("from", turn.get("role"))).lower()) if isinstance(turn, dict) else None


def _as_turns(found: Any, role: str) -> list[Any]:
    """A question's or an answer's turns: a text, a turn, or a list of either."""
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return [turn if isinstance(turn, dict) else {"role": role, "content": turn} for turn in listed]
