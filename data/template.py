"""Conversations -> tokens through the tokenizer's chat template, with the answers masked in.

Which characters are answers is told by the template's own {% generation %} marks, or, for the well-known
templates that have none, found by incremental rendering: the rendering up to an answer must be a prefix of
the whole, and the answer must follow it word for word up to its end-of-turn token.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ctcdraft.data.messages import THOUGHT_KEYS, Message
from ctcdraft.data.records import Conversation
from ctcdraft.data.sources import RowError

Messages = Sequence[Message]
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHANNEL = re.compile(r"<\|channel\|>(\w+)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|return\|>|$)", re.DOTALL)
ADVICE = (
    "wrap its answers in {% generation %}...{% endgeneration %}, give base.template=vicuna or plain, or keep "
    "data.labels=rewrite without a server, which needs no mask"
)

NO_LABEL = "none of its answers is to be learned (weight, train or loss is 0)"


class Family(NamedTuple):
    """signs: what all its templates contain; end: what ends an answer (None: the end-of-sequence token)."""

    name: str
    signs: tuple[str, ...]
    end: str | None


FAMILIES = (  # the first that fits
    Family("llama-3", ("<|start_header_id|>",), "<|eot_id|>"),
    Family("gemma", ("<start_of_turn>",), "<end_of_turn>"),
    Family("chatml", ("<|im_start|>",), "<|im_end|>"),  # Qwen's too
    Family("mistral", ("[INST]",), None),  # and llama-2
    Family("vicuna", ("USER", "ASSISTANT"), None),
)


Layout = tuple[str, list[tuple[int, int]]]  # a text, and where its answers are
AT_ONCE = 128


class Rendered(NamedTuple):
    """Tokens of a conversation and its loss mask: 1 on the assistant's tokens, each end of turn included."""

    ids: list[int]
    mask: Sequence[int]


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[Any] | None = None) -> list[int]:
    """Tokens up to where the assistant's next answer starts. Raises ValueError when the template refuses."""
    text, _ = _Template(tokenizer, tools).render(messages, add_generation_prompt=True)
    return _encoded(tokenizer, [text])[0].ids


