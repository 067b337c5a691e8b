"""Records -> training sequences with the base's own words as labels."""

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from ctcdraft.data.features import hidden_states
from ctcdraft.data.prompts import cut_prompts, prompt_lengths
from ctcdraft.data.records import Conversation, Record, Text, Tokens
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import Example
from ctcdraft.data.template import Rendered, Rendering, render, unread_in_prompt
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.generate import continued

from .regenerate import AnswersConfig, rewrite
from .shards import Account

TOKENS_STAY = (
    "tokens cannot be rewritten: data.labels=given takes them as the base's own words, "
    "data.labels=argmax asks the base for its choice at each"
)


def example_of(base: Base, config: AnswersConfig, record: Record, seed: int) -> Example:
    """What one conversation gives, outside any folder. Raises ValueError with the reason when that is nothing."""
    account = Account()
    made = ExampleMaker(base, config, seed, {}, account, "one record").examples([record])
    if not made:
        raise ValueError(f"the conversation cannot be used: {account.rejects[0]['reason']}")
    return made[0]


@dataclass(frozen=True)
class ExampleMaker:
    """Records of one shard and split -> examples, in the order of the rows, and what to add to the account."""

    base: Base
    config: AnswersConfig
    seed: int
    journal: dict[str, Any]
    account: Account
    title: str

    def examples(self, records: Sequence[Record]) -> list[Example]:
        chats = [r for r in records if isinstance(r, Conversation)]
        tokens = [r for r in records if isinstance(r, Tokens)]
        if self.config.labels == "rewrite":
            found = self._rewritten(chats)
            for row in tokens:
                self.account.reject(row.id, TOKENS_STAY)
        else:
            found = self._kept([*chats, *tokens])
        found |= self._continued([r for r in records if isinstance(r, Text)])
        return [example for record in records for example in found.get(record.id, [])]

    def _rewritten(self, chats: list[Conversation]) -> dict[str, list[Example]]:
        dialogues, turns = rewrite(self.base, chats, self.config, self.journal, seed=self.seed, title=self.title)
        self.account.turns.update(turns)
        found: dict[str, list[Example]] = defaultdict(list)
        for dialogue in dialogues:
            found[dialogue.conversation.id] += dialogue.examples(self.config.turns)
            self.account.unread.update(dialogue.unread)
            if dialogue.turns["errors"]:
                self.account.errors.append(dialogue.reason)
        for chat in chats:
            self.account.unread.update(unread_in_prompt(self.base.tokenizer, chat, self.base.template_args))
        for dialogue in dialogues[:: len(self.config.regenerate.temperatures)]:
            if not found[dialogue.conversation.id]:
                self.account.reject(dialogue.conversation.id, dialogue.reason)
        return found

    def _kept(self, records: list[Conversation | Tokens]) -> dict[str, list[Example]]:
        """The given answers as they are, of those records of which the base can read every sequence."""
        base, given = self.base, dict[str, list[Rendered]]()
        for record in records:
            try:
                if isinstance(record, Tokens):
                    found = Rendering([Rendered(record.ids, record.mask)], [])
                else:
                    args = base.template_args
                    found = render(base.tokenizer, record, turns=self.config.turns, template_args=args)
                for ids, mask in found.sequences:
                    if len(ids) > base.context_length:
                        raise RowError(f"{len(ids)} tokens, more than the context holds")
                    if problem := base.unreadable(ids) or (None if any(mask) else "no token of an answer"):
                        raise RowError(problem)
            except RowError as error:
                self.account.reject(record.id, error)
            else:
                given[record.id] = found.sequences
                self.account.unread.update(found.unread)
        every = [sequence.ids for sequences in given.values() for sequence in sequences]
        labels = iter(self._choices(every) if self.config.labels == "argmax" else every)
        return {name: [Example(ids, mask, next(labels)) for ids, mask in found] for name, found in given.items()}

    @torch.no_grad()
    def _choices(self, sequences: list[list[int]]) -> list[list[int]]:
        """What the base would have put at each position of each sequence."""
        count, chosen = len(sequences), dict[int, list[int]]()
        states = hidden_states(self.base, sequences, self.config.batch_size)
        for i, hidden_LD in tqdm(states, self.title, count, unit="sequence", mininterval=1, disable=not count):
            chosen[i] = [sequences[i][0], *self.base.logits(hidden_LD).argmax(dim=-1).tolist()[:-1]]
        return [chosen[i] for i in range(count)]

    def _continued(self, texts: list[Text]) -> dict[str, list[Example]]:
        if not texts:
            return {}
        config, base = self.config, self.base
        lengths = prompt_lengths(base, config.prompt_tokens, "data.prompt_tokens")
        work: list[tuple[str, list[int], float, str]] = []  # whose it is, its prompt, temperature and name
        for text in texts:
            key = (self.seed, *hashlib.sha256(text.id.encode()).digest()[:4])
            cuts = list(cut_prompts(base.tokenizer, text.text, lengths, config.samples_per_text, key))
            problem = base.unreadable(token for cut in cuts for token in cut)
            if problem or not cuts:
                self.account.reject(text.id, problem or f"fewer than {lengths[0]} tokens")
                continue
            samples = enumerate(product(cuts, config.regenerate.temperatures))
            work += [(text.id, cut, temperature, f"{text.id}#{sample}") for sample, (cut, temperature) in samples]
        queue = deque((i, *work[i][1:]) for i in sorted(range(len(work)), key=lambda i: len(work[i][1])))
        sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": self.seed}
        answers = continued(base, queue, config.regenerate.top_p, self.journal, **sizes)
        found = dict(tqdm(answers, f"{self.title} (texts)", len(work), unit="prompt", mininterval=1, disable=not work))
        made: dict[str, list[Example]] = defaultdict(list)
        for number, (owner, prompt, *_) in enumerate(work):
            ids = [*prompt, *found[number]]
            made[owner].append(Example(ids, [0] * len(prompt) + [1] * len(found[number]), ids))
        return made
