"""What will not work, before the start: this machine, the base and its template, memory, time, one conversation.

python launch/doctor.py [--json] [options as launch/train.py takes them]
python launch/doctor.py --plan gpus=8 base=<config.json> [options]   # memory and time, from that file alone
"""

import json
import sys
from collections.abc import Callable
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


def show_plan(config: TrainEntry, as_json: bool, base: str = "", gpus: str = "") -> int:
    """Raises ValueError where the file or the number is missing, or is none."""
    if not base or not gpus:
        raise ValueError("--plan needs gpus=<number, 0 for this CPU> and base=<config.json>")
    if not gpus.isdecimal():
        raise ValueError(f"gpus={gpus}: a whole number, 0 for this CPU")
    found = plan.estimated(config, base, int(gpus))
    if as_json:
        print(json.dumps({**asdict(found), "total": found.total}, indent=2))
    else:
        print(markdown_table(("what", "estimated"), plan.rows_of(config, found, int(gpus))))
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    task: Callable[..., int] = main
    asked: dict[str, str] = {}
    if "--plan" in words:
        task, asked = show_plan, dict(word.split("=", 1) for word in words if word.startswith(("base=", "gpus=")))
    sys.argv[1:] = [word for word in words if word not in ("--json", "--plan") and word.partition("=")[0] not in asked]
    run("train", TrainEntry, partial(task, as_json="--json" in words, **asked))
