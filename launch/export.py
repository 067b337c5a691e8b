"""Write the best head of a run as a folder that `load_head` takes: config.json, weights, model card."""

from pathlib import Path

from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.schema import ExportEntry


def main(config: ExportEntry) -> int:
    run = stages.find_run(config.name, config.runs_dir)
    target = stages.export_best(run, stages.run_base(run, config.base), Path(config.output) if config.output else None)
    stages.say(f"head: {target}")
    return 0


if __name__ == "__main__":
    enter("export", ExportEntry, main)
