"""Records -> training sequences with the base's own words as labels."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.records import Conversation, Record, Text, Tokens
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import Example, Journal
from ctcdraft.data.template import Rendered, render_all, unread_in_prompt
from ctcdraft.model.base import Base
from ctcdraft.model.generate import batches_by_length, continued
from ctcdraft.train.regenerate import LEAST_ROOM, rewrite
from ctcdraft.train.shards import DataConfig

TOKENS_STAY = (
    "tokens cannot be rewritten: data.labels=given takes them as the base's own words, "
    "data.labels=argmax asks the base for its choice at each"
)


def example_of(base: Base, config: DataConfig, record: Record, seed: int) -> Example:
    """What one record gives, outside any folder. Raises ValueError with the reason when that is nothing."""
    account = Account([])
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        made = ExampleMaker(base, config, seed, journal, account, "one record").examples([record])
        journal.close()
    if not made:
        raise ValueError(f"the record {record.id} cannot be used: {account.rejects[0]['reason']}")
    return made[0]


@dataclass(frozen=True)
class Account:
    """Which rows were rejected and why, what became of the turns that were asked, and how often what rows hold was not
    read; `errors`: why turns got no answer that may get one another time."""

    rejects: list[dict[str, Any]]
    turns: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class ExampleMaker:
    """Records of one shard and split -> examples, in the order of the rows, and what to add to the account."""

    def __init__(
        self, base: Base, config: DataConfig, seed: int, journal: Journal, account: Account, title: str
    ) -> None:
        self.base, self.config, self.seed = base, config, seed
        self.journal, self.account, self.title = journal, account, title

    def examples(self, records: Sequence[Record]) -> list[Example]:
        chats = [r for r in records if isinstance(r, Conversation)]
        tokens = [r for r in records if isinstance(r, Tokens)]
        if self.config.labels == "rewrite":
            found = self._rewritten(chats)
            for row in tokens:
                self._reject(row.id, TOKENS_STAY)
        else:
            rendered = [*self._given(chats), *((r.id, [Rendered(r.ids, r.mask)]) for r in tokens)]
            fitting = self._fitting(rendered)
            labels = self._choices(fitting) if self.config.labels == "argmax" else [found.ids for _, found in fitting]
            found = {name: [] for name, _ in fitting}
            for (name, (ids, mask)), chosen in zip(fitting, labels, strict=True):
                found[name].append(Example(ids, mask, chosen))
        found |= self._continued([r for r in records if isinstance(r, Text)])
        return [example for record in records for example in found.get(record.id, [])]

    def _reject(self, row: str, reason: str) -> None:
        self.account.rejects.append({"row": row, "reason": reason})

    def _rewritten(self, chats: list[Conversation]) -> dict[str, list[Example]]:
        """Every assistant turn rewritten by the base."""
        config, rewriting = self.config, self.config.regenerate
        sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": self.seed}
        dialogues, turns = rewrite(self.base, chats, rewriting, self.journal, title=self.title, **sizes)  # type: ignore[arg-type]
        self.account.turns.update(turns._asdict())
        found: dict[str, list[Example]] = {chat.id: [] for chat in chats}
        for dialogue in dialogues:
            found[dialogue.conversation.id] += dialogue.examples(config.turns)
            self.account.unread.update(dialogue.unread)
            if dialogue.errors:
                self.account.errors.append(dialogue.reason)
        for chat in chats:
            self.account.unread.update(unread_in_prompt(self.base.tokenizer, chat, self.base.template_args))
        for dialogue in dialogues[:: len(rewriting.temperatures)]:
            if not found[dialogue.conversation.id]:
                self._reject(dialogue.conversation.id, dialogue.reason)
        return found

    def _given(self, chats: list[Conversation]) -> Iterator[tuple[str, list[Rendered]]]:
        """The sequences of each conversation, its answers as they are."""
        answered = []
        for chat in chats:
            if any(m["role"] == "assistant" for m in chat.messages):
                answered.append(chat)
            else:
                self._reject(chat.id, "no answer to keep")
        args = self.base.template_args
        rendered = render_all(self.base.tokenizer, answered, turns=self.config.turns, template_args=args)
        for chat, found in zip(answered, rendered, strict=True):
            if isinstance(found, RowError):
                self._reject(chat.id, str(found))
            else:
                self.account.unread.update(found.unread)
                yield chat.id, found.sequences

    def _fitting(self, rendered: Sequence[tuple[str, list[Rendered]]]) -> list[tuple[str, Rendered]]:
        """The sequences of those records of which the base can read every one."""
        fitting = []
        for name, sequences in rendered:
            problem = next(filter(None, (_misfit(sequence, self.base) for sequence in sequences)), None)
            if problem:
                self._reject(name, problem)
            else:
                fitting += [(name, sequence) for sequence in sequences]
        return fitting

    def _choices(self, fitting: list[tuple[str, Rendered]]) -> list[list[int]]:
        """What the base would have put at each position of each sequence."""
        chosen: list[list[int]] = [[] for _ in fitting]
        batches = batches_by_length([found.ids for _, found in fitting], self.config.batch_size)
        for batch in tqdm(batches, self.title, unit="batch", mininterval=1, disable=not batches):
            for i, labels in zip(batch, _choices(self.base, [fitting[i][1].ids for i in batch]), strict=True):
                chosen[i] = labels
        return chosen

    def _continued(self, texts: list[Text]) -> dict[str, list[Example]]:
        """Texts, cut somewhere and continued by the base."""
        config, base = self.config, self.base
        low, high = config.prompt_tokens
        room = base.context_length - LEAST_ROOM
        if texts and low > room:
            raise ValueError(
                f"data.prompt_tokens={config.prompt_tokens}: {base.name} takes {base.context_length} tokens"
            )
        work: list[tuple[list[int], float, str]] = []
        owners: list[str] = []
        temperatures, top_p = config.regenerate.temperatures, config.regenerate.top_p
        for text in texts:
            key = (self.seed, *hashlib.sha256(text.id.encode()).digest()[:4])
            cuts = list(cut_prompts(base.tokenizer, text.text, (low, min(high, room)), config.samples_per_text, key))
            if problem := base.unreadable(token for cut in cuts for token in cut):
                self._reject(text.id, problem)
                continue
            pairs = [(cut, t) for cut in cuts for t in temperatures]
            work += [(cut, t, f"{text.id}#{sample}") for sample, (cut, t) in enumerate(pairs)]
            owners += [text.id] * len(pairs)
            if not cuts:
                self._reject(text.id, f"fewer than {low} tokens")
        sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": self.seed}
        queue = deque((i, *work[i]) for i in sorted(range(len(work)), key=lambda i: len(work[i][0])))
        answers = tqdm(
            continued(base, queue, top_p, self.journal, **sizes),
            f"{self.title} (texts)",
            len(work),
            unit="prompt",
            mininterval=1,
            disable=not work,
        )
        found = dict(answers)
        made: dict[str, list[Example]] = {text.id: [] for text in texts}
        for number, (owner, (prompt, _, _)) in enumerate(zip(owners, work, strict=True)):
            ids = [*prompt, *found[number]]
            made[owner].append(Example(ids, [0] * len(prompt) + [1] * len(found[number]), ids))
        return made


def _misfit(found: Rendered, base: Base) -> str | None:
    if len(found.ids) > base.context_length:
        return f"{len(found.ids)} tokens, more than the context holds"
    return base.unreadable(found.ids) or (None if any(found.mask) else "no token of an answer")


@torch.no_grad()
def _choices(base: Base, sequences: list[list[int]]) -> list[list[int]]:
    """At each position of each sequence the token that the base would have put there."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    hidden = base.hidden(ids.to(base.device))  # padding lies behind: causal attention never sees it
    chosen = [base.logits(row[: len(s)]).argmax(dim=-1).tolist() for row, s in zip(hidden, sequences, strict=True)]
    return [[s[0], *c[:-1]] for s, c in zip(sequences, chosen, strict=True)]
