"""Every draft preset with the same head, at temperature 0 and above: real decoding, presets interleaved.

python bench/drafts.py <run> [--count N] [--tokens N] [--presets a,b] [--temperatures 0 1] [--nodes 32] [--budget fixed]
    [--dtype fp32] [--bench mt_bench --questions FILE]
python bench/drafts.py <run> --batches 1 4 16 [--nodes 8 2] [--rounds 5] ...
python bench/drafts.py <exported head> --base <model> ...

A preset is a file of conf/draft; `ouroboros alone` and `prompt lookup` have no head. Intervals are 95% bootstrap ones
over questions; the difference from the first preset is over the same resampled ones. `drafted` counts nodes per step,
`from` says who proposed what was accepted. --batches: tokens per second of so many prompts together, beside plain
decoding of the same, with each of the numbers of nodes and with as many as pay (budget `measured`); medians of rounds
in which all take turns.
"""

import argparse
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from measure import interleaved, machine

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


def draft_of(preset, nodes, budget):
    """A preset's DraftConfig with as many nodes as asked for."""
    words = [f"draft={preset}", f"draft.nodes={nodes}", f"draft.budget={budget}"]
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


def decoders_of(base, head, presets, nodes, budget):
    """{label: Decoder} of the presets, and of drafts that need no head."""
    decoders = {preset: Decoder(base, head, draft_of(preset, nodes, budget)) for preset in presets}
    if "ouroboros" in presets:
        decoders[ALONE] = Decoder(base, None, replace(draft_of("ouroboros", nodes, budget), prompt_lookup=0))
    return decoders | {"prompt lookup": Decoder(base, None, draft_of("tree", nodes, budget))}


def batches(base, decoders, questions, options):
    """decoders: by label and number of nodes, `pays` for as many as pay."""
    prompts = [question.prompt_after(base) for question in questions]
    for temperature in options.temperatures:
        rates = {}
        for size in options.batches:
            few, count = prompts[:size], {}

            def decode(name, few=few, count=count, temperature=temperature):
                seeds = list(range(len(few)))
                outs = decoders[name].generate(few, options.tokens, temperature=temperature, seed=seeds)
                count[name] = sum(len(out.tokens) for out in outs)

            seconds = interleaved({name: partial(decode, name) for name in decoders}, options.rounds)
            for name, taken in seconds.items():
                rates.setdefault(name, []).append(count[name] / median(taken))
        plain = rates["plain", ""]
        table = [
            (*name, *(f"{rate:.1f} ({rate / before:.2f}x)" for rate, before in zip(cells, plain, strict=True)))
            for name, cells in sorted(rates.items(), key=lambda one: list(decoders).index(one[0]))
        ]
        header = ("tokens per second", "N", *(f"batch {size}" for size in options.batches))
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
    parser.add_argument("--nodes", type=int, nargs="+", default=[32], help="several with --batches only")
    parser.add_argument("--budget", default="fixed")
    parser.add_argument("--batches", type=int, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=5, help="of --batches: 5")
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    presets, most = options.presets.split(","), max(options.nodes)
    if min(options.batches, default=1) < 1:
        parser.error(f"--batches: {min(options.batches)} requests; one at least")
    try:
        base, head, bench, questions = chosen(options)
        if options.batches:
            ways = [(str(n), n, "fixed") for n in options.nodes] + [("pays", most, "measured")]
            serial = [preset for preset in presets if preset != "pearl"]  # whose parts can be timed
            kinds = {way: presets if budget == "fixed" else serial for way, _, budget in ways}
            several = {way: decoders_of(base, head, kinds[way], n, budget) for way, n, budget in ways}
            pairs = [(label, way) for label in several[ways[0][0]] for way in several if label in several[way]]
            decoders = {("plain", ""): Decoder(base)} | {(label, way): several[way][label] for label, way in pairs}
        else:
            decoders = decoders_of(base, head, presets, most, options.budget)
    except ValueError as error:
        parser.error(str(error))
    print(f"{machine()}; {options.dtype}, N={most}, budget {options.budget}")
    if options.batches:
        batches(base, decoders, questions, options)
    else:
        decoded(base, decoders, bench, questions)


if __name__ == "__main__":
    main()
