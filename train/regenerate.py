"""The base rewrites every assistant turn, in order, on top of its own earlier answers: here, or behind a server."""

import asyncio
import os
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from tqdm import tqdm

from ctcdraft.data.messages import Message
from ctcdraft.data.prompts import LEAST_ROOM, Lengths
from ctcdraft.data.records import Conversation
from ctcdraft.data.secrets import masked
from ctcdraft.data.server import Answer, ChatServer, Refusal, ServerError
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import Example
from ctcdraft.data.template import NO_LABEL, THOUGHT_END, THOUGHT_START, Rendered, answer_message, prompt_ids, render
from ctcdraft.data.unshown import shows
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.generate import continued, work_key

from .options import MayDiffer

# What becomes of the turns that are asked. errors: a server failed at every try; skipped: nobody was asked, because of
# what came before.
OUTCOMES = ("answered", "refused", "errors", "skipped")
SERVER = re.compile(r"https?://([^/?#\s]*@)?(\[[\da-fA-F:.]+\]|[^/?#\s:@\[\]]+)(:\d+)?(/[^?#\s]*)?")
LEAST_REFUSED = 5  # requests, before what is refused says something of the server


@dataclass(frozen=True)
class RegenerateConfig:
    """How the base rewrites the answers where data.labels=rewrite. OPENAI_API_KEY is sent where it is set."""

    # one rewriting of every conversation per entry; 0: greedy
    temperatures: Annotated[list[NonNegativeFloat], Field(min_length=1)] = field(default_factory=lambda: [0.0])
    # of temperatures above 0: the likeliest tokens with this probability in all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # http://<host>:<port>/v1 of an OpenAI-compatible server; null: the base in this process
    url: MayDiffer[str | None] = None
    model: str | None = None  # the base's name there; null: the first that it lists
    concurrency: MayDiffer[PositiveInt] = 16  # requests at once
    retries: MayDiffer[NonNegativeInt] = 12  # after a failure, with doubling waits
    timeout: MayDiffer[PositiveFloat] = 300.0  # seconds for one answer
    # what failed at every try: false: the next command asks again; true: rejected
    reject_errors: MayDiffer[bool] = False

    def __post_init__(self) -> None:
        if self.url is not None and not SERVER.fullmatch(self.url):
            raise ValueError(
                f"data.regenerate.url={masked(self.url)}: give http://<host>:<port>/v1, without a query: requests go "
                "to <url>/chat/completions, and a key belongs into the environment as OPENAI_API_KEY"
            )


@dataclass(frozen=True)
class AnswersConfig:
    """What becomes of the answers. A trained head keeps template_args. Texts the base always continues."""

    # rewrite: the base writes every answer | argmax: its choice along given ones | given: as they are
    labels: Literal["rewrite", "argmax", "given"] = "rewrite"
    turns: Literal["each", "last"] = "each"  # each | last: which answers of a conversation are labels
    # what the chat template gets beside the messages: {enable_thinking: false}
    template_args: dict[str, Any] | None = None
    regenerate: RegenerateConfig = RegenerateConfig()
    # shortest and longest beginning of a text that the base continues
    prompt_tokens: Lengths = field(default_factory=lambda: [8, 140])
    samples_per_text: PositiveInt = 4  # beginnings of each text
    max_new_tokens: PositiveInt = 192  # per answer
    batch_size: MayDiffer[PositiveInt] = 64  # conversations that the base answers together

    def __post_init__(self) -> None:
        if self.prompt_tokens[0] > self.prompt_tokens[-1]:
            raise ValueError(f"data.prompt_tokens={self.prompt_tokens}: give [shortest, longest]")


