"""The entries by name: `ctcdraft train head.layers=3` does what `python launch/train.py head.layers=3` does."""

import runpy
import sys

COMMANDS = ("train", "eval", "prepare", "export", "doctor", "chat", "serve", "runs")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: ctcdraft {'|'.join(COMMANDS)} [options]; --help behind a command lists what it takes")
    command = sys.argv.pop(1)
    try:
        runpy.run_module(f"ctcdraft.launch.{command}", run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctcdraft"):
            raise
        sys.exit(f"ctcdraft {command} needs the package {error.name}: pip install 'ctcdraft[train]'")


if __name__ == "__main__":
    main()
