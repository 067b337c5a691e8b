"""The overfit gate: train a head on one conversation until whole drafts are accepted, and name what disagrees.

The stages are asked in the order in which data takes its way, each against a second way to the same figure that shares
no code with the first; what comes after a stage that disagrees is not asked.

Where the two ways put the same tokens through the base in forwards of other shapes, they agree if they differ by little
more than ordinary causal forwards of other shapes do (model/rounding.py): that depends on the base's dtype and depth,
and is measured. What head and search compute is compared in float32, whatever the base's dtype. Shape suffixes as in
train/task.py.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from ctcdraft.data.batches import Sampler
from ctcdraft.data.records import Conversation
from ctcdraft.data.store import Corpus, Example
from ctcdraft.data.template import prompt_ids
from ctcdraft.model.base import Base
from ctcdraft.model.best_first import first_emissions
from ctcdraft.model.decoder import Decoder
from ctcdraft.model.head import Slots
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.mask import tree_mask
from ctcdraft.model.objective import AnchorLoss, feasible_prefixes, slots_looked_at
from ctcdraft.model.rounding import ShapeNoise, bound_of, divergence, forced_logits, shape_noise
from ctcdraft.model.tree import Tree
from ctcdraft.train.examples import example_of
from ctcdraft.train.loop import Plan
from ctcdraft.train.shards import DataConfig
from ctcdraft.train.task import (
    DraftTask,
    base_features,
    draft_losses,
    draftable,
    embedded_labels,
    head_for,
    read_at,
    roots_of,
)

RELABELLINGS = 16
SAFE = 3  # times the noise of a base: in bfloat16 a sound tree needs 1, one that sees a sibling has 5 and more
NEAR = 1e-3  # relative error that two ways through a head in float32 may differ by
PSI_NEAR = 0.01
BASE_OWN = 0.98  # of the labels must be
LEARNT = 0.9  # of the longest drafts that can be accepted
CHECK_EVERY = 25
STAGES = ("tokenizer", "mask", "features", "positions", "labels", "attention", "blank", "loss", "tree", "verification")
FORK = Tree(np.array([5, 6, 7, 8]), np.array([-1, 0, 0, 1]), np.array([1, 2, 2, 3]), np.ones(4, np.float32))
FORK_PATHS = ([5], [5, 6], [5, 7], [5, 6, 8])  # to its nodes


class Finding(NamedTuple):
    """A stage, whether it agrees, and what was seen in a sentence."""

    stage: str
    agrees: bool
    seen: str


class Disagreement(Exception):
    """What a stage found, in a sentence."""


@dataclass(frozen=True)
class GateConfig:
    """steps: at most so many optimizer steps; answer_tokens: of the conversation's answer."""

    steps: int = 400
    lr: float = 4e-3
    answer_tokens: int = 48


