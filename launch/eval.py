"""Decode a benchmark with an exported head, or with several side by side.

python launch/eval.py name=<run> bench=mt_bench bench.path=question.jsonl
python launch/eval.py head.path=<exported head> base.path=<model> bench=toy "bench.temperatures=[0,1]"
python launch/eval.py "heads=[<run>,<another run>,<exported head>]" bench=gsm8k

python launch/eval.py name=<run> count=true bench=mt_bench bench.path=question.jsonl

Results go to runs/<name>/eval/<bench>/, of several heads to eval/<bench>-heads/ of the first, counted ones to
eval/<bench>-count/. <name>: of the run, or of an exported head's folder or Hub name.
"""

import webbrowser
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ctcdraft.data.sources import check_source
from ctcdraft.eval.count import count
from ctcdraft.eval.evaluate import Measurement, evaluate
from ctcdraft.launch.cli import run
from ctcdraft.launch.media import media_of
from ctcdraft.launch.runs import chosen_heads
from ctcdraft.launch.schema import EvalEntry
from ctcdraft.train.log import log_evaluation
from ctcdraft.train.online import decoder_for


def main(config: EvalEntry) -> int:
    check_source("bench.path", config.bench.path)
    base, heads, data_folder = chosen_heads(config)
    learning = {} if config.online.every is None else {"online": asdict(config.online)}
    decoder = partial(decoder_for, online=config.online)
    measurement = Measurement(
        base, config.draft, config.bench, data_folder, config.seed, decoder=decoder, options=learning
    )
    label, first = next(iter(heads.items()))
    # an exported head elsewhere, or in the Hub's cache, has its results among the runs, under its name
    run = first.parent if first.name == "head" else Path(config.runs_dir) / label
    kind = config.bench.kind
    if config.count:
        found = count(measurement, heads, run / "eval" / f"{kind}-count", Path(config.cache_dir))
    elif config.heads:
        found = evaluate(measurement, heads, run / "eval" / f"{kind}-heads")
    else:
        found = evaluate(measurement, {"": first}, run / "eval" / kind)
    if not config.count and not found.reused:
        name = f"{run.name}-{found.folder.name}"
        log_evaluation(found.folder, name, config.logger, asdict(config), media_of(found))
    print(found.table, flush=True)
    if config.open:
        webbrowser.open(found.page.resolve().as_uri())
    return found.exit_code


if __name__ == "__main__":
    run("eval", EvalEntry, main)
