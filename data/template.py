"""Conversations -> tokens through the tokenizer's chat template, with the answers masked in.

An answer is learned as the template writes it while no turn follows it, which is what serving sees: some templates drop
thoughts, or more, once the conversation goes on. Which characters it has there is told by the template's own
{% generation %} marks, or, where it has none, found by incremental rendering: what is rendered before the answer must
be a prefix, and the answer must follow it word for word up to the special token that ends it, or begins the next turn.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinja2 import Template
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from ctcdraft.model.base.llm import Base

from .end_of_turn import end_of_turn
from .messages import THOUGHT_KEYS, Message
from .records import Conversation
from .sources import RowError
from .unshown import unshown

Messages = Sequence[Message]
Span = tuple[int, int]  # characters [start, end)
TemplateArgs = Mapping[str, Any]  # of JSON values
NO_ARGS: TemplateArgs = {}
GIVEN = {  # to a template by rendering, beside the special tokens
    *("conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask", "raise_exception", "strftime_now"),
    *DEFAULT_NAMESPACE,
}
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHANNEL = re.compile(r"<\|channel\|>(\w+)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|return\|>|$)", re.DOTALL)
ADVICE = (
    "wrap its answers in {% generation %}...{% endgeneration %}, give base.template=vicuna or plain, or keep "
    "data.labels=rewrite without a server, which needs no mask"
)
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
NO_LABEL = "none of its answers is to be learned (it has none, or weight, train or loss is 0)"
LOST_TURN = "a turn behind the last answer that is learned (the template would change that answer)"


class Rendered(NamedTuple):
    """A sequence of tokens and its loss mask: 1 on the assistant's tokens, each end of turn included."""

    ids: list[int]
    mask: Sequence[int]


@dataclass(frozen=True)
class Rendering:
    """A conversation as one sequence, or as several where the template changes an answer once it is not the last;
    unread: names of what the conversation holds and none of them shows."""

    sequences: list[Rendered]
    unread: list[str]


@dataclass(frozen=True)
class _Text:
    """A rendered text, and where the answers in it lie that are learned."""

    text: str
    spans: list[Span]

    def leads(self, text: str) -> bool:
        """Does `text` begin with all of this up to the end of its answers?"""
        return text.startswith(self.text[: max((stop for _, stop in self.spans), default=0)])


def with_template_args(base: Any, template_args: Mapping[str, Any]) -> Any:
    """The base (of model/base/llm.py), whose chats are rendered with these from now on.

    Raises ValueError where rendering itself gives one of them, or the template never reads it.
    """
    if not template_args:
        return replace(base, template_args=NO_ARGS)
    tokenizer, templates = base.tokenizer, base.tokenizer.chat_template
    templates = list(templates.values()) if isinstance(templates, dict) else [templates]
    given = {*GIVEN, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map}
    parsed = (_compiled(template).environment.parse(template) for template in templates)
    read = set().union(*map(find_undeclared_variables, parsed)) - given  # those that they do not set
    for name in template_args:
        if name in given:
            raise ValueError(f"data.template_args: rendering itself gives the chat template its {name}: leave it out")
        if name not in read:
            known = ", ".join(sorted(read)) or "no name at all"
            raise ValueError(f"data.template_args: the chat template never reads {name}; it reads {known}")
    return replace(base, template_args=dict(template_args))


def _compiled(template: str) -> Template:
    """The template as transformers compiles it. Raises ValueError where the text is none."""
    try:
        return _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error


def prompt_ids(
    tokenizer: Any, messages: Messages, tools: list[Any] | None = None, template_args: TemplateArgs = NO_ARGS
) -> list[int]:
    """Tokens up to where the assistant's next answer starts. Raises ValueError when the template refuses."""
    text = _Template(tokenizer, tools, template_args).prompt(messages)
    return _encoded(tokenizer, [text])[0].ids


