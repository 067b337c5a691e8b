"""Tokens per second of a whole training step beside the base's bare forward on the same batch, split by part, and
beside the same step from hidden states that were stored before (read from disk, checksums and all).

python bench/train_step.py [--shape tiny|small|vicuna_7b|smollm2] [--anchors N] [--rounds N]
python bench/train_step.py --whole [--threads N] [--dtype bfloat16|float32]: a step of SmolLM2's shape with the base's
forward in it and float32 GEMMs beside steps from stored states, with the same anchors and fewer slots

Base and head have random weights. No DeepSpeed: the step of one process.
"""

import argparse
import json
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from measure import DEVICE, interleaved, keep, spread, told, wait
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from ctcdraft.data.batches import Batch
from ctcdraft.data.features import Features, shard_name, shard_tensors
from ctcdraft.eval.report import markdown_table
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import CtcConfig, attended_on, head_on
from ctcdraft.model.load.precision import cpu_has_bf16
from ctcdraft.train import task
from ctcdraft.train.task import base_features

PARTS = ("base", "head", "loss", "backward", "optimizer")
LABELS = CtcConfig().slots


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of a Llama base and of one batch."""

    hidden: int
    layers: int
    inner: int
    attention_heads: int
    vocab: int
    batch: int
    length: int
    dtype: str = "float32"
    key_heads: int | None = None
    anchors: tuple[int, ...] = field(default=(128,))  # per sequence


SHAPES = {
    "tiny": StepShape(  # about the toy base
        hidden=128,
        layers=4,
        inner=352,
        attention_heads=4,
        vocab=2048,
        batch=4,
        length=256,
        anchors=(32, 64, 128),
    ),
    "small": StepShape(
        hidden=512,
        layers=8,
        inner=1408,
        attention_heads=8,
        vocab=32000,
        batch=2,
        length=256,
        anchors=(64, 128),
    ),
    "smollm2": StepShape(
        hidden=576,
        layers=30,
        inner=1536,
        attention_heads=9,
        vocab=49152,
        key_heads=3,
        batch=4,
        length=320,
        anchors=(32,),
        dtype="bfloat16",
    ),
    "vicuna_7b": StepShape(
        hidden=4096,
        layers=32,
        inner=11008,
        attention_heads=32,
        vocab=32000,
        batch=1,
        length=2048,
        anchors=(512, 2039),
        dtype="bfloat16",
    ),
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
        num_key_value_heads=shape.key_heads or shape.attention_heads,
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


def stored_states(base, batch, folder):
    """The batch's hidden states on disk, as training reads them."""
    path, states_BLX = folder / shard_name(0), base.hidden(batch.ids_BL, attended=attended_on(base, CtcConfig()))
    save_file(shard_tensors([states.to(torch.bfloat16).cpu() for states in states_BLX]), path)
    facts = {"size": states_BLX.shape[2], "shard": len(states_BLX)}
    (folder / "manifest.json").write_text(json.dumps(facts))
    return Features(folder, np.full(len(batch.ids_BL), batch.ids_BL.shape[1]), facts)


def random_head(base, transition, slots=LABELS):
    """The product's, of other slots."""
    config = CtcConfig(slots=slots, merge=False, band=1, transition=transition)
    return head_on(base, config).to(base.device)


