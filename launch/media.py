"""What W&B is shown of an evaluation."""

from ctcdraft.data.store import read_jsonl
from ctcdraft.eval.place import Evaluated
from ctcdraft.eval.report import head_rows, headline
from ctcdraft.eval.results import blocks_by_name
from ctcdraft.train.log import Media

FIGURES = ("tokens_per_step", "tokens_per_second", "speedup")


def media_of(found: Evaluated) -> Media:
    """Figures, every picture of the folder, the short table, and one row per question and setting."""
    results, folder = found.results, found.folder
    figures = {f"{name}/{key}": block[key] for name, block in blocks_by_name(results).items() for key in FIGURES}
    pictures = sorted([*folder.glob("*.png"), *folder.glob("*/*.png")])
    if "head" in results:
        places = {results["head"]["kind"]: folder}
        short = [{"figure": name, "value": value} for name, value in headline(results)]
    else:
        places = {label: folder / label for label in results["heads"]}
        blocks = results["temperatures"]
        short = [{"temperature": block["temperature"], **row} for block in blocks for row in head_rows(block)]
    questions = [
        {"head": label, **row, "answers": "\n\n".join(row["answers"])}
        for label, place in places.items()
        for row in read_jsonl(place / "answers.jsonl")
    ]
    plots = {str(path.relative_to(folder).with_suffix("")): path for path in pictures}
    return Media(figures, plots, {"eval/table": short, "eval/questions": questions})
