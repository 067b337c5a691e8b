"""Decode a benchmark with an exported head; results go to runs/<name>/eval/<bench>/.

python launch/eval.py name=<run> bench=mt_bench bench.path=question.jsonl
python launch/eval.py head.path=<exported head> base.path=<model> bench=embedded
"""

from pathlib import Path

from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.schema import EvalEntry


def main(config: EvalEntry) -> int:
    base, head_folder, run = stages.chosen_head(config)
    data_folder = None if run is None else Path(stages.run_paths(run)["data"])
    folder = head_folder.parent / "eval" / config.bench.kind
    results, reused = stages.evaluate_run(base, head_folder, config, folder, data_folder)
    stages.say(stages.table(results, folder, reused))
    return stages.exit_code(results)


if __name__ == "__main__":
    enter("eval", EvalEntry, main)