class Step:
    """One optimizer step, and the seconds that its parts took."""

    def __init__(self, base, shape, anchors, features=None, transition="full", slots=LABELS, mixed=True):
        self.base, self.batch, self.features = base, random_batch(shape, anchors), features
        labels_NU, lengths_N = self.batch.labels_NU[:, :slots], self.batch.lengths_N.clamp(max=slots)
        self.batch = self.batch._replace(labels_NU=labels_NU, lengths_N=lengths_N)
        self.mixed = mixed
        self.dtype = torch.float32 if DEVICE == "cpu" else getattr(torch, shape.dtype)
        self.head = random_head(base, transition, slots).to(self.dtype)
        self.task = task.DraftTask(self.head, task.ObjectiveConfig(labels=slots), base)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), 1e-4)
        self.seconds = {part: [] for part in PARTS}

    def __call__(self):
        batch = self.batch
        with self.timed("base"):
            if self.features:
                stored = self.features.rows([[row] for row in range(len(batch.ids_BL))], batch.ids_BL.shape[1])
                batch = batch._replace(stored_BLX=stored).to(torch.device(DEVICE))
            hidden, root = base_features(self.base, batch, self.dtype, self.head)
        with self.timed("head"):
            slots = self.task.slots(hidden, root, batch)
        with self.timed("loss"), mock.patch.object(task, "cpu_has_bf16", cpu_has_bf16 if self.mixed else bool):
            out = self.task.losses(slots, hidden, batch)
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
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(name, base, shape, count, rounds, Path(folder)))
    return rows


def whole_steps(dtype, rounds):
    """Seconds of a step as it was before states were stored, and of those from stored states, interleaved."""
    shape = replace(SHAPES["smollm2"], dtype=dtype)
    base, anchors = random_base(shape), shape.anchors[0]
    with tempfile.TemporaryDirectory() as folder:
        stored = stored_states(base, random_batch(shape, anchors), Path(folder))
        calls = {"forward in the step, float32 GEMMs, 20 slots": Step(base, shape, anchors, mixed=False)}
        for slots in (20, 10, 8):
            calls[f"stored states, {slots} slots"] = Step(base, shape, anchors, stored, slots=slots)
        seconds = interleaved(calls, rounds)
    before = spread(next(iter(seconds.values())))["median"]
    rows = []
    for name, found in seconds.items():
        parts = {part: f"{np.median(times[1:]):.2f}" for part, times in calls[name].seconds.items()}
        middle = spread(found)["median"]
        rows.append((name, f"{middle:.2f}", f"{before / middle:.1f}", *parts.values()))
    return markdown_table(("step", "seconds", "times as fast", *PARTS), rows)


def compared(name, base, shape, anchors, rounds, folder):
    step = Step(base, shape, anchors)
    calls = {"step": step, "forward": lambda: base.hidden(step.batch.ids_BL)}
    calls["without"] = Step(base, shape, anchors, transition="none")
    calls["stored"] = Step(base, shape, anchors, stored_states(base, step.batch, folder))
    seconds = interleaved(calls, rounds)
    middle = {call: spread(found)["median"] for call, found in seconds.items()}
    tokens = shape.batch * shape.length
    share = {part: sum(times[1:]) / sum(seconds["step"]) for part, times in step.seconds.items()}
    return {
        "shape": name,
        "anchors": anchors,
        "parameters": sum(p.numel() for p in step.head.parameters()),
        "tokens_per_second": tokens / middle["step"],
        "bare_tokens_per_second": tokens / middle["forward"],
        "share_of_bare_forward": middle["forward"] / middle["step"],
        "time_share": share,
        "times_the_step_without_transition": middle["step"] / middle["without"],
        "stored_step_time": middle["stored"] / middle["step"],
    }


def table(rows):
    lines = [
        (
            row["shape"],
            row["anchors"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['bare_tokens_per_second']:.0f}",
            f"{row['share_of_bare_forward']:.0%}",
            *(f"{row['time_share'][part]:.0%}" for part in PARTS),
            f"{row['times_the_step_without_transition']:.2f}",
            f"{row['stored_step_time']:.0%}",
        )
        for row in rows
    ]
    header = (
        "shape",
        "anchors per sequence",
        "tokens/s",
        "bare forward",
        "of it",
        *PARTS,
        "transition, times",
        "step from stored states",
    )
    return markdown_table(header, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--anchors", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.whole:
        return print(whole_steps(options.dtype, options.rounds))
    rows = [row for name in options.shape for row in measured(name, options.anchors, options.rounds)]
    keep(rows, options.out)
    told("", table(rows))


if __name__ == "__main__":
    main()
