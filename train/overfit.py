"""The overfit check: train a head on one conversation until whole drafts are accepted, and name what disagrees.

The stages are asked in the order in which data takes its way, each against a second way to the same figure that shares
no code with the first; what comes after a stage that disagrees is not asked.

Where the two ways put the same tokens through the base in forwards of other shapes, they agree if they differ by little
more than ordinary causal forwards of other shapes do (model/base/rounding.py): that depends on its dtype and depth,
and is measured. What head and search compute is compared in float32, whatever the base's dtype. Shape suffixes as in
train/task.py.
"""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from ctcdraft.data.batches import Sampler
from ctcdraft.data.records import Conversation
from ctcdraft.data.store import COLUMNS, Corpus
from ctcdraft.data.template import prompt_ids
from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.rounding import ShapeNoise, bound_of, divergence, forced_logits, shape_noise
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.draft.drafter import Frontier
from ctcdraft.model.draft.tree import Tree, tree_mask
from ctcdraft.model.heads.head import Slots
from ctcdraft.model.lattice.best_first import first_emissions
from ctcdraft.model.lattice.candidates import Lattice
from ctcdraft.model.loss.objective import AnchorLoss, feasible_prefixes, slots_looked_at

from .examples import example_of
from .loop import Plan
from .prepare import DataConfig
from .task import DraftTask, anchors_of, base_features, draft_losses, draftable, head_for, read_at, roots_of

