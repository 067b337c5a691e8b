"""What a step of draft.schedule=pearl takes beside its two sides, and what it yields: real decoding, interleaved.

python bench/pearl.py <exported head> --base <model> [--bench toy] [--questions FILE] [--count 8] [--tokens 64]
    [--nodes 8] [--temperature 0] [--threads 1] [--dtype fp32]

`base` and `head`: milliseconds of a step of draft.schedule=serial (of the base, over a tree of as many nodes); `step`:
all of a step. With cores for both, a step of pearl would take the larger of the two, at best.
"""

import argparse
from pathlib import Path

import torch
from measure import machine

from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.run import balanced_orders
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head

SCHEDULES = ("serial", "pearl")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--bench", default="toy", help="mt_bench or toy")
    parser.add_argument("--questions", help="a file, for mt_bench")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        base = load_base(options.base, options.dtype)
        head = load_head(options.head, base)
        config = BenchConfig(options.bench, path=options.questions, questions=options.count)
        prompts = [question.prompt_after(base) for question in load_questions(config, base, None, 0)]
        decoders = {"plain": Decoder(base)}
        for lookup in (0, DraftConfig.prompt_lookup):
            for schedule in SCHEDULES:
                draft = DraftConfig(nodes=options.nodes, budget="fixed", prompt_lookup=lookup, schedule=schedule)
                decoders[f"{schedule}{' and lookup' if lookup else ''}"] = Decoder(base, head, draft)
    except ValueError as error:
        parser.error(str(error))
    outs = {name: [] for name in decoders}
    orders = balanced_orders(list(decoders))
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first is a warm-up
        for name in orders[number % len(orders)]:
            outs[name].append(decoders[name].generate(prompt, options.tokens, temperature=options.temperature))
    rows, rates = [], {}
    for name, made in outs.items():
        steps, seconds = sum(out.steps for out in made[1:]), {}
        for out in made[1:]:
            seconds = {part: seconds.get(part, 0.0) + spent for part, spent in out.seconds.items()} or seconds
        tokens = sum(len(out.tokens) - 1 for out in made[1:])
        rates[name] = tokens / sum(seconds.values())
        same = sum(a.tokens == b.tokens for a, b in zip(made[1:], outs["plain"][1:], strict=True))
        parts = (1e3 * seconds.get(part, 0.0) / steps for part in ("verify", "draft"))
        whole = 1e3 * sum(seconds.values()) / steps
        pending = sum(nodes > 0 for out in made[1:] for nodes in out.nodes) / steps
        cells = (f"{tokens / steps:.2f}", *(f"{ms:.1f}" for ms in parts), f"{whole:.1f}", f"{pending:.0%}")
        rows.append(
            (name, *cells, f"{rates[name]:.1f}", f"{rates[name] / rates['plain']:.2f}", f"{same} of {len(prompts)}")
        )
    header = (
        "schedule",
        "tokens per step",
        "base, ms",
        "head, ms",
        "step, ms",
        "with a draft",
        "tokens/s",
        "times plain",
    )
    print(
        f"{machine()}; {options.dtype}, N={options.nodes}, temperature {options.temperature:g}, {options.count} prompts"
    )
    print(markdown_table((*header, "identical"), rows))


if __name__ == "__main__":
    main()
