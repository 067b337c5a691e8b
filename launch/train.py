"""base -> data -> head -> export -> eval, in one command; each stage is reused when it is there.

python launch/train.py head.layers=3 optim.lr=1e-3
deepspeed launch/train.py experiment=vicuna_7b data.path=conversations.json
"""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ctcdraft.eval.bench import load_questions
from ctcdraft.launch import stages
from ctcdraft.launch.door import enter
from ctcdraft.launch.evaluation import evaluate_run, media_of
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.train import engine as ds
from ctcdraft.train.checkpoint import TrainState
from ctcdraft.train.log import RunLog
from ctcdraft.train.loop import Trainer

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def main(config: TrainEntry) -> int:
    config = stages.with_resolved_dtype(config)
    folder = stages.check_inputs(config)
    if config.train.deterministic:
        ds.make_deterministic(config.seed)
    with ExitStack() as held:
        with ds.together():
            base = stages.get_base(config)
            data_folder = stages.get_data(config, base)
            load_questions(config.bench, base, data_folder, config.seed)  # a bench that cannot be run ends it here
            stages.open_run(folder, config, base, data_folder)
            held.enter_context(stages.held(folder))
            stages.say(stages.describe_head(config.head, base))
            sitting = train(config, folder, base, data_folder)
        if sitting.exit_code is None and ds.rank() == 0:
            ds.take_threads_of_all()
            return finish(config, folder, base, data_folder, sitting)
    return sitting.exit_code or 0


class Sitting(NamedTuple):
    """What training came to; exit_code is set where it stopped before its end."""

    state: TrainState
    log: RunLog | None = None
    exit_code: int | None = None


def train(config: TrainEntry, folder: Path, base: stages.Base, data_folder: Path) -> Sitting:
    """All ranks train, unless that was done before."""
    state = stages.already_trained(folder, config)
    if state:
        stages.say(f"training: {folder} (reused; {state.step} steps, best at {state.best_step})")
        return Sitting(state)
    features = stages.get_features(config, base, data_folder)
    trainer = Trainer(config, base, data_folder, folder, features)
    stages.say(trainer.rows())
    log = RunLog(folder, config.logger, asdict(config), trainer.state.step) if ds.rank() == 0 else None
    state = trainer.run(log)
    if trainer.finished():
        stages.say(f"training: {state.step} steps in {state.seconds:.0f} s, best at step {state.best_step}")
        return Sitting(state, log)
    if log:
        log.close()
    stages.say(f"training: stopped at step {state.step}, saved; the same command goes on from there")
    return Sitting(state, exit_code=INTERRUPTED if trainer.interrupted else 0)


def finish(
    config: TrainEntry,
    folder: Path,
    base: stages.Base,
    data_folder: Path,
    sitting: Sitting,
) -> int:
    """Rank 0 exports and evaluates; the other ranks are done."""
    state, log = sitting.state, sitting.log
    head_folder = stages.export_best(folder, base)
    eval_folder = folder / "eval" / config.bench.kind
    found = evaluate_run(base, head_folder, config, eval_folder, data_folder)
    stages.summarise(folder, config, state, found.results)
    if log is None and not found.reused:  # trained before, evaluated now
        log = RunLog(folder, config.logger, asdict(config), state.step)
    if log:
        log.summary(media_of(found))
        log.close()
    stages.say(found.table)
    stages.say(
        'next: `make eval ARGS="draft=chain"`, `make train ARGS="head.layers=3"`, the report in '
        f"{eval_folder}/report.md, or your own model: base=local base.path=<folder> data=sharegpt data.path=<file>"
    )
    return found.exit_code


if __name__ == "__main__":
    enter("train", TrainEntry, main)