class Dialogue:
    """One conversation on its way at one temperature: what has been said, as messages and as the very tokens.

    turns: how many were `asked`, and how many had each of the OUTCOMES.
    """

    def __init__(self, base: Base, conversation: Conversation, temperature: float, sample: int) -> None:
        self.base, self.conversation = base, conversation
        self.temperature, self.name = temperature, f"{conversation.id}#{sample}"
        self.said: list[Message] = []
        self.prompt: list[int] = []
        self.reason = ""
        self.unread: list[str] = []
        self._left = [m for m in conversation.messages if m["role"] != "assistant"]
        self._answers: list[tuple[list[int], list[int]]] = []  # ids of all up to an answer, and the mask of it alone
        self.turns = Counter(asked=self.left)

    @property
    def left(self) -> int:
        """User turns that are not answered yet."""
        return sum(m["role"] == "user" for m in self._left)

    def next_prompt(self) -> bool:
        """Is there another turn to answer? `prompt` and `said` then hold all up to it."""
        if not self._left:
            return False
        if self._left[0]["role"] == "tool":
            return self._end(f"answer {len(self._answers)} would have had to call the same tool")
        turns = 2 if self._left[0]["role"] == "system" else 1
        said = [*self.said, *self._left[:turns]]
        try:
            self.prompt = prompt_ids(self.base.tokenizer, said, self.conversation.tools, self.base.template_args)
        except RowError as error:
            return self._end(str(error))
        problem = self.base.unreadable(self.prompt)
        if problem:
            return self._end(problem)
        if len(self.prompt) + LEAST_ROOM > self.base.context_length:
            return self._end(
                f"turn {len(self._answers) + 1} has {len(self.prompt)} tokens, more than the context holds"
            )
        self.said, self._left = said, self._left[turns:]
        return True

    def lose(self, outcome: str, reason: str) -> None:
        """The turn that was asked last has no answer: it was `refused`, or `errors` kept it from one this time."""
        self.turns[outcome] += 1
        self._end(reason)

    def answer(self, tokens: list[int]) -> None:
        """The tokens that the base put behind `prompt`."""
        message = answer_message(self.base, self.said, tokens, self.conversation.tools)
        mask = [0] * len(self.prompt) + [1] * len(tokens)
        self._add([*self.prompt, *tokens], mask, message, cut=tokens[-1] not in self.base.eos_ids)

    def answer_text(self, answer: Answer) -> None:
        """What a server said behind `said`, tokenised as the template writes it. Raises RowError where it cannot be."""
        self.unread += (f"answer.{name.removeprefix('turn.')}" for name in answer.unread)
        decode, message, words = self.base.tokenizer.decode, answer.message, answer.message["content"].strip()
        ids, mask = self._rendered(message)
        thinks = words.startswith(THOUGHT_START) or decode(self.prompt).rstrip().endswith(THOUGHT_START)
        thinks &= "reasoning_content" not in message and (answer.cut or THOUGHT_END in words)
        if thinks and not decode(ids[mask.index(1) :]).strip().startswith(words):
            # no parser took the thought off, and the template writes an empty one before it
            thought, _, words = words.removeprefix(THOUGHT_START).partition(THOUGHT_END)
            message = {**message, "content": words.strip(), "reasoning_content": thought.strip()}
            ids, mask = self._rendered(message)
        start, end = mask.index(1), len(ids) - mask[::-1].index(1)
        thought = message.get("reasoning_content", "")
        if not shows(decode(ids[start:end]), thought):
            raise RowError("the answer comes with a thought, which the chat template does not show")
        if answer.cut:  # what closes the turn, or the thought, is the template's and not the base's
            words, end = (message["content"] or thought).strip(), end - 1
            while words and words in decode(ids[start : end - 1]):
                end -= 1
        self._add(ids[:end], [*mask[:end]], message, cut=answer.cut)

    def _rendered(self, message: Message) -> Rendered:
        """What was said, and this answer to it. Raises RowError where the template or the base does not take it."""
        conversation = Conversation("", (*self.said, message), self.conversation.tools)
        args = self.base.template_args
        found = render(self.base.tokenizer, conversation, turns="last", template_args=args).sequences[-1]
        if problem := self.base.unreadable(found.ids) if any(found.mask) else "the answer has no tokens":
            raise RowError(problem)
        return found

    def examples(self, turns: str) -> list[Example]:
        """The sequences with `each` of its answers, or the `last` alone: one, or several where the template writes an
        earlier answer otherwise than it was when it was the last."""
        wanted = [m.get("label", True) for m in self.conversation.messages if m["role"] == "assistant"]
        sequences: list[tuple[list[int], list[int]]] = []
        for number, (ids, mask) in enumerate(self._answers):
            if not all(wanted[number : number + 1]):  # the row, where it has this answer, says that it is no label
                mask = [0] * len(ids)
            if turns == "each" and sequences and ids[: len(sequences[-1][0])] == sequences[-1][0]:
                _, before = sequences.pop()
                mask = [*before, *mask[len(before) :]]
            sequences.append((ids, mask))
        found = [Example(ids, mask, ids) for ids, mask in sequences[0 if turns == "each" else -1 :] if any(mask)]
        if self._answers and not found:
            self.reason = NO_LABEL
        return found

    def _add(self, ids: list[int], mask: list[int], message: Message, *, cut: bool) -> None:
        self._answers.append((ids, mask))
        self.turns["answered"] += 1
        self.said = [*self.said, message]
        if cut:
            self._end(f"answer {len(self._answers)} was cut")

    def _end(self, reason: str) -> bool:
        self.turns["skipped"] += self.left
        self._left, self.reason = [], reason
        return False