class OverfitGate:
    """messages: a conversation, of which the first question is used; the answer is made as `data` says."""

    def __init__(
        self, base: Base, messages: list[dict[str, str]], plan: Plan, data: DataConfig, config: GateConfig
    ) -> None:
        self.base, self.objective, self.draft, self.config = base, plan.objective, plan.draft, config
        asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
        self.messages = messages[: asked + 1]
        answered = self.messages if data.labels == "rewrite" else messages[: asked + 2]
        chat = replace(data, kind="sharegpt", path="-", max_new_tokens=config.answer_tokens)
        self.example = example_of(base, chat, Conversation("gate", tuple(answered)), 0)
        self.prompt = prompt_ids(base.tokenizer, self.messages, None, base.template_args)
        corpus = _corpus_of(self.example)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = head_for(plan.head, base, corpus)
        self.task = DraftTask(self.head, plan.objective, base)
        self.vocabulary = self.head.draft_vocabulary(base)
        self.vocabulary.lm_weight = self.vocabulary.lm_weight.float()
        self.sampler = Sampler(corpus, batch=1, anchors=4096, labels=plan.objective.labels, max_length=4096, seed=0)
        self.batch = self.sampler.collate(0, slice(0, 1)).to(base.device)

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
    def noise(self) -> ShapeNoise:
        """Of the conversation's answer, in the width of a decoding step."""
        answer = [int(i) for i in self.example.ids[len(self.prompt) :]]
        return shape_noise(self.base, self.prompt, answer, self.draft.nodes + 1)

    @property
    def most_nats(self) -> float:
        """What two forwards of the same tokens may differ by."""
        return SAFE * (self.noise.nats + torch.finfo(self.base.dtype).eps)

    def own_choice(self, logits_V: Tensor, token: int) -> bool:
        """Is it the base's, or within what rounding may have put in its place?"""
        return float(logits_V.max() - logits_V[token]) <= max(bound_of(logits_V), 2 * self.noise.logit)

    # -- data -----------------------------------------------------------------------------------------------

    def tokenizer(self) -> str:
        """Does the base know its tokenizer's tokens? Relabelled at random they must surprise it far more."""
        text = "\n".join(message["content"] for message in self.messages)
        ids = self.base.tokenizer(text, return_tensors="pt").input_ids[:, :256].to(self.base.device)
        V = self.base.vocab_size
        if int(ids.max()) >= V:
            raise Disagreement(f"another tokenizer: it makes token {int(ids.max())}, and the base has {V} tokens")
        rng = torch.Generator().manual_seed(0)
        orders = [torch.randperm(V, generator=rng).to(ids.device) for _ in range(RELABELLINGS)]
        other = torch.tensor([self._nats(order[ids]) for order in orders])
        own, bound = self._nats(ids), float(other.mean() - 3 * other.std())
        if not own < bound:
            raise Disagreement(
                f"another tokenizer, or a base that is not trained: the conversation costs it {own:.2f} nats per token "
                f"and {other.mean():.2f} with its tokens renamed at random"
            )
        return f"{own:.2f} nats per token of the question; renamed at random {other.mean():.2f}"

    def _nats(self, ids_1L: Tensor) -> float:
        logits = self.base.logits(self.base.hidden(ids_1L))[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids_1L[0, 1:]))

    def mask(self) -> str:
        """Are just the answer's tokens supervised, its end among them?"""
        ids, mask = [int(i) for i in self.example.ids], [int(m) for m in self.example.mask]
        start = len(self.prompt)
        if ids[:start] != self.prompt:
            raise Disagreement("wrong template: the data does not begin with what the decoder would be asked")
        ends = [i for i in range(start, len(ids)) if ids[i] in self.base.eos_ids]
        stop = ends[0] + 1 if ends else len(ids)
        if mask[start:stop] != [1] * (stop - start) or any(mask[:start]):
            wrong = [i for i in range(stop) if mask[i] != (i >= start)]
            end = ", the end-of-sequence token among them" if ends and not mask[ends[0]] else ""
            raise Disagreement(
                f"wrong mask: {len(wrong)} of {stop} tokens are supervised and should not be, or the other way "
                f"round{end}, the first at position {wrong[0]}"
            )
        seen = "its end included" if ends else "which was cut, so its end was not seen"
        return f"{stop - start} tokens of the answer are supervised, {seen}; none of the {start} before it"

    def features(self) -> str:
        """Do the features give the base's own logits, and the roots the next token's embedding?"""
        hidden, roots = base_features(self.base, self.batch, torch.float32, self.head)
        with torch.no_grad():
            self.truth_LV = self.base.model(input_ids=self.batch.ids_BL).logits[0]
            off = float(divergence(self.base.logits(hidden.to(self.base.dtype))[0], self.truth_LV).max())
            if not off <= self.most_nats:
                raise Disagreement(
                    f"features of the wrong layer: through the LM head they are {off:.2g} nats off, {self._explained()}"
                )
            if not torch.equal(roots[0, :-1], self.base.embed(self.batch.ids_BL[0, 1:]).float()):
                raise Disagreement("wrong roots: they are not the embeddings of the tokens that follow")
        return f"they give the base's logits ({off:.1e} nats apart, {self._explained()})"

    def _explained(self) -> str:
        return f"where the base's rounding explains {self.most_nats:.1e}"

    def positions(self) -> str:
        """Are anchors where a root and a label lie in the answer, and a tree's nodes at root + depth?"""
        mask = [int(m) for m in self.example.mask]
        want = [t for t in range(len(mask) - 2) if mask[t + 1] and mask[t + 2]]
        got = self.batch.position_N.tolist()
        if got != want:
            raise Disagreement(f"positions off: anchors stand at {got[:4]}..., and should at {want[:4]}...")
        _, at = tree_mask(self.base, [FORK], np.array([len(self.prompt)]))
        expected = [len(self.prompt) + depth for depth in (0, *FORK.depths.tolist())]
        if at[0].tolist() != expected:
            raise Disagreement(f"positions off: a draft's nodes stand at {at[0].tolist()}, and should at {expected}")
        return f"{len(want)} anchors, each before a root and a label of the answer"

    def labels(self) -> str:
        """Are an anchor's labels what the base itself says after the root?"""
        columns = self.batch.position_N, self.batch.labels_NU, self.batch.lengths_N
        right = total = 0
        for t, row, length in zip(*(column.tolist() for column in columns), strict=True):
            right += sum(self.own_choice(self.truth_LV[t + 1 + k], row[k]) for k in range(length))
            total += length
        if right < BASE_OWN * total:
            raise Disagreement(
                f"shifted labels: only {right} of {total} are what the base says after the root, where labels are the "
                "tokens t + 2, t + 3, ..."
            )
        return f"{right} of {total} are the base's own choice there"

    # -- model ----------------------------------------------------------------------------------------------

    def attention(self) -> str:
        """Does every node of a draft tree get the logits that its path alone would?"""
        cache, device = DynamicCache(), self.base.device
        ids = torch.tensor([self.prompt], device=device)
        self.base.hidden(ids[:, :-1], cache=cache)
        past = ids.shape[1] - 1
        mask, at = tree_mask(self.base, [FORK], np.array([past]))
        nodes = torch.tensor([[self.prompt[-1], *FORK.tokens.tolist()]], device=device)
        tree_RV = self.base.logits(self.base.hidden(nodes, attention_mask=mask, position_ids=at, cache=cache))[0, 1:]
        whole = [self.base.hidden(torch.tensor([[*self.prompt, *path]], device=device)) for path in FORK_PATHS]
        alone = [self.base.logits(hidden[0, -1]) for hidden in whole]
        off = float(divergence(tree_RV, torch.stack(alone)).max())
        if not off <= self.most_nats:
            raise Disagreement(
                f"wrong mask: a draft's node sees what its path does not hold: it is {off:.2g} nats off, "
                f"{self._explained()}"
            )
        return f"a tree's nodes see their own paths ({off:.1e} nats apart, {self._explained()})"

    @torch.no_grad()
    def blank(self) -> str:
        """Is the blank the one that the head computes, in the loss as in the lattice?"""
        slots = self._slots()
        if slots.blank_NT is None:
            return "this head has none"
        N, T, D = slots.states_NTD.shape
        logits = slots.states_NTD.reshape(N * T, D) @ self.vocabulary.lm_weight.T
        want_NT = slots.blank_NT.float().sigmoid()
        whole = (1 - want_NT.view(N * T, 1)) * logits.softmax(dim=1)
        lattices = [drafted for drafted in self._drafted() if isinstance(drafted, Lattice)]
        firsts = [first_emissions(lattice) for lattice in lattices]
        drafted = torch.tensor(np.stack([blank_T for _, blank_T in firsts]), device=want_NT.device)
        emitted = torch.tensor(firsts[0][0], device=want_NT.device)
        tokens = self.vocabulary.numbered(torch.tensor(lattices[0].tokens, device=want_NT.device))
        if not (_error(drafted, want_NT) <= NEAR and _error(emitted, whole[:T, tokens]) <= NEAR):
            raise Disagreement("blank swapped: the lattice that drafts come from takes another entry for the blank")
        out = self._losses(slots)
        lengths_N = self.batch.lengths_N
        seen_N = slots_looked_at(torch.full_like(lengths_N, T), lengths_N, self.objective.kind, self.head.topology)
        seen_NT = (torch.arange(T, device=lengths_N.device) < seen_N.unsqueeze(1)) & out.feasible_N.unsqueeze(1)
        want_T = (want_NT * seen_NT).sum(dim=0) / seen_NT.sum(dim=0).clamp(min=1)
        if not _error(out.blank_rate_T, want_T) <= NEAR:
            raise Disagreement("blank swapped: the loss takes another entry for the blank than the head computes")
        return f"loss and lattice agree on it ({float(want_NT.mean()):.1%} of a slot before training)"

    def _slots(self) -> Slots:
        hidden, roots = base_features(self.base, self.batch, torch.float32, self.head)
        labels = embedded_labels(self.head, self.base, self.batch)
        return self.head(hidden, roots, self.batch.batch_N, self.batch.position_N, None, labels)

    def _losses(self, slots: Slots) -> AnchorLoss:
        return draft_losses(self.head, self.objective, self.vocabulary, slots, draftable(self.batch, self.vocabulary))

    def _drafted(self) -> list[Lattice | Tree]:
        hidden, _ = base_features(self.base, self.batch, torch.float32, self.head)
        whole = len(self.vocabulary)  # fewer candidates leave the others as they were, and psi with it
        vocabulary = self.head.vocabulary(self.base, whole)._replace(tokens=self.vocabulary)
        at = self.batch.batch_N, self.batch.position_N
        return self.head.drafts_at(hidden, roots_of(self.batch), *at, None, vocabulary)

    # -- training and decoding ------------------------------------------------------------------------------

    def loss(self) -> str:
        """Does training on this one conversation teach its drafts?"""
        hidden, roots = base_features(self.base, self.batch, torch.float32, self.head)
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=self.config.lr)
        first = last = float("nan")
        with tqdm(total=self.config.steps, desc="one conversation", unit="step", mininterval=1, leave=False) as bar:
            for step in range(1, self.config.steps + 1):
                loss, sums = self.task(hidden, roots, self.batch)
                optimizer.zero_grad()
                (loss / sums.anchors).backward()
                torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
                optimizer.step()
                self.task.observe(sums)
                last = float(loss.detach() / sums.feasible)
                first = last if step == 1 else first
                bar.update()
                if step % CHECK_EVERY == 0 and self._learnt() >= LEARNT:
                    return f"{first:.2f} to {last:.4f} in {step} steps"
        share = self._learnt()
        if not share >= LEARNT:
            raise Disagreement(
                f"the loss went from {first:.2f} to {last:.2f} in {self.config.steps} steps and the head believes "
                f"{share:.0%} of its conversation: objective, learning rate or head do not fit"
            )
        return f"{first:.2f} to {last:.4f} in {self.config.steps} steps"

    @torch.no_grad()
    def _learnt(self) -> float:
        """Probability that the head gives to what can be drafted of the labels, by the loss."""
        psi_NU = self._losses(self._slots()).log_psi_NU.exp()
        return float((psi_NU * self._can()[:, : psi_NU.shape[1]]).sum() / self._can().sum())

    def _can(self) -> Tensor:
        """[N, U]: label prefixes that the slots can write and the objective teaches."""
        slots_N = torch.full_like(self.batch.lengths_N, self.head.config.slots)
        if self.head.config.kind == "ctc":
            can_NU = feasible_prefixes(self.batch.labels_NU, self.batch.lengths_N, slots_N, self.head.topology)
            whole_N1 = (can_NU.sum(dim=1) == self.batch.lengths_N).unsqueeze(1)
            return can_NU & whole_N1 if self.objective.kind == "ctc" else can_NU  # what is all or nothing
        columns = torch.arange(self.batch.labels_NU.shape[1], device=slots_N.device)
        return columns < torch.minimum(self.batch.lengths_N, slots_N).unsqueeze(1)

    @torch.no_grad()
    def tree(self) -> str:
        """Do draft trees hold what the head has learnt, with the psi that the loss gives it?"""
        draft = replace(self.draft, prune=0.0, prompt_lookup=0)
        slots, decoder = self._slots(), Decoder(self.base, self.head, draft)
        psi_NU, can_NU = self._losses(slots).log_psi_NU.exp(), self._can()
        off, held, able = [0.0], 0, 0
        for n, (drafted, read) in enumerate(zip(self._drafted(), read_at(self.batch), strict=True)):
            tree, count = decoder.tree_of(drafted, read), int(can_NU[n].sum())
            path = tree.path_of(self.batch.labels_NU[n, :count].tolist())
            held, able = held + len(path), able + min(count, self.draft.nodes)
            off += np.abs(tree.psi[path] - psi_NU[n, : len(path)].cpu().numpy()).tolist()
        worst = float(np.max(off))
        if not worst <= PSI_NEAR:
            raise Disagreement(f"the tree's psi is off by {worst:.3f} from the loss's for the same prefix")
        if held < 0.8 * able:
            raise Disagreement(f"trees hold {held} of the {able} labels that the head has learnt")
        return f"trees hold {held} of {able} labels; psi as the loss has it ({worst:.1e} apart)"

    def verification(self) -> str:
        """Does decoding accept a whole draft, and give the base's own words?"""
        self.head.eval()
        limit = max(2, len(self.example.ids) - len(self.prompt))
        plain = Decoder(self.base).generate(self.prompt, limit)
        # Else only the nodes that pay are verified, and what is drafted ends at the first token that is no candidate.
        draft = replace(self.draft, prompt_lookup=0, budget="fixed", top_k=len(self.vocabulary))
        drafted = Decoder(self.base, self.head, draft).generate(self.prompt, limit)
        if drafted.tokens != plain.tokens:
            logits = forced_logits(self.base, self.prompt, drafted.tokens, 1)
            own = [self.own_choice(logits_V, token) for logits_V, token in zip(logits, drafted.tokens, strict=True)]
            ended = len(drafted.tokens) == limit or drafted.tokens[-1] in self.base.eos_ids
            if not (all(own) and ended):
                at = own.index(False) if not all(own) else len(own)
                raise Disagreement(
                    f"verification accepts what the base does not say, first at token {at} of the answer"
                )
        text, able = [*self.prompt, *drafted.tokens], self._can().sum(dim=1).tolist()
        rows = zip(self.batch.position_N.tolist(), self.batch.labels_NU.tolist(), able, strict=True)
        learnt = {t: row[:count] for t, row, count in rows}
        at, whole = len(self.prompt) - 1, [0]  # the anchor of the first step: the root comes after it
        for accepted in drafted.accepted:
            right = np.cumprod([a == b for a, b in zip(learnt.get(at, ()), text[at + 2 :], strict=False)]).sum()
            if at in learnt and accepted >= min(right, self.draft.nodes):
                whole.append(accepted)
            at += accepted + 1
        if max(whole) < min(2, max(able)):
            raise Disagreement(
                f"no whole draft was accepted, the longest part of one had {max(drafted.accepted, default=0)} tokens, "
                "though the trees hold what comes: the decoder's features, roots or positions are not those of training"
            )
        return f"a whole draft of {max(whole)} tokens accepted; {len(plain.tokens)} tokens in {drafted.steps} steps"


def _corpus_of(example: Example) -> Corpus:
    columns = [np.asarray(column) for column in example]
    offsets = np.array([0, len(columns[0])], np.int64)
    return Corpus(columns[0].astype(np.int32), columns[1].astype(np.uint8), columns[2].astype(np.int32), offsets)


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference, in units of the largest of what is wanted."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