STEPS, LR = 400, 4e-3  # of training on one conversation
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
        self.objective = replace(plan.objective, distill=0.0)  # a base that is not sure of its words leaves psi below 1
        asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
        self.messages = messages[: asked + 1]
        answered = self.messages if data.labels == "rewrite" else messages[: asked + 2]
        chat = replace(data, kind="sharegpt", path="-", max_new_tokens=answer_tokens)
        example = example_of(base, chat, Conversation("gate", tuple(answered)), 0)
        self.ids, self.supervised = ([int(i) for i in column] for column in example[:2])
        self.prompt = prompt_ids(base.tokenizer, self.messages, None, base.template_args)
        columns = zip(example, COLUMNS.values(), strict=True)
        ids, mask, labels = (np.asarray(column, dtype) for column, dtype in columns)
        corpus = Corpus(ids, mask, labels, np.array([0, len(ids)], np.int64))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = head_for(plan.head, base, corpus)
        self.task = DraftTask(self.head, self.objective, base)
        self.vocabulary = self.head.draft_vocabulary(base)
        self.vocabulary.lm_weight = self.vocabulary.lm_weight.float()
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
    def noise(self) -> ShapeNoise:
        """Of the conversation's answer, in the width of a decoding step."""
        return shape_noise(self.base, self.prompt, self.ids[len(self.prompt) :], self.draft.nodes + 1)

    def _agree(self, got_RV: Tensor, want_RV: Tensor, otherwise: str) -> str:
        """How far apart two forwards of the same tokens are. Raises Disagreement where that is more than rounding."""
        nats = float(divergence(got_RV, want_RV).max())
        most = SAFE * (self.noise.nats + torch.finfo(self.base.dtype).eps)
        if not nats <= most:
            raise Disagreement(f"{otherwise} {nats:.2g} nats off, where the base's rounding explains {most:.1e}")
        return f"{nats:.1e} nats apart, where the base's rounding explains {most:.1e}"

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor]:
        """What the head gets: hidden states and embedded roots, in float32."""
        return base_features(self.base, self.batch, torch.float32, self.head)

    @cached_property
    def _said_LV(self) -> Tensor:
        """The base's own logits along the conversation."""
        with torch.no_grad():
            return self.base.model(input_ids=self.batch.ids_BL).logits[0]

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

        def nats(ids_1L: Tensor) -> float:
            logits = self.base.logits(self.base.hidden(ids_1L))[0, :-1].float()
            return float(torch.nn.functional.cross_entropy(logits, ids_1L[0, 1:]))

        rng = torch.Generator().manual_seed(0)
        orders = [torch.randperm(V, generator=rng).to(ids.device) for _ in range(RELABELLINGS)]
        own, other = nats(ids), torch.tensor([nats(order[ids]) for order in orders])
        if not own < float(other.mean() - 3 * other.std()):
            raise Disagreement(
                f"another tokenizer, or a base that is not trained: the conversation costs it {own:.2f} nats per token "
                f"and {other.mean():.2f} with its tokens renamed at random"
            )
        return f"{own:.2f} nats per token of the question; renamed at random {other.mean():.2f}"

    def mask(self) -> str:
        """Are just the answer's tokens supervised, its end among them?"""
        ids, start = self.ids, len(self.prompt)
        if ids[:start] != self.prompt:
            raise Disagreement("wrong template: the data does not begin with what the decoder would be asked")
        ends = [i for i in range(start, len(ids)) if ids[i] in self.base.eos_ids]
        stop = ends[0] + 1 if ends else len(ids)
        wrong = [i for i in range(stop) if self.supervised[i] != (i >= start)]
        if wrong:
            end = ", the end-of-sequence token among them" if ends and not self.supervised[ends[0]] else ""
            raise Disagreement(
                f"wrong mask: {len(wrong)} of {stop} tokens are supervised and should not be, or the other way "
                f"round{end}, the first at position {wrong[0]}"
            )
        seen = "its end included" if ends else "which was cut, so its end was not seen"
        return f"{stop - start} tokens of the answer are supervised, {seen}; none of the {start} before it"

    @torch.no_grad()
    def features(self) -> str:
        """Do the features give the base's own logits, and the roots the next token's embedding?"""
        hidden, roots = self._inputs
        logits_LV = self.base.logits(hidden.to(self.base.dtype))[0]
        seen = self._agree(logits_LV, self._said_LV, "features of the wrong layer: through the LM head they are")
        if not torch.equal(roots[0, :-1], self.base.embed(self.batch.ids_BL[0, 1:]).float()):
            raise Disagreement("wrong roots: they are not the embeddings of the tokens that follow")
        return f"they give the base's logits ({seen})"

    def positions(self) -> str:
        """Are anchors where a root and a label lie in the answer, and a tree's nodes at root + depth?"""
        want = [t for t in range(len(self.ids) - 2) if self.supervised[t + 1] and self.supervised[t + 2]]
        got = self.batch.position_N.tolist()
        if got != want:
            raise Disagreement(f"positions off: anchors stand at {got[:4]}..., and should at {want[:4]}...")
        at = tree_mask([FORK], np.array([len(self.prompt)]), self.base.device).positions_BL
        expected = [len(self.prompt) + depth for depth in (0, *FORK.depths.tolist())]
        if at[0].tolist() != expected:
            raise Disagreement(f"positions off: a draft's nodes stand at {at[0].tolist()}, and should at {expected}")
        return f"{len(want)} anchors, each before a root and a label of the answer"

    def labels(self) -> str:
        """Are an anchor's labels what the base itself says after the root?"""
        columns = self.batch.position_N, self.batch.labels_NU, self.batch.lengths_N
        right = total = 0
        for t, row, length in zip(*(column.tolist() for column in columns), strict=True):
            right += sum(self.own_choice(self._said_LV[t + 1 + k], row[k]) for k in range(length))
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
        mask = tree_mask([FORK], np.array([past]), device)
        nodes = torch.tensor([[self.prompt[-1], *FORK.tokens.tolist()]], device=device)
        tree_RV = self.base.logits(self.base.hidden(nodes, mask, cache=cache))[0, 1:]
        whole = [self.base.hidden(torch.tensor([[*self.prompt, *path]], device=device)) for path in FORK_PATHS]
        alone = [self.base.logits(hidden[0, -1]) for hidden in whole]
        otherwise = "wrong mask: a draft's node sees what its path does not hold: it is"
        return f"a tree's nodes see their own paths ({self._agree(tree_RV, torch.stack(alone), otherwise)})"

    @torch.no_grad()
    def blank(self) -> str:
        """Is the blank the one that the head computes, in the loss as in the lattice?"""
        slots, out = self._trained()
        if slots.blank_NT is None:
            return "this head has none"
        want_NT = slots.blank_NT.float().sigmoid()
        want_TX = (1 - want_NT[0].unsqueeze(1)) * (slots.states_NTD[0] @ self.vocabulary.lm_weight.T).softmax(dim=1)
        lattices = [drafted for drafted in self._drafted() if isinstance(drafted, Lattice)]
        firsts = [first_emissions(lattice) for lattice in lattices]
        drafted_NT = torch.tensor(np.stack([blank for _, blank in firsts]), device=want_NT.device)
        emitted_TY = torch.tensor(firsts[0][0], device=want_NT.device)
        tokens_Y = self.vocabulary.numbered(torch.tensor(lattices[0].tokens, device=want_NT.device))
        if not (_error(drafted_NT, want_NT) <= NEAR and _error(emitted_TY, want_TX[:, tokens_Y]) <= NEAR):
            raise Disagreement("blank swapped: the lattice that drafts come from takes another entry for the blank")
        lengths_N, slots_N = self.batch.lengths_N, torch.full_like(self.batch.lengths_N, self.head.config.slots)
        seen_N = slots_looked_at(slots_N, lengths_N, self.objective.kind, self.head.topology)
        slot_T = torch.arange(want_NT.shape[1], device=slots_N.device)
        seen_NT = (slot_T < seen_N.unsqueeze(1)) & out.feasible_N.unsqueeze(1)
        want_T = (want_NT * seen_NT).sum(dim=0) / seen_NT.sum(dim=0).clamp(min=1)
        if not _error(out.blank_rate_T, want_T) <= NEAR:
            raise Disagreement("blank swapped: the loss takes another entry for the blank than the head computes")
        return f"loss and lattice agree on it ({float(want_NT.mean()):.1%} of a slot before training)"

    def _trained(self) -> tuple[Slots, AnchorLoss]:
        """What training computes at the anchors."""
        slots = self.task.slots(*self._inputs, self.batch)
        batch = draftable(self.batch, self.vocabulary)
        return slots, draft_losses(self.head, self.objective, self.vocabulary, slots, self._inputs[0], batch=batch)

    def _drafted(self) -> list[Lattice | Tree]:
        whole = len(self.vocabulary)  # fewer candidates leave the others as they were, and psi with it
        vocabulary = self.head.vocabulary(self.base, whole)._replace(tokens=self.vocabulary)
        return self.head.drafts(self._inputs[0], roots_of(self.batch), anchors_of(self.batch), vocabulary)

    # -- training and decoding ------------------------------------------------------------------------------

    def loss(self) -> str:
        """Does training on this one conversation teach its drafts?"""
        optimizer = torch.optim.AdamW(self.head.parameters(), LR)
        losses: list[float] = []
        share = 0.0
        for step in tqdm(range(1, self.steps + 1), "one conversation", unit="step", mininterval=1, leave=False):
            loss, metrics = self.task(*self._inputs, self.batch)
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
        _, out = self._trained()
        lengths_N = self.batch.lengths_N
        slots_N = torch.full_like(lengths_N, self.head.config.slots)
        can_NU = feasible_prefixes(self.batch.labels_NU, lengths_N, slots_N, self.head.topology)
        if self.objective.kind == "ctc":  # which is all or nothing
            can_NU &= (can_NU.sum(dim=1) == lengths_N).unsqueeze(1)
        psi_NU = out.log_psi_NU.exp()
        return psi_NU, can_NU[:, : psi_NU.shape[1]]

    @torch.no_grad()
    def tree(self) -> str:
        """Do draft trees hold what the head has learnt, with the psi that the loss gives it?"""
        draft = replace(self.draft, prune=0.0, prompt_lookup=0)
        decoder = Decoder(self.base, self.head, draft)
        psi_NU, can_NU = self._learnt()
        off, held, able = [0.0], 0, 0
        for n, (drafted, read) in enumerate(zip(self._drafted(), read_at(self.batch), strict=True)):
            tree, count = decoder.drafter.tree(drafted, Frontier(read, self.base.eos_ids)), int(can_NU[n].sum())
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
        limit = max(2, len(self.ids) - len(self.prompt))
        plain = Decoder(self.base).generate(self.prompt, limit)
        # Else only the nodes that pay are verified, and what is drafted ends at the first token that is no candidate.
        draft = replace(self.draft, prompt_lookup=0, budget="fixed", top_k=len(self.vocabulary))
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
        text, able = [*self.prompt, *drafted.tokens], self._learnt()[1].sum(dim=1).tolist()
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


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference, in units of the largest of what is wanted."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
