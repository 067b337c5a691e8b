"""Every variant of head and objective, trained on the same data, decoded side by side on what training never saw.

python bench/ablation.py [--steps N] [--seeds N] [--jobs N] [--only a,b] [--out FOLDER] [any option of train.py]

What a step of each variant costs is measured first, interleaved. Then all train for the same steps, and what a step
of the trained heads costs is measured; those whose fresh step costs a tenth more or less than the default's train anew,
for as many steps as fit into its time. What is there already is reused, so an interrupted command goes on where it was.
Checkpoints are chosen on the development split, figures are those of the test split. By default some two hours of two
CPU cores; give a GPU more --steps and --questions.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np
import torch
from measure import interleaved, machine
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ctcdraft.data.batches import Sampler
from ctcdraft.data.store import read_jsonl
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.results import bootstrap
from ctcdraft.launch import stages
from ctcdraft.launch.door import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model.export import load_head
from ctcdraft.model.head import head_on, parameters_of
from ctcdraft.train.files import write_atomically
from ctcdraft.train.task import DraftTask, base_features, head_for

ROOT = Path(__file__).resolve().parents[1]
CROSS_ENTROPY = ("objective=cross_entropy",)
WITH_TRANSITION = ("head=parallel", "head.transition=full", *CROSS_ENTROPY)
EVERY_ALIGNMENT = ("head.merge=true", "head.band=null")  # that CTC knows
VARIANTS = {
    "default": (),
    "default with one layer of the base": ("head.layers=1",),
    "default with four layers of the base": ("head.layers=4",),
    "default with even weights": ("objective.decay=1.0",),
    "default with weights 0.8^k": ("objective.follow=null",),
    "default without a blank": ("head.band=0",),
    "default of 12 slots": ("head.slots=12",),
    "default of 16 slots": ("head.slots=16",),
    "default with a band of 2": ("head.band=2",),
    "default of every alignment": (*EVERY_ALIGNMENT, "objective.labels=12"),
    "ctc without transition": ("head.transition=none",),
    "exact ctc without transition": ("head.transition=none", *EVERY_ALIGNMENT, "objective=ctc"),
    "parallel 0.8^k": ("head=parallel", *CROSS_ENTROPY),
    "parallel 0.8^k with transition": WITH_TRANSITION,
    "parallel uniform": ("head=parallel", *CROSS_ENTROPY, "objective.decay=1.0"),
    "parallel uniform with transition": (*WITH_TRANSITION, "objective.decay=1.0"),
    "medusa": ("head=medusa", *CROSS_ENTROPY),
    "medusa with as many parameters": ("head=medusa", *CROSS_ENTROPY),  # and the layers that this takes
    "eagle": ("head=eagle", *CROSS_ENTROPY),
    "eagle of 8 passes": ("head=eagle", *CROSS_ENTROPY, "head.slots=8"),
}
SETTINGS = {
    "chain": ("draft=chain", "draft.budget=fixed"),
    "N=16": ("draft=tree", "draft.nodes=16", "draft.budget=fixed"),
    "N=64": ("draft=tree", "draft.nodes=64", "draft.budget=fixed"),
}
ROUNDS = 9
UNNAMEABLE = str.maketrans("", "", "^'")  # in the name of a run
SMOOTHED = 8  # rows of metrics.jsonl


class Study:
    """One base and its data, prepared once; runs are named after what makes them."""

    def __init__(self, given, overrides):
        self.given, self.overrides = given, overrides
        chosen = given.only.split(",") if given.only else list(VARIANTS)
        if unknown := sorted(set(chosen) - set(VARIANTS)):
            sys.exit(f"--only: no such variant: {unknown}; choose of {list(VARIANTS)}")
        config = self.config("default")
        self.environment = dict(os.environ)  # without the rank that this process becomes
        stages.ds.init_distributed()
        self.base = stages.get_base(config)
        self.data = stages.get_data(config, self.base)
        self.every = {name: self._options(name) for name in VARIANTS}
        self.variants = {name: options for name, options in self.every.items() if name in {"default", *chosen}}

    def config(self, variant, options=None):
        words = [*self.overrides, *(VARIANTS[variant] if options is None else options), "logger=none"]
        return typed(compose("train", words), TrainEntry)

    def _options(self, name):
        options = VARIANTS[name]
        if name != "medusa with as many parameters":
            return options
        size = {n: self.parameters(self.config(n)) for n in ("default", "medusa")}
        return (*options, f"head.layers={max(1, round(size['default'] / size['medusa']))}")

    def parameters(self, config):
        return parameters_of(head_on(self.base, config.head))

    def costs(self, runs=None):
        """What a training step of every variant takes for that of the default, as it was first measured: of fresh
        heads, which decides how many steps an equal time is, or of those that `runs` have trained."""
        runs_dir = Path(self.config("default").runs_dir)
        kept = runs_dir / f"{self.given.name}-costs{'-trained' if runs else ''}.json"
        measured = {variant: names[0] for variant, names in runs.items()} if runs else {v: v for v in self.every}
        if not kept.is_file() or json.loads(kept.read_text()).keys() != set(measured.values()):
            found = self._step_seconds({v: runs_dir / name / "head" for v, name in measured.items()} if runs else {})
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps({measured[v]: cost for v, cost in found.items()}, indent=1).encode())
        seconds = json.loads(kept.read_text())
        return {variant: seconds[name] / seconds[measured["default"]] for variant, name in measured.items()}

    def _step_seconds(self, heads):
        """Forward and backward of each, without DeepSpeed, interleaved; of these heads {variant: folder}, if any."""
        train = self.config("default").train
        calls = {}
        for name in heads or self.every:
            config = self.config(name, self.every[name])
            corpus = stages.load_corpus(self.data, "train")
            head = head_for(config.head, self.base, corpus)
            if heads:
                head.load_state_dict(load_head(heads[name], self.base).state_dict())
            task = DraftTask(head, config.objective, self.base)
            optimizer = torch.optim.AdamW(task.parameters(), 1e-9)
            sampler = Sampler(
                corpus,
                batch=train.batch,
                anchors=train.anchors,
                labels=config.objective.labels,
                max_length=train.max_length,
                seed=0,
            )
            calls[name] = Stepper(self.base, task, optimizer, sampler)
        return {name: median(seconds) for name, seconds in interleaved(calls, ROUNDS).items()}

    def train_all(self, steps, title):
        """{variant: the names of its runs, one per seed}; `jobs` of them at a time."""
        work = [(variant, seed) for seed in range(self.given.seeds) for variant in steps]
        bar = tqdm(total=len(work), desc=title, unit="run", mininterval=1)
        runs = defaultdict(list)
        with bar, ThreadPoolExecutor(self.given.jobs) as pool:
            names = pool.map(lambda one: self._train(*one, steps[one[0]]), work)
            for (variant, _), name in zip(work, names, strict=True):
                runs[variant].append(name)
                bar.update()
        return runs

    def _train(self, variant, seed, steps):
        """The run's name."""
        slug = variant.replace(" ", "-").translate(UNNAMEABLE)
        name = f"{self.given.name}-{slug}-{steps}-s{seed}"
        words = [*self.overrides, *self.variants[variant], f"name={name}", f"seed={seed}", f"train.steps={steps}"]
        threads = max(1, torch.get_num_threads() // self.given.jobs)
        self._run("train.py", *words, "bench=heldout", "bench.questions=1", "logger=none", threads=threads)
        return name

    def decode(self, names, setting):
        """Per run its answers on the test questions, and the figures of the comparison."""
        heads = f"heads=[{','.join(names)}]"
        runs_dir = self.config("default").runs_dir
        words = (*SETTINGS[setting], "bench=heldout", f"bench.questions={self.given.questions}", "logger=none")
        self._run("eval.py", heads, *words, f"runs_dir={runs_dir}")
        folder = Path(runs_dir) / names[0] / "eval" / "heldout-heads"
        places = [folder / name for name in names]
        return [(read_jsonl(p / "answers.jsonl"), json.loads((p / "results.json").read_text())) for p in places]

    def _run(self, entry, *words, threads=None):
        env = self.environment if threads is None else {**self.environment, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, ROOT / "launch" / entry, *words], env=env, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{entry} {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


class Stepper:
    """One training step after the other."""

    def __init__(self, base, task, optimizer, sampler):
        self.base, self.task, self.optimizer, self.sampler, self.step = base, task, optimizer, sampler, 0

    def __call__(self):
        batch = self.sampler.collate(self.step, slice(None)).to(self.base.device)
        self.step += 1
        loss, sums = self.task(*base_features(self.base, batch, torch.float32, self.task.head), batch)
        (loss / sums.anchors).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def as_long(steps, cost):
    """As many steps as take the time of those of the default, beside which one costs that; if that is a difference."""
    return steps if 1 / 1.1 <= cost <= 1.1 else round(steps / cost)


def totals(seeds):
    """[questions] grown tokens and steps, tokens and seconds of one variant, its seeds added up."""
    found = defaultdict(lambda: np.zeros(4))
    for answers, _ in seeds:
        for row in answers:
            grown = row["tokens_per_step"] * row["steps"]
            found[row["question_id"]] += [grown, row["steps"], row["tokens"], row["speculative_seconds"]]
    return np.array(list(found.values()))


def tau(sums, i):
    return float(sums[i, 0].sum() / sums[i, 1].sum())


def rate(sums, i):
    return float(sums[i, 2].sum() / sums[i, 3].sum())


def estimated(figure, sums, form):
    """A figure of questions i, and its interval over resampled ones."""
    low, high = bootstrap(figure, len(sums), 0)
    return f"{figure(slice(None)):{form}} [{low:{form}}, {high:{form}}]"


def cell(sums):
    return estimated(lambda i: tau(sums, i), sums, ".2f")


def against(sums, first):
    """The paired difference from the default."""
    return estimated(lambda i: tau(sums, i) - tau(first, i), sums, "+.2f")


def faster(sums, first):
    """How much faster than the default it decodes the same questions."""
    return estimated(lambda i: rate(sums, i) / rate(first, i) - 1, sums, "+.1%")


def table(study, runs, costs, given):
    """The Markdown tables of one budget: runs {variant: [names of its seeds]}, costs of fresh and of trained heads."""
    found = {
        setting: [study.decode([names[seed] for names in runs.values()], setting) for seed in range(given.seeds)]
        for setting in tqdm(SETTINGS, "decoding", mininterval=1)
    }
    figures, calibration, same = defaultdict(dict), {}, [0, 0]
    for setting, seeds in found.items():
        for place, variant in enumerate(runs):
            figures[variant][setting] = totals([seed[place] for seed in seeds])
            results = [seed[place][1] for seed in seeds]
            calibration[variant] = [
                np.mean([result["calibration"][key] for result in results]) for key in ("expected", "accepted")
            ]
            for result in results:
                same[0] += result["identical"]["identical"]
                same[1] += result["identical"]["compared"]
    taus, paired, paired_rates = [], [], []
    for variant, names in runs.items():
        config = study.config(variant, study.variants[variant])
        steps = int(names[0].split("-")[-2])
        every = [figures[variant][setting] for setting in SETTINGS]
        cells, rates = [cell(sums) for sums in every], [f"{rate(sums, slice(None)):.0f}" for sums in every]
        believed = " / ".join(f"{mean:.2f}" for mean in calibration[variant])
        size, cost = f"{study.parameters(config):,}", " / ".join(f"{cost[variant]:.2f}" for cost in costs)
        taus.append((variant, size, steps, cost, *cells, " / ".join(rates), believed))
        if variant != "default":
            both = [*zip(every, (figures["default"][setting] for setting in SETTINGS), strict=True)]
            paired.append((variant, *(against(*pair) for pair in both)))
            paired_rates.append((variant, *(faster(*pair) for pair in both)))
    shown = ("variant", "parameters", "steps", "step, fresh / trained", *SETTINGS, "tokens/s", "psi / accepted, N=64")
    identical = f"Greedy output identical to plain decoding: {same[0]} of {same[1]}."
    return "\n\n".join(
        [
            markdown_table(shown, taus),
            "psi / accepted: draft tokens per step expected (psi summed over a tree) and accepted, mean of the seeds.",
            "Differences from the default, on the same resampled questions:",
            markdown_table(("variant", *SETTINGS), paired),
            "The same of tokens per second:",
            markdown_table(("variant", *SETTINGS), paired_rates),
            identical,
        ]
    )


def curves(study, runs, path):
    """The sum of psi on training batches while each learns, the likeliest at the end first."""
    found = {}
    for variant, names in runs.items():
        rows = read_jsonl(Path(study.config("default").runs_dir) / names[0] / "metrics.jsonl")
        steps, psi = np.array([(row["step"], row["draft/psi_sum"]) for row in rows if "draft/psi_sum" in row]).T
        window = np.ones(min(SMOOTHED, len(psi)))
        found[variant] = steps[len(window) - 1 :], np.convolve(psi, window / len(window), "valid")
    figure, axes = plt.subplots(figsize=(8, 5))
    for number, variant in enumerate(sorted(found, key=lambda name: -found[name][1][-1])):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        axes.plot(*found[variant], label=variant, **style)
    axes.set(xlabel="steps", ylabel="sum of psi along the labels of training batches")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    jobs = 1 if torch.cuda.is_available() else 2
    parser.add_argument("--jobs", type=int, default=jobs, help=f"trainings at a time, which share the cores: {jobs}")
    parser.add_argument("--questions", type=int, default=40, help="of the test split: 40")
    parser.add_argument("--name", default="ablation", help="what the runs and the report are called")
    parser.add_argument("--only", help="variants, separated by commas; all: " + ", ".join(VARIANTS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    given, overrides = parser.parse_known_args()
    if strange := [word for word in overrides if word.startswith("-")]:
        parser.error(f"no such option: {' '.join(strange)} (see --help; options of train.py are key=value)")
    try:  # now, not behind hours of training
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out={given.out}: no folder can be made there ({error.strerror}): name another")
    study = Study(given, overrides)
    costs = [study.costs()]
    equal_time = {v: as_long(given.steps, costs[0][v]) for v in study.variants}
    budgets = {
        "At equal steps": dict.fromkeys(study.variants, given.steps),
        "At equal training time": {v: n for v, n in equal_time.items() if v == "default" or n != given.steps},
    }
    parts = []
    for title, steps in budgets.items():
        runs = study.train_all(steps, title)
        if title == "At equal steps":
            costs.append(study.costs(runs))
            curves(study, runs, given.out / f"{given.name}.png")
        parts.append(f"## {title}\n\n{table(study, runs, costs, given)}")
    command = " ".join(["python bench/ablation.py", *sys.argv[1:]])
    text = f"# Ablation on {study.base.name}\n\n`{command}`\n\n{machine()}\n\n" + "\n\n".join(parts)
    (given.out / f"{given.name}.md").write_text(text + f"\n\n![learning curves]({given.name}.png)\n")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
