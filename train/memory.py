"""What a training run will hold in memory, per part and rank: an estimate from sizes alone, before anything runs."""

from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.packed import PackedLinear
from ctcdraft.model.heads import Head, parameters_of

from .engine import PRECISIONS, bucket_of
from .loop import Plan

KEPT_PER_SLOT = 27  # activations of its own width that a block needs in its backward, per slot; measured, rounded up
KEPT_OF_COPY = (12, 4)  # the same of a copied layer, in widths of the base and of its MLP
KEPT_OF_MOVED = 4  # widths of the base per slot and prefix that it stands behind
LOGIT_ROWS = 1024  # rows of logits that the loss holds at a time


def memory_per_rank(base: Base, head: Head, plan: Plan, ranks: int) -> dict[str, int]:
    """Bytes per part on one rank, with rows of as many tokens as the plan and the base allow.

    ZeRO shares optimizer state (1), gradients too (2), parameters too (3) among ranks.
    """
    train, zero, width = plan.train, plan.zero, PRECISIONS[plan.train.precision].itemsize
    micro, anchors, length = train.split(ranks)[0], train.anchors, min(train.max_length, base.context_length)
    count, config = parameters_of(head), head.config
    masters = 4 * count if width == 2 else 0  # fp32 weights where those of the head are not
    states = masters + 8 * count  # AdamW's two moments
    shared = [ranks if zero.stage >= stage else 1 for stage in (1, 2, 3)]
    offloaded = 0 if zero.offload else 1
    attended, D = head.attended, base.hidden_size
    features = D + (0 if attended is None else attended.size)
    inner = getattr(base.model.config.get_text_config(), "intermediate_size", None) or 4 * D
    per_layer = KEPT_PER_SLOT * D if attended is None else KEPT_OF_COPY[0] * D + KEPT_OF_COPY[1] * inner
    layers = getattr(config, "layers", 1)
    per_draft = config.slots * (layers * per_layer + 3 * D)
    rows = anchors * config.slots  # of a sequence: in the mask each has a number for all of them and for the context
    seen = 0 if attended is None else micro * (length + rows) * (rows + 2 * layers * D)  # and keys and values
    rank = 0 if head.transition is None else head.transition.from_slot.out_features
    behind = 1 + config.topology.width(config.slots)  # prefixes that a slot stands behind
    moved = micro * anchors * config.slots * behind * (KEPT_OF_MOVED * D + 2 * rank)
    vocab = config.draft_vocab_size or base.vocab_size
    return {
        "base weights": sum(p.nbytes for p in base.model.parameters()),
        "packed weights": sum(m.weight.nbytes for m in base.model.modules() if isinstance(m, PackedLinear)),
        "head weights": count * width // shared[2],
        "gradients": count * width // shared[1],
        "summed over ranks": 4 * bucket_of(count) * (zero.stage > 0),
        "optimizer": offloaded * states // shared[0],
        "evaluation": 4 * count,  # a second head, which drafts in float32
        "features": 2 * micro * length * features * (width + base.lm_weight.element_size()),
        "slots": (micro * anchors * per_draft + seen) * width,
        "transition": (rank > 0) * moved * 4,
        "logits": 2 * min(LOGIT_ROWS, micro * anchors * config.slots) * vocab * 4,
    }
