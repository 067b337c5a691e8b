"""What a training run would take, from a base's config.json alone: no weights are read (docs/scale.md).

python launch/doctor.py --plan gpus=8 base=<config.json> [options as launch/train.py takes them]

Shape suffixes as in docs/scale.md: B rows of a micro-batch, L tokens of a row, D hidden size, F width of the base's
feed-forward layers, N anchors, T slots.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import attended_on, head_on, parameters_of
from ctcdraft.model.load.pretrained import DTYPES
from ctcdraft.model.loss.linear_lse import TILE_BYTES

GPU_FLOPS = 4e14  # that a GPU gives, multiplications and additions apart: 40% of an H100's in bfloat16
CUDA_CONTEXT = 0.5e9
GB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Of one rank: bytes by what holds them, seconds of an optimizer step (None on a CPU), and of the base its
    parameters, those that a token meets, and the bytes of a stored token's features."""

    parts: dict[str, float]
    seconds: float | None
    parameters: int
    active: int
    stored: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def described(path: str, dtype: str) -> Base:
    """A base without weights. Raises ValueError where the file describes no causal LM."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"base={path}: no such file; --plan wants a model's config.json")
    try:
        config = AutoConfig.from_pretrained(file)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval().requires_grad_(False)
        longest = config.get_text_config().max_position_embeddings
    except Exception as error:  # whatever a strange file makes transformers raise
        raise ValueError(f"base={path}: no causal LM ({' '.join(str(error).split())[:200]})") from error
    return Base(model, None, str(file.parent), (), longest, False)


def estimated(config: TrainEntry, path: str, gpus: int) -> Estimate:
    """On so many GPUs, a rank on each; 0: on one process of this machine's CPU."""
    dtype = config.base.dtype if config.base.dtype != "auto" else "bf16"
    base = described(path, dtype)
    try:
        head, attended = head_on(base, config.head), attended_on(base, config.head)
    except (RuntimeError, LookupError) as error:
        raise ValueError(f"base={path}: no layer runs in {dtype} without weights ({error}): plan head=mlp") from error
    ranks, micro = max(1, gpus), config.train.split(max(1, gpus))[0]
    W, H = base.dtype.itemsize, DTYPES["bf16" if gpus else config.train.precision].itemsize
    B, L, D = micro, min(config.train.max_length, base.context_length), base.hidden_size
    F = getattr(base.model.config.get_text_config(), "intermediate_size", None) or 4 * D
    N, T, layers = B * config.train.anchors, config.head.slots, getattr(config.head, "layers", 1)
    vocabulary = config.head.draft_vocab_size or base.vocab_size
    drawn = min(vocabulary, config.objective.negatives or vocabulary)
    features = D + (attended.size if attended else 0)
    trained, stage = parameters_of(head), max(config.zero.stage, int(H == 2))
    shared = {  # bytes, and the ZeRO stage from which on ranks share them; below float32 there are masters too
        "weights": (trained * H, 3),
        "gradients": (trained * H, 2),
        "moments": (trained * (8 if H == 4 else 12), 1),
    }
    linears = sum(one.weight.nbytes for one in base.model.modules() if isinstance(one, nn.Linear))
    parts = {
        "process": CUDA_CONTEXT if gpus else float(psutil.Process().memory_info().rss),
        "base": float(sum(p.nbytes for p in base.model.parameters())),
        "its linear layers once more, packed": 0.0 if gpus else float(linears),
        **{f"head: {name}": size / (ranks if stage >= least else 1) for name, (size, least) in shared.items()},
        "buffer of gradients": float(trained * H),
        "base: a layer's forward": float(B * L * (4 * D + 3 * F) * W),
        "its rows of the draft vocabulary": float(vocabulary * D * W if vocabulary < base.vocab_size else 0),
        "mask of packed rows": float(B * L * L * (1 + W) if config.train.pack else 0),
        "features of a micro-batch": float(B * L * (features + D) * (W + H)),
        "head: slots": float(N * T * layers * (8 * D + 4 * F) * H),
        "head: keys and values": float(layers * B * L * 2 * D * H),
        "loss: states": 3.0 * N * (2 * T) * D * 4,
        "loss: logits of a tile": 2.0 * TILE_BYTES["cuda" if gpus else "cpu"],
        "loss: the base's distribution": 2.0 * min(N * T, B * L) * drawn * 4,
    }
    active = _active(base.model, base)
    batch = config.train.rows_over(ranks)
    tokens, rows = batch * L, batch * config.train.anchors * T
    flops = 2 * active * tokens + 6 * _active(head, base) * rows + 3 * 2 * (2 * rows) * drawn * D
    seconds = flops / (gpus * GPU_FLOPS) if gpus else None
    return Estimate(parts, seconds, parameters_of(base.model), active, features * W)


def rows_of(config: TrainEntry, found: Estimate, gpus: int) -> list[tuple[str, str]]:
    """What is printed."""
    where = f"each of {gpus} GPUs" if gpus else "a process on this CPU"
    rows = [("rows of a step", f"{config.train.rows_over(max(1, gpus))} (train.batch)")]
    rows += [("base", f"{found.parameters:,} parameters, {found.active:,} of them meet a token")]
    rows += [(name, f"{size / GB:.2f} GB") for name, size in found.parts.items() if size]
    rows.append((f"memory of {where}", f"{found.total / GB:.1f} GB"))
    if gpus:
        base = found.parts["base"] / GB
        rows.append(("base on each rank", f"whole; spread over {gpus} it would be {base / gpus:.1f} GB"))
    rows.append(("stored features", f"{found.stored:,} bytes per token, {found.stored * 1e6 / GB:.1f} GB per million"))
    if found.seconds is not None:
        whole_run = timedelta(seconds=round(found.seconds * config.train.steps))
        rows.append(("a step", f"{1000 * found.seconds:.1f} ms at {GPU_FLOPS:.0e} FLOP/s per GPU"))
        rows.append(
            (f"{config.train.steps} steps", f"{whole_run}; data, evaluations and the base's answers come on top")
        )
    return rows


def _active(module: nn.Module, base: Base) -> int:
    """Parameters of the base, or of a head with copies of its layers, that a token meets: of experts those it is sent
    to."""
    config = base.model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    inside = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    return parameters_of(module) - inside + inside * chosen // experts
