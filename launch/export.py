"""Write the best head of a run as a folder that `load_head` takes: config.json, weights, model card."""

from pathlib import Path

from ctcdraft.launch import runs
from ctcdraft.launch.cli import run
from ctcdraft.launch.schema import ExportEntry


def main(config: ExportEntry) -> int:
    run = runs.find_run(config.name, config.runs_dir)
    target = Path(config.output) if config.output else run / "head"
    runs.export_best(run, runs.run_base(run, config.base), target)
    print(f"head: {target}", flush=True)
    return 0


if __name__ == "__main__":
    run("export", ExportEntry, main)
