"""Tokens per second of a whole training step beside the base's bare forward on the same batch, split by part.

python bench/train_step.py [--shape tiny|small|vicuna_7b] [--anchors N] [--rounds N]

The base has random weights: speed needs no trained ones. No DeepSpeed: the step of one process, with AdamW.
"""

import argparse
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import DEVICE, interleaved, spread, told, wait
from transformers import AutoModelForCausalLM, LlamaConfig

from ctcdraft.data.batches import Batch
from ctcdraft.eval.report import markdown_table
from ctcdraft.model import HeadConfig, build_head
from ctcdraft.model.base import Base
from ctcdraft.train.task import ObjectiveConfig, base_features, draft_losses, embedded_labels

PARTS = ("base", "head", "loss", "backward", "optimizer")
LABELS = 8
OBJECTIVE = ObjectiveConfig(labels=LABELS)


@dataclass(frozen=True)
class StepShape:
    """Sizes of a Llama base, of the head, and of one batch."""

    hidden: int
    layers: int
    inner: int
    attention_heads: int
    vocab: int
    width: int
    mixer: int
    batch: int
    length: int
    dtype: str = "float32"
    anchors: tuple[int, ...] = field(default=(128,))  # per sequence


SHAPES = {
    "tiny": StepShape(128, 4, 352, 4, 2048, 128, 128, 4, 256, anchors=(64, 128)),
    "small": StepShape(512, 8, 1408, 8, 32000, 512, 256, 2, 256, anchors=(64, 128)),
    "vicuna_7b": StepShape(4096, 32, 11008, 32, 32000, 4096, 1024, 1, 2048, "bfloat16", anchors=(512, 2039)),
}


class NoText:
    """Stands where a tokenizer would: random weights have nothing to say."""

    def decode(self, tokens, **options):
        return ""


def random_base(shape):
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.attention_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=4096,
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    return Base(model.eval().requires_grad_(False), NoText(), "random", (2,), 4096, plain_template=False)


def random_batch(shape, anchors):
    g = torch.Generator().manual_seed(0)
    B, L = shape.batch, shape.length
    ids_BL = torch.randint(0, shape.vocab, (B, L), generator=g)
    anchors = min(anchors, L - LABELS - 1)
    position = torch.stack([torch.randperm(L - LABELS - 1, generator=g)[:anchors] for _ in range(B)])
    batch_N = torch.arange(B).repeat_interleave(anchors)
    position_N = position.flatten()
    labels_NU = ids_BL[batch_N[:, None], position_N[:, None] + 2 + torch.arange(LABELS)]
    return Batch(ids_BL, batch_N, position_N, labels_NU, torch.full((len(batch_N),), LABELS)).to(torch.device(DEVICE))


class Step:
    """One optimizer step, and the seconds that its parts took."""

    def __init__(self, base, shape, anchors):
        self.base, self.batch = base, random_batch(shape, anchors)
        self.dtype = getattr(torch, shape.dtype)
        config = HeadConfig(
            width=shape.width, heads=max(1, shape.width // 128), mixer_width=shape.mixer, mixer_heads=shape.mixer // 64
        )
        self.head = build_head(config, base.hidden_size).to(DEVICE, self.dtype)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4, fused=True)
        self.seconds = {part: [] for part in PARTS}

    def __call__(self):
        batch = self.batch
        with self.timed("base"):
            hidden, root = base_features(self.base, batch, self.dtype)
        with self.timed("head"):
            slots = self.head(hidden, root, batch.batch_N, batch.position_N)
        with self.timed("loss"):
            labels = embedded_labels(self.base, batch, self.dtype)
            out = draft_losses(self.head, OBJECTIVE, self.base, slots, batch, labels)
        with self.timed("backward"):
            (out.loss_N.sum() / len(batch.lengths_N)).backward()
        with self.timed("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextmanager
    def timed(self, part):
        wait()
        start = time.perf_counter()
        yield
        wait()
        self.seconds[part].append(time.perf_counter() - start)


def measured(name, anchors, rounds):
    shape = SHAPES[name]
    base = random_base(shape)
    rows = []
    for count in anchors or shape.anchors:
        step = Step(base, shape, count)
        seconds = interleaved({"step": step, "forward": lambda step=step: base.hidden(step.batch.ids_BL)}, rounds)
        whole, bare = spread(seconds["step"]), spread(seconds["forward"])
        tokens = shape.batch * shape.length
        share = {part: sum(times[1:]) / sum(seconds["step"]) for part, times in step.seconds.items()}
        rows.append(
            {
                "shape": name,
                "anchors": count,
                "parameters": sum(p.numel() for p in step.head.parameters()),
                "tokens_per_second": tokens / whole["median"],
                "bare_tokens_per_second": tokens / bare["median"],
                "share_of_bare_forward": bare["median"] / whole["median"],
                "time_share": share,
            }
        )
        del step
    return rows


def table(rows):
    lines = [
        (
            row["shape"],
            row["anchors"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['bare_tokens_per_second']:.0f}",
            f"{row['share_of_bare_forward']:.0%}",
            *(f"{row['time_share'][part]:.0%}" for part in PARTS),
        )
        for row in rows
    ]
    header = ("shape", "anchors per sequence", "tokens/s", "bare forward", "of it", *PARTS)
    return markdown_table(header, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--anchors", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.shape for row in measured(name, options.anchors, options.rounds)]
    told("", table(rows), rows, options.out)


if __name__ == "__main__":
    main()
