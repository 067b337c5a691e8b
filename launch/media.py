"""What W&B is shown of an evaluation."""

from ctcdraft.data.store import read_jsonl
from ctcdraft.eval.evaluate import Evaluated
from ctcdraft.eval.report import figures
from ctcdraft.eval.results import heads_at
from ctcdraft.train.log import Media

FIGURES = ("tokens_per_step", "tokens_per_second", "speedup")


def media_of(found: Evaluated) -> Media:
    """Figures, every picture of the folder, the short table, and one row per question and setting."""
    results, folder = found.results, found.folder
    logged = {f"eval/{key}": results[key] for key in FIGURES} if "head" in results else {}
    table = []
    for temperature, heads in heads_at(results).items():
        for label, block in heads.items():
            logged |= {f"eval/temperature_{temperature:g}/{label}/{key}": block[key] for key in FIGURES}
            table.append({"temperature": temperature, "head": label, **figures(block)})
    rows = read_jsonl(folder / "answers.jsonl")
    questions = [{**row, "answers": "\n\n".join(row["answers"])} for row in rows]
    for row in questions:
        del row["accepted"]  # a list per turn is no cell
    plots = {path.stem: path for path in sorted(folder.glob("*.png"))}
    return Media(logged, plots, {"eval/table": table, "eval/questions": questions})
