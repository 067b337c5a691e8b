"""The entries by name: `ctcdraft train head.layers=3` does what `python launch/train.py head.layers=3` does."""

import runpy
import sys

COMMANDS = ("train", "eval", "prepare", "export", "doctor", "chat")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: ctcdraft {'|'.join(COMMANDS)} [options]; --help behind a command lists what it takes")
    command = sys.argv.pop(1)
    runpy.run_module(f"ctcdraft.launch.{command}", run_name="__main__")


if __name__ == "__main__":
    main()
