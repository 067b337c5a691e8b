"""Write the best head of a run as a folder that `load_head` takes: config.json, weights, model card."""

from pathlib import Path

from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.schema import ExportEntry
from ctcdraft.model.base import load_base


def main(config: ExportEntry) -> int:
    run = stages.find_run(config.name, config.runs_dir)
    paths = stages.run_paths(run)
    base = load_base(paths["base"], paths["dtype"])
    target = stages.export_best(run, base, Path(config.output) if config.output else None)
    stages.say(f"head: {target}")
    return 0


if __name__ == "__main__":
    enter("export", ExportEntry, main)
