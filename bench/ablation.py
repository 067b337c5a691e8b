"""Variants of head and objective, trained for the same time on the same data, counted side by side.

python bench/ablation.py [--hours H] [--only a,b] [--questions N] [--name NAME] [--out FOLDER] [any option of train.py]

A variant trains for its share of the hours: its steps are timed first, so that its learning rate comes to its end, and
how many it gets depends on that. Each head is then counted along the base's own answers to held-out questions
(`eval.py count=true`): its chain, its tree, and that beside prompt lookup.

Ways of drafting (`coupled`, `mcsd` ...) need no training: named in --only, they decode with the default's head
(bench/drafts.py). A run that is there already is reused, so an interrupted command goes on where it was. On a GPU, or
on another base: base=local base.path=<model> data=...
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

from drafts import PRESETS
from measure import machine
from tqdm import tqdm

from ctcdraft.data.store import read_jsonl
from ctcdraft.eval.page import page
from ctcdraft.eval.plots import intervals
from ctcdraft.eval.report import DEPTHS, markdown_table
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model.loss.divergence import Divergence

ROOT = Path(__file__).resolve().parents[1]
CROSS_ENTROPY = "objective=cross_entropy"
A_LABEL_PER_SLOT = "objective.labels=${head.slots}"
VARIANTS = {
    "default": (),
    "no blank": ("head.band=0", A_LABEL_PER_SLOT),
    "no blank by cross-entropy": ("head=parallel", "head.transition=full", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "every alignment": ("head.merge=true", "head.band=null"),
    "the paper's": (
        *("objective=ctc", "objective.labels=3", "head.slots=6"),
        *("head.merge=true", "head.band=null", "head.transition=none"),
    ),
    "no transition": ("head.transition=none",),
    "weights 0.9^k": ("objective.decay=0.9",),
    "chosen tokens": ("objective.distill=0.0",),
    **{kind: (f"objective.divergence={kind}",) for kind in get_args(Divergence)},
    "own drafts": ("objective.policy=mixed",),
    "6 labels": ("head.slots=7", "objective.labels=6"),
    "8 labels": ("head.slots=9", "objective.labels=8"),
    "8k draft tokens": ("head.draft_vocab_size=8192",),
    "whole vocabulary": ("head.draft_vocab_size=null",),
    "whole softmax": ("objective.negatives=null",),
    "one layer": ("head.layers=1",),
    "three layers": ("head.layers=3",),
    "diffusion": ("head=diffusion", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "eagle": ("head=eagle", "head.slots=7", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "mlp": ("head=mlp", "head.slots=7", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "glide": ("head=glide", "head.slots=7", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "glide without keys": ("head=glide", "head.slots=7", "head.cross=false", A_LABEL_PER_SLOT, CROSS_ENTROPY),
    "medusa": ("head=medusa", "head.slots=7", A_LABEL_PER_SLOT, CROSS_ENTROPY),
}
SETTLED = 40  # steps that are timed, behind as many that are not
NODES = 32
DECODED = 16  # questions, of those that are counted, that ways of drafting decode


class Study:
    """One base and its data; runs are named after the study and the variant."""

    def __init__(self, given, overrides):
        self.given, self.overrides = given, overrides
        named = given.only.split(",") if given.only else list(VARIANTS)
        if unknown := sorted(set(named) - {*VARIANTS, *PRESETS}):
            sys.exit(f"--only: no such variant: {unknown}; choose of {[*VARIANTS, *PRESETS]}")
        self.presets = [name for name in named if name in PRESETS]
        self.variants = [name for name in named if name not in PRESETS]
        if self.presets and "default" not in self.variants:
            self.variants.insert(0, "default")
        self.minutes = 60 * given.hours / len(self.variants)
        self.runs = Path(self.config("default").runs_dir)
        for variant in self.variants:  # now, not behind hours of training
            self.kept_steps(variant)

    def words(self, variant):
        """What makes a variant; the user's options come last."""
        return [*VARIANTS[variant], *self.overrides, "logger=none"]

    def config(self, variant):
        return typed(compose("train", self.words(variant)), TrainEntry)

    def name(self, variant):
        return f"{self.given.name}-{variant.replace(' ', '-').replace(',', '').replace('^', '').replace(chr(39), '')}"

    def train(self, variant):
        """Steps and seconds of its run. Those that time a step are of a run of their own."""
        name, steps = self.name(variant), self.steps(variant)
        self.run(variant, [f"name={name}", f"train.steps={steps}"])
        return self.rows(name)[-1]

    def steps(self, variant):
        """As many as take the minutes; kept, so that an interrupted command goes on with the same."""
        if (steps := self.kept_steps(variant)) is None:
            probe = f"{self.name(variant)}-probe"
            self.run(variant, [f"name={probe}", f"train.steps={2 * SETTLED}"])
            seconds = [row["perf/step_seconds"] for row in self.rows(probe) if row["step"] > SETTLED]
            steps = max(1, round(60 * self.minutes / (sum(seconds) / len(seconds))))
            self.kept(variant).write_text(json.dumps({"minutes": self.minutes, "steps": steps}))
        return steps

    def kept_steps(self, variant):
        """Those of a command before this one; None where there are none. Ends where it gave them other minutes."""
        if not self.kept(variant).is_file():
            return None
        found = json.loads(self.kept(variant).read_text())
        if found["minutes"] != self.minutes:
            sys.exit(
                f"{self.name(variant)} was given {found['minutes']:g} minutes, and would be given {self.minutes:g} now "
                "(--hours over all variants): give another --name, or the --hours and variants of before"
            )
        return found["steps"]

    def kept(self, variant):
        return self.runs / f"{self.name(variant)}-timed.json"

    def rows(self, name):
        return [row for row in read_jsonl(self.runs / name / "metrics.jsonl") if "perf/step_seconds" in row]

    def count(self):
        """({draft: its figures}, questions) of one pass over the base's own answers."""
        heads = f"heads=[{','.join(map(self.name, self.variants))}]"
        bench = ["bench=heldout", f"bench.questions={self.given.questions}", f"draft.nodes={NODES}"]
        words = [heads, "count=true", *bench, f"runs_dir={self.runs}"]
        self.call("launch/eval.py", words)
        folder = self.runs / self.name(self.variants[0]) / "eval" / "heldout-count"
        results = json.loads((folder / "results.json").read_text())
        return results["drafts"], results["questions"]

    def decode(self):
        """Tables of the ways of drafting beside the tree, all with the default's head, at temperature 0 and 1."""
        presets = ",".join(dict.fromkeys(["tree", *self.presets]))
        words = [self.runs / self.name("default"), "--presets", presets, "--nodes", str(NODES)]
        return self.call("bench/drafts.py", [*words, "--count", str(min(DECODED, self.given.questions))])

    def run(self, variant, options):
        words = [*self.words(variant), "train.log_every=1", "bench.max_new_tokens=8", "bench.questions=1", *options]
        self.call("launch/train.py", words)

    def call(self, script, words):
        """What it prints."""
        done = subprocess.run([sys.executable, ROOT / script, *words], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip()[-500:]
            sys.exit(f"{script} {' '.join(map(str, words))} ended with {done.returncode}: {said}")
        return done.stdout


def drafts_of(name, found):
    """What was counted of a run: its chain, its tree, and that beside prompt lookup."""
    return {
        "chain": found[f"{name}, no lookup, chain"],
        f"N={NODES}": found[f"{name}, no lookup"],
        f"N={NODES}, lookup": found[name],
    }


def comparison(about, drafts, table):
    """The page: variants side by side, by way of drafting, and how often they are right at a depth."""
    ways = {way: {variant: kinds[way] for variant, kinds in drafts.items()} for way in next(iter(drafts.values()))}
    right = [(variant, way, *kinds[way]["right_at_depth"]) for variant, kinds in drafts.items() for way in ways]
    depths = ("Share of positions with so many right draft tokens", ("variant", "draft", *DEPTHS), right)
    return page("Ablation", about, [intervals(ways, "tokens_per_step")], [("Variants", *table), depths])


def row(variant, steps, drafts):
    """One line of the table: chain, tree, and that beside lookup, each with its interval."""

    def tau(one):
        low, high = one["tokens_per_step_ci95"]
        return f"{one['tokens_per_step']:.2f} [{low:.2f}, {high:.2f}]"

    chain, tree, both = drafts
    first = f"{chain['right_at_depth'][0]:.3f}"
    believed = f"{tree['expected']:.2f} / {tree['accepted']:.2f}"
    return variant, steps, first, tau(chain), tau(tree), tau(both), believed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=3.0, help="of training, all variants together: 3")
    parser.add_argument("--questions", type=int, default=60, help="held-out ones that are counted: 60")
    parser.add_argument("--name", default="ablation", help="what the runs and the report are called")
    known = f"variants: {', '.join(VARIANTS)}; ways of drafting: {', '.join(PRESETS)}"
    parser.add_argument("--only", help=f"separated by commas; all variants where none is named; {known}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    given, overrides = parser.parse_known_args()
    if strange := [word for word in overrides if word.startswith("-")]:
        parser.error(f"no such option: {' '.join(strange)} (see --help; options of train.py are key=value)")
    try:  # now, not behind hours of training
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out={given.out}: no folder can be made there ({error.strerror}): name another")
    study = Study(given, overrides)
    trained = {variant: study.train(variant) for variant in tqdm(study.variants, "training", unit="run")}
    found, questions = study.count()
    drafts = {variant: drafts_of(study.name(variant), found) for variant in study.variants}
    table = [row(variant, trained[variant]["step"], kinds.values()) for variant, kinds in drafts.items()]
    header = ("variant", "steps", "slot 1 right", "chain", f"N={NODES}", f"N={NODES}, lookup", "psi / accepted")
    command = " ".join(["python bench/ablation.py", *sys.argv[1:]])
    lookup = next(one for label, one in found.items() if not label.startswith(f"{given.name}-"))
    text = (
        f"# Ablation\n\n`{command}`\n\n{machine()}; {study.minutes:.0f} minutes of training each, one seed. Tokens per "
        f"step on {questions} held-out questions, with 95% intervals; psi / accepted: draft tokens per step of "
        f"the tree without lookup. Prompt lookup alone: {lookup['tokens_per_step']:.2f}.\n\n"
    )
    tables = markdown_table(header, table) + "\n"
    if study.presets:
        tables += f"\n## Ways of drafting with the default's head\n\n{study.decode()}"
    (given.out / f"{given.name}.md").write_text(text + tables)
    html = given.out / f"{given.name}.html"
    html.write_text(comparison(" ".join(text.split("\n\n")[1:]), drafts, (header, table)), encoding="utf-8")
    print(f"{text}{tables}\nas a page: {html}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