def answer_message(base: Base, messages: Messages, answer: Sequence[int], tools: list[Any] | None = None) -> Message:
    """The message that a base's template writes as the tokens of its answer to `messages`, for the turns that follow.

    Special tokens inside the answer are a part of it: its content holds them, or, of gpt-oss's channels, the thought
    and the final words lie apart. Where the template writes no message that way, they are left out. Raises RowError
    where it refuses the `messages` themselves.
    """
    tokenizer = base.tokenizer
    words = list(answer[:-1] if answer and answer[-1] in base.eos_ids else answer)
    plain = {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    whole = tokenizer.decode(words, skip_special_tokens=False)
    if whole == tokenizer.decode(words, skip_special_tokens=True):
        return plain
    parts = CHANNEL.findall(whole)  # gpt-oss's: what it thinks, and what it says in the end
    thought, said = ("".join(text for name, text in parts if name == one) for one in ("analysis", "final"))
    parted = {"role": "assistant", "content": said} | ({"reasoning_content": thought} if thought else {})
    template = _Template(tokenizer, tools, base.template_args)
    before = template.prompt(messages)
    for message in (parted, {"role": "assistant", "content": whole}, plain):
        try:
            text, _ = template.render([*messages, message])
        except RowError:
            continue
        if whole.strip() in (text.removeprefix(before) if text.startswith(before) else text):
            return message
    return parted if "reasoning_content" in parted else plain


def render(
    tokenizer: Any, conversation: Conversation, *, turns: str = "each", template_args: TemplateArgs = NO_ARGS
) -> Rendering:
    """The conversation's sequences, with `each` of its answers or the `last` alone as labels.

    Raises RowError where it has none, with advice where the template does not show where they end.
    """
    texts, unread = _Template(tokenizer, conversation.tools, template_args).texts(conversation.messages, turns)
    encodings = _encoded(tokenizer, [text.text for text in texts])
    return Rendering([_masked(encoding, text) for encoding, text in zip(encodings, texts, strict=True)], unread)


def unread_in_prompt(tokenizer: Any, conversation: Conversation, template_args: TemplateArgs = NO_ARGS) -> list[str]:
    """What stands before a conversation's first answer, tools included, and the chat template does not show."""
    messages, template = conversation.messages, _Template(tokenizer, conversation.tools, template_args)
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), -1)
    try:
        text = template.prompt(messages[: asked + 1])
    except RowError:  # which rejects it where it is to be answered
        return []
    return unshown(messages[: asked + 1], conversation.tools, [text])


