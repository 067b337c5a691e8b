"""Every draft preset with the same head, at temperature 0 and above: real decoding, presets interleaved.

python bench/drafts.py <run> [--count N] [--tokens N] [--presets a,b] [--temperatures 0 1] [--nodes 32] [--budget fixed]
    [--batches 1 4 16] [--dtype fp32] [--bench mt_bench --questions FILE]
python bench/drafts.py <exported head> --base <model> ...

A preset is a file of conf/draft; `ouroboros alone` and `prompt lookup` have no head. Intervals are 95% bootstrap ones
over questions; the difference from the first preset is over the same resampled ones. `drafted` counts nodes per step,
`from` says who proposed what was accepted. --batches: tokens per second of so many prompts together, beside plain
decoding of the same.
"""

import argparse
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from measure import machine

from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.results import measured
from ctcdraft.eval.run import run
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.runs import chosen_heads
from ctcdraft.launch.schema import EvalEntry
from ctcdraft.model import Decoder, load_head

PRESETS = ("tree", "coupled", "mcsd", "cape", "adaedl", "ouroboros", "graph", "pearl")
ALONE = "ouroboros alone"


def draft_of(preset, options):
    """A preset's DraftConfig with as many nodes as asked for."""
    words = [f"draft={preset}", f"draft.nodes={options.nodes}", f"draft.budget={options.budget}"]
    return typed(compose("eval", words), EvalEntry).draft


def interval(block, name, ends):
    low, high = ends
    return f"{block[name]:.2f} [{low:.2f}, {high:.2f}]"


def chosen(options):
    """The base, the head and the questions that are asked for: a run knows its base, and what it kept from training."""
    folder = options.head.resolve()
    words = [f"head.path={folder}", *([f"base.path={options.base}"] if options.base else [])]
    if (folder / "paths.json").is_file():
        words = [f"name={folder.name}", f"runs_dir={folder.parent}"]
    base, heads, data = chosen_heads(typed(compose("eval", [*words, f"base.dtype={options.dtype}"]), EvalEntry))
    count = max(options.batches, default=options.count)
    kind = options.bench or ("heldout" if data else "mt_bench")
    bench = BenchConfig(
        kind,
        path=options.questions,
        temperatures=options.temperatures,
        max_new_tokens=options.tokens,
        questions=count,
        warmups=1,
        seeds=1,
    )
    return base, load_head(next(iter(heads.values())), base), bench, load_questions(bench, base, data, 0)


def decoded(base, decoders, bench, questions):
    turns = run(base, decoders, questions, bench)
    header = ("draft", "tokens per step", "beside the first", "speedup", "drafted", "accepted", "from", "identical")
    for temperature, blocks in measured(turns, 0).items():
        rows = []
        for label, block in blocks.items():
            apart, same = block["difference"], block["identical"]
            own = [t for t in turns[label] if t.setting.temperature == temperature]
            sources = sum((t.drafted.accepted_from for t in own), Counter())
            shares = ", ".join(f"{name} {n / sources.total():.0%}" for name, n in sources.most_common())
            beside = (
                ""
                if apart is None
                else "{value:+.2f} [{ci95[0]:+.2f}, {ci95[1]:+.2f}]".format(**apart["tokens_per_step"])
            )
            rows.append(
                (
                    label,
                    interval(block, "tokens_per_step", block["tokens_per_step_ci95"]),
                    beside,
                    interval(block["speedup"], "ratio_of_means", block["speedup"]["ci95"]),
                    f"{block['nodes_per_step']:.1f}",
                    f"{block['calibration']['accepted']:.2f}",
                    shares,
                    f"{same['identical']} of {same['compared']}" if same["compared"] else "in distribution",
                )
            )
        print(f"\nTemperature {temperature:g}\n\n{markdown_table(header, rows)}", flush=True)


def batches(base, decoders, questions, options):
    prompts = [question.prompt_after(base) for question in questions]
    for temperature in options.temperatures:
        rows = []
        for label, decoder in {"plain": Decoder(base), **decoders}.items():
            cells = []
            for size in options.batches:
                few = prompts[:size]
                decoder.generate(few, 4)
                start = time.perf_counter()
                outs = decoder.generate(few, options.tokens, temperature=temperature, seed=list(range(size)))
                cells.append(sum(len(out.tokens) for out in outs) / (time.perf_counter() - start))
            rows.append((label, *cells))
        plain = rows[0][1:]
        table = [
            (label, *(f"{rate:.1f} ({rate / before:.2f}x)" for rate, before in zip(cells, plain, strict=True)))
            for label, *cells in rows
        ]
        header = ("tokens per second", *(f"batch {size}" for size in options.batches))
        print(f"\nTemperature {temperature:g}\n\n{markdown_table(header, table)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", type=Path, help="a run, or an exported head")
    parser.add_argument("--base", help="of an exported head; a run knows its own")
    parser.add_argument("--bench", help="mt_bench or toy; a run's held-out questions where none is named")
    parser.add_argument("--questions", help="a file, for mt_bench")
    parser.add_argument("--count", type=int, default=16, help="questions: 16")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer: 96")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--budget", default="fixed")
    parser.add_argument("--batches", type=int, nargs="+", default=[])
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    try:
        drafts = {preset: draft_of(preset, options) for preset in options.presets.split(",")}
        base, head, bench, questions = chosen(options)
        decoders = {preset: Decoder(base, head, draft) for preset, draft in drafts.items()}
    except ValueError as error:
        parser.error(str(error))
    if "ouroboros" in decoders:
        decoders[ALONE] = Decoder(base, None, replace(draft_of("ouroboros", options), prompt_lookup=0))
    decoders["prompt lookup"] = Decoder(base, None, draft_of("tree", options))
    print(f"{machine()}; {options.dtype}, N={options.nodes}, budget {options.budget}")
    if options.batches:
        batches(base, decoders, questions, options)
    else:
        decoded(base, decoders, bench, questions)


if __name__ == "__main__":
    main()
