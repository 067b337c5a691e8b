"""Decode a benchmark with an exported head; results go to runs/<name>/eval/<bench>/.

python launch/eval.py name=<run> bench=mt_bench bench.path=question.jsonl
python launch/eval.py head.path=<exported head> base.path=<model> bench=embedded
"""

from pathlib import Path

from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.schema import EvalEntry
from ctcdraft.model.base import load_base


def main(config: EvalEntry) -> int:
    data_folder = None
    if config.head.path is not None:
        if config.base.path is None:
            raise ValueError("head.path needs base.path=<the model it was trained on>")
        head_folder = Path(config.head.path)
        base = load_base(config.base.path, config.base.dtype or "fp32", template=config.base.template)
        folder = head_folder.parent / "eval" / config.bench.kind
    else:
        run = stages.find_run(config.name, config.runs_dir)
        base = stages.run_base(run, config.base.path, config.base.dtype)
        head_folder, data_folder = run / "head", Path(stages.run_paths(run)["data"])
        folder = run / "eval" / config.bench.kind
    results, reused = stages.evaluate_run(base, head_folder, config, folder, data_folder)
    stages.say(stages.table(results, folder, reused))
    return stages.exit_code(results)


if __name__ == "__main__":
    enter("eval", EvalEntry, main)