def rewrite(
    base: Base, chats: Sequence[Conversation], config: AnswersConfig, journal: dict[str, Any], *, seed: int, title: str
) -> tuple[list[Dialogue], Counter[str]]:
    """Every conversation at every temperature, its turns answered, in order; and what became of the turns.

    What the journal knows is not asked again, so that a killed process that is started again repeats nothing,
    and its outcome is the same to the byte. Raises ValueError when a server refuses more than half of what it is asked,
    and not by chance: a last shard may ask it a single thing.
    """
    pairs, url = list(enumerate(config.regenerate.temperatures)), config.regenerate.url
    dialogues = [Dialogue(base, chat, temperature, sample) for chat in chats for sample, temperature in pairs]
    asked = sum(d.left for d in dialogues)
    with tqdm(total=asked, desc=title, unit="turn", mininterval=1, disable=not asked) as bar:
        if url is None:
            ready = [d for d in dialogues if d.next_prompt()]
            ready.sort(key=lambda d: -d.left)  # long ones do not end last
            work = deque((d, d.prompt, d.temperature, d.name) for d in ready)
            sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": seed}
            made = 0
            for dialogue, tokens in continued(base, work, config.regenerate.top_p, journal, **sizes):
                dialogue.answer(tokens)
                if dialogue.next_prompt():
                    work.append((dialogue, dialogue.prompt, dialogue.temperature, dialogue.name))
                made += len(tokens)
                bar.set_postfix_str(f"{made / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", False)
                bar.update()
        else:
            asyncio.run(_ask_server(url, dialogues, config, journal, seed=seed, bar=bar))
        bar.update(asked - bar.n)  # turns after a cut answer, or beyond the context, are not asked
    turns = Counter({name: sum(d.turns[name] for d in dialogues) for name in ("asked", *OUTCOMES)})
    refused, answered = turns["refused"], turns["answered"]
    if refused > answered and refused >= LEAST_REFUSED:
        first = next(d.reason for d in dialogues if d.turns["refused"])
        raise ValueError(
            f"data.regenerate.url={url}: {refused} of {refused + answered} requests were refused ({first})"
        )
    return dialogues, turns


async def _ask_server(
    url: str, dialogues: list[Dialogue], config: AnswersConfig, journal: dict[str, Any], *, seed: int, bar: tqdm
) -> None:
    asking = config.regenerate

    async def converse(server: ChatServer, dialogue: Dialogue) -> None:
        while dialogue.next_prompt():
            key, noise = work_key(dialogue.said, dialogue.name, dialogue.temperature, asking.top_p, seed)
            room = dialogue.base.context_length - len(dialogue.prompt)
            options: dict[str, Any] = {"temperature": dialogue.temperature}
            options["max_tokens"] = min(config.max_new_tokens, room)
            if dialogue.temperature:
                options |= {"top_p": asking.top_p, "seed": noise % 2**31}
            if dialogue.base.template_args:
                options["chat_template_kwargs"] = dialogue.base.template_args
            try:
                if (known := journal.get(key)) is None:
                    known = await server.answer(dialogue.said, tools=dialogue.conversation.tools, **options)
                    journal[key] = known
                dialogue.answer_text(Answer._make(known))
            except (ServerError, RowError) as error:
                dialogue.lose("refused" if isinstance(error, (Refusal, RowError)) else "errors", str(error))
            bar.update()

    timeout = httpx.Timeout(asking.timeout, connect=min(asking.timeout, 10.0))
    limits = httpx.Limits(max_connections=asking.concurrency)
    key = os.environ.get("OPENAI_API_KEY", "").strip()  # a file's line break is no part of it
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
        server = ChatServer(client, url, asking.model, concurrency=asking.concurrency, retries=asking.retries)
        await asyncio.gather(*(converse(server, dialogue) for dialogue in dialogues))
