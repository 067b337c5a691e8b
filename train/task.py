"""What one training step computes: base hidden states, the head's slots, the loss, and its figures."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ctcdraft.data.batches import Batch
from ctcdraft.data.store import Corpus
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import CtcConfig, Head, HeadConfig, head_on
from ctcdraft.model.heads.head import Slots
from ctcdraft.model.heads.vocabulary import DraftVocabulary, beside, most_frequent
from ctcdraft.model.load.precision import cpu_has_bf16
from ctcdraft.model.loss.divergence import Divergence, Teacher
from ctcdraft.model.loss.linear_lse import multiplies_in_bfloat16
from ctcdraft.model.loss.negatives import Negatives
from ctcdraft.model.loss.objective import AnchorLoss, anchor_losses

Policy = Literal["base", "draft", "mixed"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """labels: U. negatives: model/loss/negatives.py. distill: Hinton et al. 2015; divergence: Zhou et al. 2024, arXiv
    2310.08461 (model/loss/divergence.py)."""

    kind: Literal["prefix_ctc", "ctc", "cross_entropy"] = "prefix_ctc"
    # tokens of the base's continuation to learn, at most the slots
    labels: PositiveInt = field(kw_only=True)
    # weight of prefix k (of slot k in cross_entropy): decay^(k-1)
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    # sampled softmax: so many other tokens beside a step's labels; null: the whole draft vocabulary
    negatives: PositiveInt | None = 3072
    # how much of each label is the base's whole distribution there, instead of the token it chose
    distill: Annotated[float, Field(ge=0, le=1)] = 1.0
    # of the head's distribution there from the base's: kl | reverse_kl | js | tv | acceptance (-log of the rate at
    # which drafts would be accepted); null: cross-entropy of each slot
    divergence: Divergence | None = None
    teacher_k: PositiveInt = 16  # likeliest tokens of the base that a divergence tells apart; all others are one
    # whose continuations are learnt from the base's distributions: base's own | draft: the head's | mixed: half of each
    policy: Policy = "base"

    def __post_init__(self) -> None:
        if self.policy != "base" and self.distill != 1.0:
            raise ValueError(
                f"objective.policy={self.policy} needs objective.distill=1.0: a draft is no label, what the base says "
                "of it is"
            )


def check_fit(head: HeadConfig, objective: ObjectiveConfig) -> None:
    """Raises ValueError where a head cannot be trained with an objective."""
    if objective.labels > head.slots:
        raise ValueError(
            f"objective.labels={objective.labels} do not fit into head.slots={head.slots}: "
            "lower the one or raise the other"
        )
    if isinstance(head, CtcConfig) != (objective.kind != "cross_entropy"):
        fitting = "prefix_ctc or ctc" if isinstance(head, CtcConfig) else "cross_entropy"
        raise ValueError(f"head={head.kind} cannot be trained with {objective.kind}: use objective={fitting}")
    if objective.kind == "ctc" and objective.divergence is not None:
        raise ValueError("objective=ctc says nothing of prefixes: objective.divergence goes with objective=prefix_ctc")
    if not isinstance(head, CtcConfig) or head.band is None:
        return
    if objective.kind == "ctc":
        raise ValueError(
            f"objective=ctc asks where a draft ends, which head.band={head.band} decides by itself: "
            "use head.band=null, and head.merge=true for the paper's"
        )
    if objective.labels + head.band < head.slots:
        raise ValueError(
            f"objective.labels={objective.labels} and head.band={head.band} leave slots without a label: "
            f"head.slots={head.slots} must be at most {objective.labels + head.band}, objective.labels more, or "
            "head.band=null"
        )


def head_for(config: HeadConfig, base: Base, corpus: Corpus) -> Head:
    """A freshly initialised head, on the base's device; it knows the corpus' frequent tokens."""
    head = head_on(base, config)
    if (size := head.config.draft_vocab_size) is not None:
        ids = most_frequent(corpus.labels, corpus.mask > 0, base.vocab_size, size, base.eos_ids)
        head.draft_ids_X.copy_(torch.from_numpy(ids))
    head.to(base.device).warm_start(base)
    return head


def negatives_for(objective: ObjectiveConfig, vocabulary: DraftVocabulary, corpus: Corpus) -> Negatives | None:
    """What draws the negatives of a sampled softmax; None where the whole draft vocabulary is hardly larger."""
    if objective.negatives is None or 2 * objective.negatives > len(vocabulary):
        return None
    V = vocabulary.base.vocab_size
    seen = np.bincount(corpus.labels[corpus.mask > 0], minlength=V)[:V]
    return Negatives(torch.from_numpy(seen[vocabulary.host_ids]), objective.negatives)


def adamw(
    parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused on a CPU, where that takes 0.3 of the time; elsewhere as torch chooses."""
    trained = [*parameters]
    fused = True if all(p.device.type == "cpu" for p in trained) else None
    return torch.optim.AdamW(trained, lr, betas, weight_decay=weight_decay, fused=fused)