class _Template:
    """A tokenizer's chat template, for conversations with these tools."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None, args: TemplateArgs) -> None:
        self.text, self.tools, self.args = tokenizer.get_chat_template(tools=tools), tools, args
        self._tokenizer = tokenizer
        self.marked = bool(MARKS.search(self.text))
        self._specials = dict(tokenizer.special_tokens_map)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = tuple({end: None for end in (*special, tokenizer.eos_token) if end})

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and what the template's {% generation %} marks cover. Raises RowError where the template refuses
        the messages."""
        readable = [self._readable(message) for message in messages]
        variables = {"add_generation_prompt": add_generation_prompt, **self._specials, **self.args}
        template = _compiled(self.text)
        try:
            return _render_with_assistant_indices(template, readable, tools=self.tools, documents=None, **variables)
        except TemplateError as error:
            raise RowError(f"the chat template refuses it: {error}") from error
        except Exception as error:  # whatever a template that takes other messages for granted stumbles over
            raise RowError(f"the chat template fails on it: {error}") from error

    def prompt(self, messages: Messages) -> str:
        """The text up to where the next answer starts."""
        return self.render(messages, add_generation_prompt=True)[0]

    def _readable(self, message: Message) -> Message:
        """The message with its thought under every key that templates read."""
        if "tool_calls" in message and "tool_calls" not in self.text:
            raise RowError("the chat template shows no tool calls")
        thoughts = dict.fromkeys(THOUGHT_KEYS, message["reasoning_content"]) if "reasoning_content" in message else {}
        return {key: value for key, value in message.items() if key != "label"} | thoughts

    def texts(self, messages: Messages, turns: str) -> tuple[list[_Text], list[str]]:
        """Texts that hold the answers to be learned, each as it is while no turn follows it, in order: the whole
        conversation's alone where that holds them all. And the names of what none of them shows.

        Raises RowError where an answer is not found.
        """
        learned = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [i for i in (learned[-1:] if turns == "last" else learned) if messages[i].get("label", True)]
        if not learned:
            raise RowError(NO_LABEL)
        left = [self._answer(messages, i) for i in learned]
        text, rendered = left[-1].text, messages[: learned[-1] + 1]
        if len(rendered) < len(messages) and left[-1].leads(whole := self.render(messages)[0]):
            text, rendered = whole, messages
        texts: list[_Text] = []
        while left:
            texts.append(_Text(text, [span for answer in left if answer.leads(text) for span in answer.spans]))
            left = [answer for answer in left if not answer.leads(text)]
            text = left[-1].text if left else text
        if not any(each.spans for each in texts):
            raise RowError(f"the chat template's generation marks cover nothing of its answers: {ADVICE}")
        unread = [LOST_TURN] * (len(messages) - len(rendered))
        return texts[::-1], unread + unshown(rendered, self.tools, [each.text for each in texts])

    def _answer(self, messages: Messages, index: int) -> _Text:
        """What is rendered up to the answer messages[index] while no turn follows it, and where that is in it."""
        text, marks = self.render(messages[: index + 1])
        content = messages[index]["content"].strip()
        if marks and sum(stop - start for start, stop in marks) >= len(text):
            raise RowError(f"the chat template's generation marks cover all: {ADVICE}")
        if self.marked:
            earlier = sum(message["role"] == "assistant" for message in messages[:index])
            if len(marks) != earlier + 1:  # most templates have one for each answer
                earlier = len(self.render(messages[:index], add_generation_prompt=True)[1])
            spans = [(start, _behind_end(text, stop, self._ends)) for start, stop in marks[earlier:] if stop > start]
            if spans and (not content or not text[spans[0][0] :].lstrip().startswith(content)):
                before = self.prompt(messages[:index])  # SmolLM3's marks cover what this ends with
                first = len(before) if text.startswith(before) else 0
                spans = [(max(start, first), stop) for start, stop in spans]
            return _Text(text, spans)

        before, calls = self.prompt(messages[:index]), "tool_calls" in messages[index]
        if not text.startswith(before) and before.rstrip().endswith(THOUGHT_START) and not calls:
            thought = messages[index].get("reasoning_content")  # which R1's template never shows: as the base says it
            said = f"{thought.strip()}\n{THOUGHT_END}\n\n{content}" if thought else content.removeprefix(THOUGHT_START)
            end = next((token for token in self._ends if text.rstrip().endswith(token)), "")
            text = before + said.lstrip() + end if THOUGHT_END in said else text
        if not text.startswith(before):
            before = before.rstrip()  # "[/INST] " before an answer that brings its own space
        if not text.startswith(before):
            args = f" with data.template_args={json.dumps(self.args)}" if self.args else ""
            raise RowError(
                f"the chat template renders what comes before turn {index} otherwise when it goes on{args}: {ADVICE}"
            )
        start = len(before)
        if not text.rstrip().endswith(self._ends) and not calls:  # GLM's next turn ends an answer
            text += (end_of_turn(self._tokenizer) or ("",))[0]
        if before.rstrip().endswith(THOUGHT_START):  # then the prompt has begun the thought
            content = content.removeprefix(THOUGHT_START).lstrip()
        shown = str.__contains__ if calls else str.endswith  # calls stand between the words and the end
        end, found, whole = "", False, text.rstrip()
        while not found and whole.endswith(self._ends):  # behind the end of a turn Phi-3 puts that of the text
            end = next(token for token in self._ends if whole.endswith(token))
            stop = len(whole) - len(end)
            whole = text[:stop].rstrip()
            words = whole[start:]
            found = shown(words, content) or shown("".join(words.split()), "".join(content.split()))
            found = found and words not in self._ends  # which is the end of an empty answer
        if not end:
            raise RowError(f"the chat template ends turn {index} with no special token: {ADVICE}")
        if stop < start or not found:
            raise RowError(f"the chat template does not show turn {index} as it is: {ADVICE}")
        if not calls and end in words.removesuffix(content):
            raise RowError(f"the chat template ends turn {index} with {end} before its words")
        return _Text(text, [(start, stop + len(end))])


def _behind_end(text: str, stop: int, ends: tuple[str, ...]) -> int:
    """An answer ends with its end of turn, also where the template marks the words alone, or the line break behind."""
    follows = next((e for e in ends if text.startswith(e, stop)), "")
    inside = text[:stop].rstrip()
    return len(inside) if not follows and inside.endswith(ends) else stop + len(follows)


def _encoded(tokenizer: Any, texts: list[str]) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} cannot say where its tokens lie: a fast tokenizer is needed")
    backend.no_padding()
    backend.no_truncation()
    return backend.encode_batch(texts, add_special_tokens=False)


def _masked(encoding: Any, found: _Text) -> Rendered:
    begins, ends = ([token[side] for token in encoding.offsets] for side in (0, 1))
    mask = bytearray(len(encoding))  # which numpy takes as it is
    for start, stop in found.spans:
        first, last = bisect_right(ends, start), bisect_left(begins, stop)
        if first < last and found.text[begins[first] : start].strip():  # it begins in the prompt's last word
            first += 1
        mask[first:last] = b"\1" * (last - first)
    return Rendered(encoding.ids, mask)