def answer_message(
    tokenizer: Any, eos_ids: Sequence[int], messages: Messages, answer: Sequence[int], tools: list[Any] | None = None
) -> Message:
    """The message that the template writes as the tokens of an answer to `messages`, for the turns that follow.

    Special tokens inside the answer are a part of it: its content holds them, or, of gpt-oss's channels, the thought
    and the final words lie apart. Where the template writes no message that way, they are left out.
    """
    words = list(answer[:-1] if answer and answer[-1] in eos_ids else answer)
    plain = {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    whole = tokenizer.decode(words, skip_special_tokens=False)
    if whole == tokenizer.decode(words, skip_special_tokens=True):
        return plain
    parted = _parted(whole)
    template = _Template(tokenizer, tools)
    for message in (parted, {"role": "assistant", "content": whole}, plain):
        try:
            before, _ = template.render(messages, add_generation_prompt=True)
            text, _ = template.render([*messages, message])
        except RowError:
            continue
        if whole.strip() in (text.removeprefix(before) if text.startswith(before) else text):
            return message
    return parted if "reasoning_content" in parted else plain


def _parted(whole: str) -> Message:
    """gpt-oss's channels: what it thinks, and what it says in the end."""
    parts = CHANNEL.findall(whole)
    thought = "".join(words for channel, words in parts if channel == "analysis")
    said = "".join(words for channel, words in parts if channel == "final")
    return {"role": "assistant", "content": said} | ({"reasoning_content": thought} if thought else {})


def render(tokenizer: Any, messages: Messages, tools: list[Any] | None = None) -> Rendered:
    """Tokens and loss mask of one conversation. Raises as `render_all` does, RowError included."""
    (found,) = render_all(tokenizer, [Conversation("", tuple(messages), tools)])
    if isinstance(found, RowError):
        raise found
    return found


def render_all(
    tokenizer: Any, conversations: Sequence[Conversation], *, last_turn: bool = False
) -> Iterator[Rendered | RowError]:
    """Tokens and loss mask of each conversation (of its last answer alone, with last_turn), or why it has none.

    Raises ValueError, with advice, for a template that does not mark its answers and is of no known family, or
    whose marks cover nothing or everything.
    """
    plain = _Template(tokenizer, None)

    def laid_out(conversation: Conversation) -> Layout | RowError:
        template = _Template(tokenizer, conversation.tools) if conversation.tools else plain
        try:
            text, spans = template.answers(conversation.messages)
            return text, _labels(spans, conversation.messages, last_turn)
        except RowError as error:
            return error

    def masked(layouts: list[Layout | RowError], encodings: Any) -> Iterator[Rendered | RowError]:
        for layout in layouts:
            yield layout if isinstance(layout, RowError) else _masked(next(encodings), *layout)

    with ThreadPoolExecutor(1) as tokenizing:  # which needs no GIL: the next ones are rendered meanwhile
        before: tuple[list[Layout | RowError], Any] | None = None
        for start in range(0, len(conversations), AT_ONCE):
            layouts = [laid_out(conversation) for conversation in conversations[start : start + AT_ONCE]]
            texts = [layout[0] for layout in layouts if not isinstance(layout, RowError)]
            encoding = tokenizing.submit(_encoded, tokenizer, texts)
            if before:
                yield from masked(before[0], iter(before[1].result()))
            before = layouts, encoding
        if before:
            yield from masked(before[0], iter(before[1].result()))


def family_of(template: str) -> Family | None:
    """The known family of a template: its own marks come first and need none."""
    return next((family for family in FAMILIES if all(sign in template for sign in family.signs)), None)


@cache
def thought_key(template: str) -> str | None:
    """Under which key of a message a template looks for the thought before an answer."""
    return next((key for key in THOUGHT_KEYS if re.search(rf"[.'\"]{key}\b", template)), None)


def unread_by_template(tokenizer: Any, conversation: Conversation) -> list[str]:
    """What a conversation holds that the chat template never shows."""
    template = tokenizer.get_chat_template(tools=conversation.tools)
    thoughts = [m for m in conversation.messages if "reasoning_content" in m]
    return [
        *(["the thought of a turn (the template shows none)"] * len(thoughts) if not thought_key(template) else []),
        *(["tools (the template shows none)"] if conversation.tools and not re.search(r"\btools\b", template) else []),
    ]


def text_ids(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """(leading special tokens, tokens of the text itself)."""
    ids = tokenizer(text).input_ids
    bare = tokenizer(text, add_special_tokens=False).input_ids
    lead = 1 if ids[: len(bare) + 1] != bare and ids and ids[0] == tokenizer.bos_token_id else 0
    return ids[:lead], bare


class _Template:
    """A tokenizer's chat template, for conversations with these tools."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None) -> None:
        self.text, self.tools = tokenizer.get_chat_template(tools=tools), tools
        self.marked, self.family = bool(MARKS.search(self.text)), family_of(self.text)
        self.thought_key = thought_key(self.text)
        self._specials, self.eos = dict(tokenizer.special_tokens_map), tokenizer.eos_token
        unknown = {None, tokenizer.unk_token_id}
        known = [f.end for f in FAMILIES if f.end and tokenizer.convert_tokens_to_ids(f.end) not in unknown]
        self._ends = tuple({end: None for end in (*known, self.eos) if end})

    def render(self, messages: Messages, **options: bool) -> tuple[str, list[Any]]:
        """(text, the spans that its generation marks cover, where asked for)"""
        try:
            rendered: Any = render_jinja_template(  # annotated as a string, returns two lists
                conversations=[[self._readable(message) for message in messages]],
                tools=self.tools,
                chat_template=self.text,
                **{**self._specials, **options},
            )
        except TemplateError as error:
            raise RowError(f"the chat template refuses it: {error}") from error
        except (TypeError, KeyError, AttributeError) as error:  # a template that takes other fields for granted
            raise RowError(f"the chat template fails on it: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if spans else []

    def _readable(self, message: Message) -> Message:
        """The message with its thought under the key that the template reads, where it reads any."""
        if len(message) == 2:
            return message
        if "tool_calls" in message and "tool_calls" not in self.text:
            raise RowError("the chat template shows no tool calls")
        kept = {key: value for key, value in message.items() if key not in ("label", "reasoning_content")}
        if self.thought_key and "reasoning_content" in message:
            kept[self.thought_key] = message["reasoning_content"]
        return kept

    def answers(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and the characters [start, end) of each answer, its end of turn included."""
        if self.marked:
            text, marks = self.render(messages, return_assistant_tokens_mask=True)
            spans = [(start, _behind_end(text, stop, self._ends)) for start, stop in marks if stop > start]
            if not spans or sum(stop - start for start, stop in spans) >= len(text):
                raise ValueError(
                    f"the chat template's generation marks cover {'all' if spans else 'nothing'}: {ADVICE}"
                )
            return text, spans
        if self.family is None:
            raise ValueError(
                "the tokenizer's chat template does not mark the assistant's tokens, and is none of the known ones "
                f"({', '.join(f.name for f in FAMILIES)}): {ADVICE}"
            )
        text, _ = self.render(messages)
        end = self.family.end or self.eos
        at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._answer(messages, i, text, end) for i in at]

    def _answer(self, messages: Messages, index: int, text: str, end: str) -> tuple[int, int]:
        """Where the answer messages[index] lies in `text`, found by rendering what comes before it."""
        before, _ = self.render(messages[:index], add_generation_prompt=True)
        content = messages[index]["content"].strip()
        if not text.startswith(before):
            before = before.rstrip()  # "[/INST] " before an answer that brings its own space
            if not text.startswith(before):
                raise RowError(f"the chat template renders what comes before turn {index} otherwise when it goes on")
        start = len(before)
        said = text.find(content, start)
        if said < 0:
            raise RowError(f"the chat template does not show turn {index} as it is")
        stop = text.find(end, said + len(content))
        more = not content or "tool_calls" in messages[index]  # a thought alone, or calls, stand before the end
        between = "" if more else text[said + len(content) : stop].strip()
        if stop < 0 or text.find(end, start, said) >= 0 or between:
            raise RowError(f"the chat template does not end turn {index} with {end}")
        return start, stop + len(end)


def _labels(spans: list[tuple[int, int]], messages: Messages, last_turn: bool) -> list[tuple[int, int]]:
    """The spans of answers that are learned. Raises RowError where that is none of them."""
    wanted = [message.get("label", True) for message in messages if message["role"] == "assistant"]
    if not all(wanted):
        if len(spans) != len(wanted):
            raise RowError(f"{len(spans)} of {len(wanted)} answers are marked: which of them is no label is not known")
        spans = [span if label else (span[0], span[0]) for span, label in zip(spans, wanted, strict=True)]
    spans = [(start, stop) for start, stop in (spans[-1:] if last_turn else spans) if stop > start]
    if wanted and not spans:
        raise RowError(NO_LABEL)
    return spans


def _behind_end(text: str, stop: int, ends: tuple[str, ...]) -> int:
    """An answer ends with its end of turn, also where the template marks the words alone, or the line break behind."""
    if text.endswith(ends, 0, stop):
        return stop
    inside = text[:stop].rstrip()
    if inside.endswith(ends):
        return len(inside)
    follows = next((e for e in ends if text.startswith(e, stop)), "")
    return stop + len(follows)


def _encoded(tokenizer: Any, texts: list[str]) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} cannot say where its tokens lie: a fast tokenizer is needed")
    backend.no_padding()
    backend.no_truncation()
    return backend.encode_batch(texts, add_special_tokens=False)


def _masked(encoding: Any, text: str, spans: list[tuple[int, int]]) -> Rendered:
    mask = bytearray(len(encoding))  # which numpy takes as it is
    for start, stop in spans:
        first, last = _token_at(encoding, start, stop, 1), _token_at(encoding, stop - 1, start - 1, -1)
        if first is None or last is None:
            continue
        if text[encoding.token_to_chars(first)[0] : start].strip():  # begins in the prompt's last word
            first += 1
        mask[first : last + 1] = b"\1" * (last + 1 - first)
    return Rendered(encoding.ids, mask)


def _token_at(encoding: Any, char: int, stop: int, step: int) -> int | None:
    """The token that holds a character, or the nearest one towards `stop` (white space may belong to none)."""
    found = encoding.char_to_token(char)
    if found is not None:
        return found
    return next((t for c in range(char, stop, step) if (t := encoding.char_to_token(c)) is not None), None)
