"""What will not work, before the start: this machine, the base and its template, memory, time, one conversation.

python launch/doctor.py [--json] [options as launch/train.py takes them]
python launch/doctor.py --plan gpus=8 base=<config.json> [options]   # memory and time, from that file alone
"""

import json
import sys
from dataclasses import asdict
from functools import partial

from ctcdraft.eval.report import markdown_table
from ctcdraft.launch import plan
from ctcdraft.launch.checks import examine
from ctcdraft.launch.cli import run
from ctcdraft.launch.schema import TrainEntry

GREEN, PLAIN = "\033[32m", "\033[0m"


def main(config: TrainEntry, as_json: bool) -> int:
    report = examine(config)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(markdown_table(("what", "found"), report.rows))
        how, before, behind = ("in green", GREEN, PLAIN) if sys.stdout.isatty() else ("in brackets", "[", "]")
        if report.pieces:
            text = "".join(before + piece + behind if supervised else piece for piece, supervised in report.pieces)
            print(f"\ntemplate, what is supervised {how}:\n{text}")
    for sentence in [*(f"warning: {w}" for w in report.warnings), *(f"error: {e}" for e in report.errors)]:
        print(sentence, file=sys.stderr)
    return 1 if report.errors else 0


def show_plan(config: TrainEntry, path: str, gpus: int, as_json: bool) -> int:
    found = plan.estimated(config, path, gpus)
    if as_json:
        print(json.dumps({**asdict(found), "total": found.total}, indent=2))
    else:
        print(markdown_table(("what", "estimated"), plan.rows_of(config, found, gpus)))
    return 0


def taken(key: str) -> str:
    """The value of an option of --plan, taken off the command line. Raises ValueError where it is not there."""
    words = [word for word in sys.argv if word.startswith(f"{key}=")]
    if not words:
        raise ValueError("--plan needs gpus=<number, 0 for this CPU> and base=<config.json>")
    sys.argv = [word for word in sys.argv if word not in words]
    return words[-1].partition("=")[2]


if __name__ == "__main__":
    flags = {flag: flag in sys.argv for flag in ("--json", "--plan")}
    sys.argv = [word for word in sys.argv if word not in flags]
    if flags["--plan"]:
        try:
            path, gpus = taken("base"), taken("gpus")
            if not gpus.isdecimal():
                raise ValueError(f"gpus={gpus}: a whole number, 0 for this CPU")
        except ValueError as error:
            sys.exit(f"error: {error}")
        run("train", TrainEntry, partial(show_plan, path=path, gpus=int(gpus), as_json=flags["--json"]))
    run("train", TrainEntry, partial(main, as_json=flags["--json"]))
