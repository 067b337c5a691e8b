"""Decode a benchmark with an exported head, or with several side by side.

python launch/eval.py name=<run> bench=mt_bench bench.path=question.jsonl
python launch/eval.py head.path=<exported head> base.path=<model> bench=toy "bench.temperatures=[0,1]"
python launch/eval.py "heads=[<run>,<another run>,<exported head>]" bench=gsm8k

python launch/eval.py name=<run> count=true bench=mt_bench bench.path=question.jsonl

Results go to runs/<name>/eval/<bench>/, of several heads to eval/<bench>-heads/ of the first, counted ones to
eval/<bench>-count/.
"""

from dataclasses import asdict
from pathlib import Path

from ctcdraft.data.sources import check_source
from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.evaluation import (
    Evaluated,
    count,
    evaluate_run,
    evaluate_several,
    figures_of,
    plots_of,
    tables_of,
)
from ctcdraft.launch.schema import EvalEntry
from ctcdraft.train.log import log_evaluation


def main(config: EvalEntry) -> int:
    check_source("bench.path", config.bench.path)
    if config.count:
        stages.say(count(config))
        return 0
    found = evaluate_several(config) if config.heads else evaluate_one(config)
    if not found.reused:
        name = f"{found.folder.parent.parent.name}-{found.folder.name}"
        media = figures_of(found), plots_of(found), tables_of(found)
        log_evaluation(found.folder, name, config.logger, asdict(config), *media)
    stages.say(found.table)
    return found.exit_code


def evaluate_one(config: EvalEntry) -> Evaluated:
    base, head_folder, run = stages.chosen_head(config)
    data_folder = None if run is None else Path(stages.run_paths(run)["data"])
    return evaluate_run(base, head_folder, config, head_folder.parent / "eval" / config.bench.kind, data_folder)


if __name__ == "__main__":
    enter("eval", EvalEntry, main)
