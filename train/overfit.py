"""The overfit check: train a head on one conversation until whole drafts are accepted, and name what disagrees.

The stages are asked in the order in which data takes its way; what comes after a stage that disagrees is not asked.
Whether the base takes drafts at all was tried when it was loaded. Shape suffixes as in train/task.py.
"""

import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.data.batches import Sampler
from ctcdraft.data.records import Conversation
from ctcdraft.data.store import corpus_of
from ctcdraft.data.template import prompt_ids
from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.rounding import bound_of, forced_logits, shape_noise
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.loss.objective import feasible_prefixes

from .examples import example_of
from .prepare import DataConfig
from .step import Plan
from .task import DraftTask, base_features, head_for

STEPS, LR = 400, 4e-3  # of training on one conversation
SURE = 0.9  # of the nats of a base that knows nothing
BASE_OWN = 0.98  # of the labels must be
LEARNT = 0.9  # of the longest drafts that can be accepted
CHECK_EVERY = 25
STAGES = ("tokenizer", "mask", "labels", "loss", "verification")


class Finding(NamedTuple):
    """A stage, whether it agrees, and what was seen in a sentence."""

    stage: str
    agrees: bool
    seen: str


class Disagreement(Exception):
    """What a stage found, in a sentence."""


class OverfitCheck:
    """messages: a conversation, of which the first question is used; the answer, of at most so many tokens, is made as
    `data` says. steps: at most so many optimizer steps."""

    def __init__(
        self,
        base: Base,
        messages: list[dict[str, str]],
        plan: Plan,
        data: DataConfig,
        *,
        answer_tokens: int,
        steps: int = STEPS,
    ) -> None:
        self.base, self.draft, self.steps = base, plan.draft, steps
        asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
        self.messages = messages[: asked + 1]
        answered = self.messages if data.labels == "rewrite" else messages[: asked + 2]
        greedy = replace(data.regenerate, temperatures=[0.0])  # a sample is not what the base would choose
        chat = replace(data, kind="sharegpt", path="-", weights=None, max_new_tokens=answer_tokens, regenerate=greedy)
        example = example_of(base, chat, Conversation("gate", tuple(answered)), 0)
        self.ids, self.supervised = ([int(i) for i in column] for column in example[:2])
        self.prompt = prompt_ids(base.tokenizer, self.messages, None, base.template_args)
        corpus = corpus_of([example])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = head_for(plan.head, base, corpus)
        # A base that is not sure of its words would leave psi below 1.
        objective = replace(plan.objective, distill=0.0, policy="base")
        self.task = DraftTask(self.head, objective, base)
        sampler = Sampler(corpus, batch=1, anchors=4096, labels=plan.objective.labels, max_length=4096, seed=0)
        self.batch = sampler.collate(0, slice(0, 1)).to(base.device)

    def findings(self) -> list[Finding]:
        """One per stage, the last of them the first that disagrees, if one does."""
        found: list[Finding] = []
        for stage in STAGES:
            try:
                found.append(Finding(stage, True, getattr(self, stage)()))
            except Disagreement as problem:
                return [*found, Finding(stage, False, str(problem))]
        return found

    @cached_property
    def noise(self) -> float:
        """What rounding may do to a logit of the answer in the width of a decoding step."""
        return shape_noise(self.base, self.prompt, self.ids[len(self.prompt) :], self.draft.most_nodes + 1)

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor]:
        """What the head gets: hidden states and embedded roots, in float32."""
        return base_features(self.base, self.batch, torch.float32, self.head)

    def own_choice(self, logits_V: Tensor, token: int) -> bool:
        """Is it the base's, or within what rounding may have put in its place?"""
        return float(logits_V.max() - logits_V[token]) <= max(bound_of(logits_V), 2 * self.noise)

    def tokenizer(self) -> str:
        """Does the base know its tokenizer's tokens? They must surprise it less than they would if it knew nothing."""
        text, V = "\n".join(message["content"] for message in self.messages), self.base.vocab_size
        ids_1L = self.base.tokenizer(text, return_tensors="pt").input_ids[:, :256].to(self.base.device)
        if int(ids_1L.max()) >= V:
            raise Disagreement(f"another tokenizer: it makes token {int(ids_1L.max())}, and the base has {V} tokens")
        if ids_1L.shape[1] == 1:
            return "the question is one token: not judged"
        logits_LV = self.base.logits(self.base.hidden(ids_1L))[0, :-1].float()
        nats, even = float(torch.nn.functional.cross_entropy(logits_LV, ids_1L[0, 1:])), math.log(V)
        if not nats < SURE * even:
            raise Disagreement(
                f"another tokenizer, or a base that is not trained: the conversation costs it {nats:.2f} nats per "
                f"token, and one that knows nothing {even:.2f}"
            )
        return f"{nats:.2f} nats per token of the question; without knowledge {even:.2f}"

    def mask(self) -> str:
        """Are just the answer's tokens supervised, its end among them?"""
        ids, start = self.ids, len(self.prompt)
        if ids[:start] != self.prompt:
            raise Disagreement("wrong template: the data does not begin with what the decoder would be asked")
        stop = next((i + 1 for i in range(start, len(ids)) if ids[i] in self.base.eos_ids), len(ids))
        wrong = [i for i in range(stop) if self.supervised[i] != (i >= start)]
        if wrong:
            raise Disagreement(
                f"wrong mask: {len(wrong)} of {stop} tokens are supervised and should not be, or the other way round, "
                f"the first at position {wrong[0]}"
            )
        return f"{stop - start} tokens of the answer are supervised; none of the {start} before it"

    def labels(self) -> str:
        """Are an anchor's labels what the base itself says after the root?"""
        with torch.no_grad():
            said_LV = self.base.model(input_ids=self.batch.ids_BL).logits[0]
        batch, right = self.batch, []
        for t, row, length in zip(batch.position_N.tolist(), batch.labels_NU, batch.lengths_N, strict=True):
            right += [self.own_choice(said_LV[t + 1 + k], int(row[k])) for k in range(int(length))]
        if sum(right) < BASE_OWN * len(right):
            raise Disagreement(
                f"shifted labels: only {sum(right)} of {len(right)} are what the base says after the root, where they "
                "are the tokens t + 2, t + 3, ..."
            )
        return f"{sum(right)} of {len(right)} are the base's own choice there"

    def loss(self) -> str:
        """Does training on this one conversation teach its drafts?"""
        optimizer = torch.optim.AdamW(self.head.parameters(), LR)
        hidden, roots = self._inputs
        losses: list[float] = []
        share = 0.0
        for step in tqdm(range(1, self.steps + 1), "one conversation", unit="step", mininterval=1, leave=False):
            loss, metrics = self.task(hidden, roots, self.batch)
            optimizer.zero_grad()
            (loss / metrics.anchors).backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach() / metrics.feasible))
            if step % CHECK_EVERY == 0 or step == self.steps:
                psi_NU, can_NU = self._learnt()
                share = float((psi_NU * can_NU).sum() / can_NU.sum())
                if share >= LEARNT:
                    break
        if not share >= LEARNT:
            raise Disagreement(
                f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f} in {self.steps} steps and the head believes "
                f"{share:.0%} of its conversation: objective, learning rate or head do not fit"
            )
        return f"{losses[0]:.2f} to {losses[-1]:.4f} in {len(losses)} steps"

    @torch.no_grad()
    def _learnt(self) -> tuple[Tensor, Tensor]:
        """[N, U]: the probability of every label prefix by the loss, and which the slots can write and the objective
        teaches."""
        hidden, roots = self._inputs
        out = self.task.losses(self.task.slots(hidden, roots, self.batch), hidden, self.batch)
        lengths_N = self.batch.lengths_N
        slots_N = torch.full_like(lengths_N, self.head.config.slots)
        can_NU = feasible_prefixes(self.batch.labels_NU, lengths_N, slots_N, self.head.topology)
        if self.task.objective.kind == "ctc":  # which is all or nothing
            can_NU &= (can_NU.sum(dim=1) == lengths_N).unsqueeze(1)
        psi_NU = out.log_psi_NU.exp()
        return psi_NU, can_NU[:, : psi_NU.shape[1]]

    def verification(self) -> str:
        """Does decoding accept a whole draft, and give the base's own words?"""
        self.head.eval()
        limit = max(2, len(self.ids) - len(self.prompt))
        plain = Decoder(self.base).generate(self.prompt, limit)
        # Else only the nodes that pay are verified, and what is drafted ends at the first token that is no candidate.
        draft = replace(self.draft, prompt_lookup=0, budget="fixed", top_k=len(self.task.vocabulary))
        drafted = Decoder(self.base, self.head, draft).generate(self.prompt, limit)
        if drafted.tokens != plain.tokens:
            logits = forced_logits(self.base, self.prompt, drafted.tokens, 1)
            own = [self.own_choice(logits_V, token) for logits_V, token in zip(logits, drafted.tokens, strict=True)]
            own.append(len(drafted.tokens) == limit or drafted.tokens[-1] in self.base.eos_ids)
            if not all(own):
                at = own.index(False)
                raise Disagreement(
                    f"verification accepts what the base does not say, first at token {at} of the answer"
                )
        able = self._learnt()[1].sum(dim=1).tolist()
        learnt = dict(zip(self.batch.position_N.tolist(), able, strict=True))
        at, whole = len(self.prompt) - 1, [0]  # the anchor of the first step: the root comes after it
        for accepted in drafted.accepted:
            if at in learnt and accepted >= min(learnt[at], self.draft.nodes):
                whole.append(accepted)
            at += accepted + 1
        if max(whole) < min(2, max(able)):
            raise Disagreement(
                f"no whole draft was accepted, the longest part of one had {max(drafted.accepted, default=0)} tokens, "
                "though the head has learnt what comes: what it drafts from is not what it was trained on"
            )
        return f"a whole draft of {max(whole)} tokens accepted; {len(plain.tokens)} tokens in {drafted.steps} steps"