class StepMetrics(NamedTuple):
    """Sums over anchors, ready to be added up over micro-batches and ranks: blank over feasible ones, psi of
    the prefixes of 1..U labels where there are as many."""

    loss: Tensor
    anchors: Tensor
    feasible: Tensor
    psi_U: Tensor
    blank_T: Tensor


class DraftTask(nn.Module):
    """Head and objective as one module, so that DeepSpeed owns one forward; the base stays outside.

    negatives: of a sampled softmax, from whoever has the corpus (`negatives_for`); None: the whole draft vocabulary.
    """

    def __init__(self, head: Head, objective: ObjectiveConfig, base: Base) -> None:
        super().__init__()
        self.head, self.objective = head, objective
        self.negatives: Negatives | None = None
        self.vocabulary = head.draft_vocabulary(base)  # no module: none of its weights is a parameter of this one

    def forward(self, hidden_BLX: Tensor, root_BLD: Tensor, batch: Batch) -> tuple[Tensor, StepMetrics]:
        """The summed loss of the batch's anchors (with gradient), and the metrics to log (without)."""
        out = self.losses(self.slots(hidden_BLX, root_BLD, batch), hidden_BLX, batch)
        with torch.no_grad():
            _, lengths_N = self.vocabulary.cut(batch.labels_NU, batch.lengths_N)
            columns = torch.arange(out.log_psi_NU.shape[1], device=lengths_N.device)
            reached_NU = (columns < lengths_N.unsqueeze(1)) & out.feasible_N.unsqueeze(1)
            feasible = out.feasible_N.sum()
            metrics = StepMetrics(
                loss=out.loss_N.sum(),
                anchors=torch.tensor(float(len(lengths_N)), device=feasible.device),
                feasible=feasible.float(),
                psi_U=(out.log_psi_NU.exp() * reached_NU).sum(dim=0),
                blank_T=out.blank_rate_T.float() * feasible,
            )
        return out.loss_N.sum(), metrics

    def slots(self, hidden_BLX: Tensor, root_BLD: Tensor, batch: Batch) -> Slots:
        """What the head puts forward at the batch's anchors."""
        if not self.head.reads_labels:
            return self.head(hidden_BLX, root_BLD, anchors_of(batch))
        there_NU = torch.arange(batch.labels_NU.shape[1], device=root_BLD.device) < batch.lengths_N.unsqueeze(1)
        read = (roots_of(batch), batch.labels_NU)
        root_BLF, label_NUF = (self.head.embedded(self.vocabulary, ids, root_BLD.dtype) for ids in read)
        return self.head(hidden_BLX, root_BLF, anchors_of(batch), label_NUF.masked_fill(~there_NU.unsqueeze(2), 0.0))

    def losses(self, slots: Slots, hidden_BLX: Tensor, batch: Batch) -> AnchorLoss:
        """The loss of every anchor from its slots, up to the first label that is no token of the draft vocabulary;
        hidden: the base's states of all positions, to distil from."""
        head, objective, vocabulary = self.head, self.objective, self.vocabulary
        lm_weight, output, bias = vocabulary.lm_weight, vocabulary.output, None
        labels_NU, lengths_N = vocabulary.cut(batch.labels_NU, batch.lengths_N)
        if head.transition is not None and slots.slot_NTR is not None:
            root_N = vocabulary.numbered(roots_of(batch)[batch.batch_N, batch.position_N])
            token_NS = torch.cat([root_N.unsqueeze(1), labels_NU], dim=1)
            slots = head.transition(slots, token_NS, vocabulary, head.topology)
        if self.negatives is not None and bool((lengths_N > 0).any()):
            tokens_S, bias, labels_NU = self.negatives.draw(labels_NU, lengths_N)
            own, lm_weight = output is not lm_weight, lm_weight[tokens_S]
            output = output[tokens_S] if own else lm_weight
        soft_NUD = teacher = None
        if share := objective.distill:
            said = base_says(vocabulary.base, hidden_BLX, batch, lm_weight, bias)
            if objective.divergence is None:
                soft_NUD = soft_labels(said, labels_NU, output, share)
            else:
                teacher = said.teacher(objective.teacher_k, objective.divergence, share)
        states = beside(slots.states_NTD, output)
        weight_U = torch.tensor([objective.decay**k for k in range(objective.labels)], device=states.device)
        if slots.learnt_NT is not None:
            weight_U = weight_U * slots.learnt_NT[:, : len(weight_U)]
        return anchor_losses(
            states,
            output if multiplies_in_bfloat16(states, output) and cpu_has_bf16() else output.to(states.dtype),
            slots.blank_NT,
            labels_NU,
            lengths_N,
            objective=objective.kind,
            weight_U=weight_U,
            bias_V=bias,
            topology=head.topology,
            blank_is_odds=True,
            soft_NUD=soft_NUD,
            teacher=teacher,
        )


