"""What will not work, before the start: this machine, the base and its template, memory, time, one conversation.

python launch/doctor.py [--json] [options as launch/train.py takes them]
"""

import json
import sys
from dataclasses import asdict
from functools import partial

from ctcdraft.eval.report import markdown_table
from ctcdraft.launch.checks import Report, examine
from ctcdraft.launch.cli import enter
from ctcdraft.launch.schema import TrainEntry

GREEN, PLAIN = "\033[32m", "\033[0m"


def main(config: TrainEntry, as_json: bool) -> int:
    report = examine(config)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(markdown_table(("what", "found"), report.rows))
        show_template(report)
    for sentence in [*(f"warning: {w}" for w in report.warnings), *(f"error: {e}" for e in report.errors)]:
        print(sentence, file=sys.stderr)
    return 1 if report.errors else 0


def show_template(report: Report) -> None:
    how, before, behind = ("in green", GREEN, PLAIN) if sys.stdout.isatty() else ("in brackets", "[", "]")
    if report.pieces:
        text = "".join(before + piece + behind if supervised else piece for piece, supervised in report.pieces)
        print(f"\ntemplate, what is supervised {how}:\n{text}")


if __name__ == "__main__":
    as_json = "--json" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--json"]
    enter("train", TrainEntry, partial(main, as_json=as_json))
