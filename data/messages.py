"""Messages as files and servers write them, read once into one form.

`{"role", "content"}`, both text, and where there is such: of an answer `reasoning_content` (the thought before it),
`tool_calls` (`{"type": "function", "function": {"name", "arguments": <object>}}`, some with `id`) and `label: False`
(it is read, but not learned); of a tool's result `tool_call_id`; of any `name`.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from .sources import RowError

Message = dict[str, Any]

NAMES = {
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "bot", "chatbot", "ai", "model"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "ipython", "tool_result", "tool_response", "function_response"),
}
CALLING_ROLES = ("function_call", "tool_call")  # an assistant's, whose content is a call, as JSON text
PLAIN_ROLES = {name: role for role, names in NAMES.items() for name in names}
ROLES = PLAIN_ROLES | dict.fromkeys(CALLING_ROLES, "assistant")
ROLE_KEYS = ("from", "role")
CONTENT_KEYS = ("value", "content", "text")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
CALL_KEYS = ("tool_calls", "function_call")
ARGUMENT_KEYS = ("arguments", "input", "parameters")
LABEL_KEYS = ("weight", "train", "training", "trainable", "loss")  # OpenAI, axolotl, ms-swift: 0 or false is no label
PARTS = {  # the types of a content's parts, as OpenAI, Anthropic and Mistral have them, and what they hold
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thought",
    "reasoning": "thought",
    "tool_use": "call",
    "tool_result": "result",
}
PART_KEYS = ("text", "thinking", "reasoning", "content", "summary")


def read_turn(turn: Any, where: str, unread: list[str]) -> list[Message]:
    """The messages in a turn: one, with the results of tools before it that are parts of it.

    unread: gets the names of the keys that have no known meaning. Null keys are absent keys. Raises RowError.
    """
    if not isinstance(turn, dict):
        raise RowError(f"{where} is no object")
    # nearly every turn is plain
    word, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if len(turn) == 2 and isinstance(word, str) and isinstance(content, str) and word in PLAIN_ROLES:
        return [{"role": ROLES[word], "content": encodable(content, where)}]
    left = filled(without_nulls(turn))
    word = taken(left, ROLE_KEYS)
    role = ROLES.get(word.lower()) if isinstance(word, str) else None
    if role is None:
        raise RowError(f"{where} has the unknown role {word!r} (its keys: {', '.join(turn)})")
    content = taken(left, CONTENT_KEYS)
    if word.lower() in CALLING_ROLES and isinstance(content, str) and content.lstrip().startswith(("{", "[")):
        left["function_call"], content = content, None
    if role == "tool":
        content = _result_text(content, where)
    found: dict[str, list[Any]] = {kind: [] for kind in PARTS.values()}
    for kind, value in _parts(content, where, unread):
        found[kind].append(value)
    message: Message = {"role": role, "content": "".join(found["text"])}
    if role == "assistant":
        thoughts = found["thought"] or [_text(taken(left, THOUGHT_KEYS), f"the thought of {where}", unread)]
        calls = [*found["call"], *_read_calls(taken(left, CALL_KEYS), where, unread)]
        message |= {"reasoning_content": "".join(thoughts)} if "".join(thoughts).strip() else {}
        message |= {"tool_calls": calls} if calls else {}
    if (found["thought"] or found["call"]) if role != "assistant" else found["result"]:
        raise RowError(f"{where} is from the {role} and holds parts of another's turn")
    for key in LABEL_KEYS:  # one between 0 and 1, or of a turn that is learned and no answer, is unread
        if left.get(key) == 0 or (left.get(key) == 1 and role == "assistant"):
            message |= {} if left.pop(key) or role != "assistant" else {"label": False}
    for key in ("name", *(("tool_call_id",) if role == "tool" else ())):
        if isinstance(left.get(key), str):
            message[key] = left.pop(key)
    unread += [f"turn.{key}" for key in left]
    messages = [*found["result"], message]
    if found["result"] and not message["content"]:  # a turn of tools' results alone
        unread += [f"turn.{key}" for key in messages.pop() if key not in ("role", "content")]
    for each in messages:
        encodable(each["content"] if len(each) == 2 else to_json(each, where), where)
    return messages


def read_tools(tools: Any) -> list[Any] | None:
    """Schemas `{"type": "function", "function": {...}}`, given as objects or as JSON text. Raises RowError."""
    tools = from_json(tools.strip() or "null", "'tools'") if isinstance(tools, str) else without_nulls(tools)
    if not tools:
        return None
    listed = tools if isinstance(tools, list) else [tools]
    tools = [from_json(tool, "'tools'") if isinstance(tool, str) else tool for tool in listed]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError("'tools' is no list of objects")
    encodable(to_json(tools, "'tools'"), "'tools'")
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]


def for_server(message: Message) -> Message:
    """A message as OpenAI's API has it: arguments are JSON text. vLLM reads a thought as `reasoning` since 0.16, and as
    `reasoning_content` before (vllm#38488): it gets both."""
    sent = {key: value for key, value in message.items() if key != "label"}
    if "reasoning_content" in sent:
        sent["reasoning"] = sent["reasoning_content"]
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def filled(found: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that hold nothing: a union of schemas (Parquet, Arrow) puts null ones everywhere."""
    return {key: value for key, value in found.items() if value is not None and value not in ("", [], {})}


def without_nulls(found: Any) -> Any:
    """Null keys are absent keys, at every depth."""
    if isinstance(found, dict):
        return {key: without_nulls(value) for key, value in found.items() if value is not None}
    return [without_nulls(value) for value in found] if isinstance(found, list) else found


def taken(left: dict[str, Any], keys: Iterable[str]) -> Any:
    """What stands under the first of the keys that is there, taken out, with others that hold the same."""
    value = next((left[key] for key in keys if key in left), None)
    for key in keys:
        if key in left and left[key] == value:
            del left[key]
    return value


def from_json(text: str, where: str) -> Any:
    """Raises RowError where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(f"{where} is no JSON") from None


def to_json(found: Any, where: str) -> str:
    """Raises RowError where JSON has no such value: a table may hold dates, decimals and bytes."""
    try:
        return json.dumps(found, ensure_ascii=False)
    except TypeError as error:
        raise RowError(f"{where} is no JSON ({error})") from None


def encodable(text: str, where: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{where} holds half a character (a lone surrogate) at {error.start}") from error
    return text


def _parts(content: Any, where: str, unread: list[str]) -> Iterator[tuple[str, Any]]:
    """(kind, what it holds) of each part of a content: text, or a list of parts, as chat APIs have them."""
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        if isinstance(part, str):
            yield "text", part
            continue
        if not isinstance(part, dict):
            raise RowError(f"{where} holds no text but a {type(part).__name__}")
        left = dict(part)
        name = left.pop("type", "text")
        kind = PARTS.get(name) if isinstance(name, str) else None
        if kind == "call":
            yield from ((kind, call) for call in _read_calls(part, where, unread))
            continue
        value = taken(left, PART_KEYS)
        if kind == "result":
            identity = taken(left, ("tool_use_id", "tool_call_id"))
            result = {"role": "tool", "content": _text(_result_text(value, where), where, unread)}
            yield kind, result | ({"tool_call_id": identity} if identity else {})
        elif kind is None or value is None:
            raise RowError(f"{where} holds a part that is no text ({name if 'type' in part else 'no text'})")
        elif kind == "text" and not isinstance(value, str):
            raise RowError(f"{where} holds no text but a {type(value).__name__}")
        else:
            yield kind, _text(value, where, unread)
        unread += [f"turn.content.{key}" for key in filled(left)]


def _text(content: Any, where: str, unread: list[str]) -> str:
    return "".join(value for kind, value in _parts(content, where, unread) if kind == "text")


def _result_text(content: Any, where: str) -> Any:
    """What a tool gave, where that is no text and no parts, as JSON text."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    known = [*PARTS]  # the type of a JSON schema may be a list, which no dict can be asked for
    if parts and all(isinstance(part, dict) and part.get("type") in known for part in parts):
        return content
    return to_json(content, where)


def _read_calls(calls: Any, where: str, unread: list[str]) -> list[Any]:
    """Calls: one or a list, objects or JSON text; OpenAI's, its older `function_call`, Anthropic's `tool_use`."""
    calls = from_json(calls, f"the call of {where}") if isinstance(calls, str) else calls
    found = []
    for call in filter(None, calls if isinstance(calls, list) else [calls]):
        left = dict(call) if isinstance(call, dict) else {}
        function = left.pop("function", left)
        name = function.pop("name", None) if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RowError(f"{where} calls a tool without a name")
        arguments = taken(function, ARGUMENT_KEYS)
        if isinstance(arguments, str):
            arguments = from_json(arguments.strip() or "{}", f"what {where} gives to {name}")
        if not isinstance(arguments, dict | None):
            raise RowError(f"what {where} gives to {name} is no JSON object")
        identity = {"id": left.pop("id")} if isinstance(left.get("id"), str) else {}
        unread += [f"turn.tool_calls.{key}" for key in filled({**left, **function}) if key not in ("type", "index")]
        found.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments or {}}})
    return found