class Said(NamedTuple):
    """The base's logits over S tokens at K positions, and at which of them it said each label [N, U]."""

    logits_KS: Tensor
    number_NU: Tensor

    def teacher(self, tokens: int, divergence: Divergence, share: float) -> Teacher:
        """With so many of its likeliest tokens."""
        likely = self.logits_KS.log_softmax(dim=1).topk(min(tokens, self.logits_KS.shape[1]), dim=1)
        return Teacher(likely.indices[self.number_NU], likely.values[self.number_NU], divergence, share)


@torch.no_grad()
def base_says(base: Base, hidden_BLX: Tensor, batch: Batch, weight_SD: Tensor, bias_S: Tensor | None = None) -> Said:
    """What the base says where it said each anchor's labels, from its states; bias: see `anchor_losses`."""
    D, L = base.hidden_size, hidden_BLX.shape[1]
    if batch.said_NUD is not None:
        states_KD = batch.said_NUD.flatten(0, 1)
        number_NU = torch.arange(len(states_KD), device=states_KD.device).view_as(batch.labels_NU)
    else:
        column_U = torch.arange(batch.labels_NU.shape[1], device=batch.labels_NU.device)
        before_NU = batch.position_N.unsqueeze(1) + 1 + column_U
        place_NU = batch.batch_N.unsqueeze(1) * L + before_NU.clamp(max=L - 1)
        once_K, number_NU = place_NU.unique(return_inverse=True)  # anchors share most of their labels
        states_KD = hidden_BLX[..., :D].flatten(0, 1)[once_K]
    products_KS = F.linear(beside(states_KD, weight_SD).to(weight_SD.dtype), weight_SD)
    logits_KS = base.capped(products_KS.to(torch.promote_types(weight_SD.dtype, torch.float32)))
    return Said(logits_KS if bias_S is None else logits_KS + bias_S, number_NU)


def soft_labels(said: Said, labels_NU: Tensor, weight_SD: Tensor, share: float) -> Tensor:
    """The rows of the LM head, or of a head's own table, that labels stand for, [N, U, D]: the own row of each, and
    `share` of the mean row under the base's distribution over the S tokens where it said that label.

    A label's logit is linear in its row, so the cross-entropy against a distribution is that against its mean row.
    """
    wide = torch.promote_types(weight_SD.dtype, torch.float32)
    mean_KD = (said.logits_KS.softmax(dim=1).to(weight_SD.dtype) @ weight_SD).to(wide)
    return torch.lerp(weight_SD[labels_NU].to(wide), mean_KD[said.number_NU], share)


def base_features(base: Base, batch: Batch, dtype: torch.dtype, head: Head) -> tuple[Tensor, Tensor]:
    """(hidden states [B, L, X], embedded roots [B, L, D]); the root of position t is the token at t + 1. X: behind the
    hidden states comes what `head.attended` needs besides, if anything.

    Documents that share a row know nothing of each other: positions and attention start anew in each. Where the
    hidden states were stored, for a head that attends to the same layers, the base's layers do not run.
    """
    hidden_BLX = batch.stored_BLX
    if hidden_BLX is None:
        hidden_BLX = base.hidden(batch.ids_BL, document_mask(batch), attended=head.attended)
    assert hidden_BLX.shape[2] == base.hidden_size + (0 if head.attended is None else head.attended.size)
    with torch.no_grad():
        root_BLD = base.embed(roots_of(batch))
    return hidden_BLX.to(dtype), root_BLD.to(dtype)


def roots_of(batch: Batch) -> Tensor:
    """The token after each position, [B, L]."""
    return batch.ids_BL.roll(-1, dims=1)


def anchors_of(batch: Batch) -> Anchors:
    return Anchors.of(batch.batch_N, batch.position_N, len(batch.ids_BL), document_mask(batch))


def document_mask(batch: Batch) -> AttentionMask | None:
    """Position i sees j <= i of its own document; None where a row is one document."""
    if batch.document_BL is None or batch.place_BL is None:
        return None
    document_BL = batch.document_BL
    return AttentionMask(batch.place_BL, (document_BL[:, :, None] == document_BL[:, None, :]).tril().unsqueeze(1))
