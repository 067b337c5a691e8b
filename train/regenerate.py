"""The base rewrites every assistant turn, in order, on top of its own earlier answers: here, or behind a server."""

import asyncio
import os
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from ctcdraft.data.messages import Message
from ctcdraft.data.prompts import LEAST_ROOM
from ctcdraft.data.records import Conversation
from ctcdraft.data.server import Answer, ChatServer, Refusal, ServerError
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import Example, Journal
from ctcdraft.data.template import NO_LABEL, Rendered, answer_message, prompt_ids, render_all
from ctcdraft.data.unshown import unshown
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.generate import continued, work_key

from .shards import DataConfig

# What becomes of the turns that are asked. errors: a server failed at every try; skipped: nobody was asked, because of
# what came before.
OUTCOMES = ("answered", "refused", "errors", "skipped")


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
        self._wanted = [m.get("label", True) for m in conversation.messages if m["role"] == "assistant"]
        self._left = [m for m in conversation.messages if m["role"] != "assistant"]
        self.turns = Counter(asked=self.left)
        self._sequences: list[tuple[list[int], list[int]]] = []  # ids and mask: the last one grows with every answer
        self._last: list[tuple[list[int], list[int]]] = []  # the last answer alone, behind all before it

    @property
    def answered(self) -> int:
        return self.turns["answered"]

    @property
    def left(self) -> int:
        """User turns that are not answered yet."""
        return sum(m["role"] == "user" for m in self._left)

    def next_prompt(self) -> bool:
        """Is there another turn to answer? `prompt` and `said` then hold all up to it."""
        if not self._left:
            return False
        if self._left[0]["role"] == "tool":
            return self._end(f"answer {self.answered} would have had to call the same tool")
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
            return self._end(f"turn {self.answered + 1} has {len(self.prompt)} tokens, more than the context holds")
        self.said, self._left = said, self._left[turns:]
        return True

    def lose(self, outcome: str, reason: str) -> None:
        """The turn that was asked last has no answer: it was `refused`, or `errors` kept it from one this time."""
        self.turns[outcome] += 1
        self._end(reason)

    def answer(self, tokens: list[int]) -> None:
        """The tokens that the base put behind `prompt`."""
        base, tools = self.base, self.conversation.tools
        message = answer_message(base.tokenizer, base.eos_ids, self.said, tokens, tools, base.template_args)
        mask = [0] * len(self.prompt) + [1] * len(tokens)
        self._add([*self.prompt, *tokens], mask, message)
        if tokens[-1] not in self.base.eos_ids:
            self._end(f"answer {self.answered} was cut")

    def answer_text(self, answer: Answer) -> None:
        """What a server said behind `said`, tokenised as the template writes it. Raises RowError where it cannot be."""
        conversation = Conversation("", (*self.said, answer.message), self.conversation.tools)
        self.unread += (f"answer.{name.removeprefix('turn.')}" for name in answer.unread)
        args = self.base.template_args
        (found,) = render_all(self.base.tokenizer, [conversation], turns="last", template_args=args)
        if isinstance(found, RowError):
            raise found
        rendered = found.sequences[-1]
        problem = self.base.unreadable(rendered.ids) if any(rendered.mask) else "the answer has no tokens"
        if problem:
            raise RowError(problem)
        labels = self.base.tokenizer.decode([i for i, m in zip(rendered.ids, rendered.mask, strict=True) if m])
        thought = {"reasoning_content": answer.message.get("reasoning_content", "")}
        if unshown([thought], None, [labels]):
            raise RowError("the answer comes with a thought, which the chat template does not show")
        end = len(rendered.mask) - rendered.mask[::-1].index(1)
        if answer.cut:  # what closes the turn, or the thought, is the template's and not the base's
            end = self._end_of_words(rendered, end, answer.message)
        self._add(rendered.ids[:end], rendered.mask[:end], answer.message)
        if answer.cut:
            self._end(f"answer {self.answered} was cut")

    def _end_of_words(self, rendered: Rendered, end: int, message: Message) -> int:
        """Where the words of a cut answer end in the rendering, whose labels end at `end`."""
        if message["content"] or "reasoning_content" not in message:
            return end - 1
        start, thought = rendered.mask.index(1), message["reasoning_content"].strip()

        def length(stop: int) -> int:
            return len(self.base.tokenizer.decode(rendered.ids[start:stop]))

        whole = self.base.tokenizer.decode(rendered.ids[start:end])
        return bisect_right(range(end), whole.find(thought) + len(thought), lo=start + 1, key=length) - 1

    def examples(self, turns: str) -> list[Example]:
        """The sequences with `each` of its answers, or the `last` alone: one, or several where the template writes an
        earlier answer otherwise than it was when it was the last."""
        sequences = self._sequences if turns == "each" else self._last
        found = [Example(ids, mask, ids) for ids, mask in sequences if any(mask)]
        if self.answered and not found:
            self.reason = NO_LABEL
        return found

    def _add(self, ids: list[int], mask: Sequence[int], message: Message) -> None:
        """An answer behind all that was said before it; the mask is that of its own tokens."""
        if not all(self._wanted[self.answered : self.answered + 1]):  # the row, where it has it, says that it is none
            mask = [0] * len(ids)
        self._last = [(ids, [*mask])]
        if self._sequences and ids[: len(self._sequences[-1][0])] == self._sequences[-1][0]:
            _, before = self._sequences.pop()
            mask = [*before, *mask[len(before) :]]
        self._sequences.append((ids, [*mask]))
        self.turns["answered"] += 1
        self.said = [*self.said, message]

    def _end(self, reason: str) -> bool:
        self.turns["skipped"] += self.left
        self._left, self.reason = [], reason
        return False


