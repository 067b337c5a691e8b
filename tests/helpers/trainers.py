"""A Trainer without the pipeline around it, on a tiny base; and, started by torchrun, one sitting of a run.

torchrun --nproc_per_node 2 tests/helpers/trainers.py <work> <last step> <run>=<option>,<option> ...
"""

import json
import sys
from pathlib import Path

from bases import write_base

from ctcdraft.data.features import FeatureStore
from ctcdraft.launch.cli import _quoted, compose, typed
from ctcdraft.launch.runs import start_head
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import load_base
from ctcdraft.model.heads import attended_on
from ctcdraft.train import engine as ds
from ctcdraft.train.log import LoggerConfig, RunLog
from ctcdraft.train.loop import Trainer
from ctcdraft.train.prepare import prepare

INPUTS = ["base=local", "base.path=base", "data=sharegpt", "data.path=rows.json"]  # what `write_inputs` leaves
OPTIONS = ["experiment=smoke", *INPUTS, "bench.questions=2"]
SIZES = ["data.max_new_tokens=16"]
RATE = ["train.steps=6", "train.save_every=2", "train.eval_every=6", "train.log_every=1", "train.eval_anchors=16"]
TOLERANCE = 1e-5  # relative, of losses on other ranks: fp32 sums in another order, and six steps on them


class Rows(list):
    """A log that keeps what is written to it, and what it is told to look at."""

    write = list.append
    __bool__ = lambda self: True  # noqa: E731

    def __init__(self):
        super().__init__()
        self.alerts = []

    def alert(self, sentence):
        self.alerts.append(sentence)


def head_weights(trainer):
    return ds.head_state(trainer.step.engine, trainer.step.task.head)


def write_inputs(work):
    """A base and prompts."""
    write_base(work / "base", initializer_range=0.05)
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(24)]
    (work / "rows.json").write_text(json.dumps(rows))


class Trainers:
    """make(folder, *options) -> Trainer on what `write_inputs` left in `work`."""

    def __init__(self, work):
        self.work, self.base = work, load_base(str(work / "base"))

    def __call__(self, folder, *options):
        paths = [f"base.path={self.work}/base", f"data.path={self.work}/rows.json"]
        paths.append(f"runs_dir={folder.parent}")
        fixed = ["experiment=smoke", "base=local", "data=sharegpt", *paths, *SIZES, *RATE]
        words = [*fixed, *map(_quoted, options)]
        config = typed(compose("train", words), TrainEntry)
        data, features = prepare(self.base, config.data, config.seed, self.work / "cache"), None
        if config.data.features:
            attended = attended_on(self.base, config.head)
            store = FeatureStore(self.base, data, self.work / "cache", attended)
            store.fill()
            features = store.open()
        return Trainer(config, self.base, data, folder, start=start_head(config, self.base), features=features)


def sit(work, last, runs):
    """Train each run up to step `last`, save it, and leave."""
    make = Trainers(work)
    for name, options in runs.items():
        trainer = make(work / name, *options)
        trainer.finished = lambda trainer=trainer: trainer.state.step >= last
        trainer.run(RunLog(work / name, LoggerConfig("none"), {}, trainer.state.step) if ds.rank() == 0 else None)


if __name__ == "__main__":
    named = dict(word.split("=", 1) for word in sys.argv[3:])
    with ds.together():
        sit(Path(sys.argv[1]), int(sys.argv[2]), {name: options.split(",") for name, options in named.items()})