def rewrite(
    base: Base, conversations: Sequence[Conversation], config: DataConfig, journal: Journal, *, seed: int, title: str
) -> tuple[list[Dialogue], Counter[str]]:
    """Every conversation at every temperature, its turns answered, in order; and what became of the turns.

    What the journal knows is not asked again, so that a killed process that is started again repeats nothing,
    and its outcome is the same to the byte. Raises ValueError when a server refuses more than half of what it is asked.
    """
    pairs, url = list(enumerate(config.regenerate.temperatures)), config.regenerate.url
    dialogues = [Dialogue(base, c, temperature, sample) for c in conversations for sample, temperature in pairs]
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
            asyncio.run(_ask_server(url, dialogues, config, journal, seed, bar))
        bar.update(asked - bar.n)  # turns after a cut answer, or beyond the context, are not asked
    turns = Counter({name: sum(d.turns[name] for d in dialogues) for name in ("asked", *OUTCOMES)})
    refused, answered = turns["refused"], turns["answered"]
    if refused > answered:
        first = next(d.reason for d in dialogues if d.turns["refused"])
        raise ValueError(
            f"data.regenerate.url={url}: {refused} of {refused + answered} requests were refused ({first})"
        )
    return dialogues, turns


async def _ask_server(
    url: str, dialogues: list[Dialogue], config: DataConfig, journal: Journal, seed: int, bar: tqdm
) -> None:
    asking, key = config.regenerate, os.environ.get("OPENAI_API_KEY")
    limits = {"concurrency": asking.concurrency, "retries": asking.retries, "timeout": asking.timeout}
    async with ChatServer(url, asking.model, key=key, **limits) as server:  # type: ignore[arg-type]

        async def converse(dialogue: Dialogue) -> None:
            while dialogue.next_prompt():
                key, noise = work_key(dialogue.said, dialogue.name, dialogue.temperature, asking.top_p, seed)
                room = dialogue.base.context_length - len(dialogue.prompt)
                options: dict[str, Any] = {
                    "max_tokens": min(config.max_new_tokens, room),
                    "temperature": dialogue.temperature,
                }
                if dialogue.base.template_args:
                    options["chat_template_kwargs"] = dialogue.base.template_args
                if dialogue.temperature:
                    options |= {"top_p": asking.top_p, "seed": noise % 2**31}
                try:
                    if (known := journal.get(key)) is None:
                        known = await server.answer(dialogue.said, tools=dialogue.conversation.tools, **options)
                        journal.put(key, known)
                    dialogue.answer_text(Answer(*known))
                except (ServerError, RowError) as error:
                    dialogue.lose("refused" if isinstance(error, (Refusal, RowError)) else "errors", str(error))
                bar.update()

        await asyncio.gather(*(converse(dialogue) for dialogue in dialogues))
