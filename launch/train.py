"""base -> data -> head -> export -> eval, in one command; each stage is reused when it is there.

python launch/train.py head.layers=3 optim.lr=1e-3
deepspeed launch/train.py experiment=vicuna_7b data.path=conversations.json
"""

import signal
from contextlib import ExitStack
from dataclasses import asdict

from ctcdraft.eval.evaluate import Measurement, evaluate
from ctcdraft.launch import pipeline, runs
from ctcdraft.launch.cli import INTERRUPTED, Stopped, run
from ctcdraft.launch.media import media_of
from ctcdraft.launch.pipeline import say
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.train import engine as ds
from ctcdraft.train.log import RunLog
from ctcdraft.train.loop import Trainer


def main(config: TrainEntry) -> int:
    config = pipeline.with_resolved_dtype(config)
    folder = runs.check_inputs(config)
    if config.train.deterministic:
        ds.make_deterministic(config.seed)
    with ExitStack() as held:
        with ds.together() as watchdog:
            config = runs.with_batch(config, folder)
            base = pipeline.get_base(config)
            say(pipeline.describe_head(config.head, base))
            start = runs.start_head(config, base)
            data_folder = pipeline.get_data(config, base)
            measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
            measurement.questions()  # a bench that cannot be run ends it here
            runs.open_run(folder, config, base, data_folder)
            held.enter_context(runs.held(folder))
            state, log = runs.already_trained(folder, config), None
            if state:
                say(f"training: {folder} (reused; {state.step} steps, best at {state.best_step})")
            else:
                features = pipeline.get_features(config, base, data_folder)
                trainer = Trainer(config, base, data_folder, folder, start=start, features=features, watchdog=watchdog)
                say(trainer.step.rows())
                log = RunLog(folder, config.logger, asdict(config), trainer.state.step) if ds.rank() == 0 else None
                state = trainer.run(log)
                if not trainer.finished():
                    if log:
                        log.close()
                    say(f"training: stopped at step {state.step}, saved; the same command goes on from there")
                    return Stopped(INTERRUPTED if trainer.stopped_by == signal.SIGINT else 0)
                say(f"training: {state.step} steps in {state.seconds:.0f} s, best at step {state.best_step}")
                trainer.close()
                del trainer
        if ds.rank() != 0:
            return 0
        ds.take_threads_of_all()
        runs.export_best(folder, base, folder / "head")
        found = evaluate(measurement, {"": folder / "head"}, folder / "eval" / config.bench.kind)
        runs.summarise(folder, config, state, found.results)
        if log is None and not found.reused:  # trained before, evaluated now
            log = RunLog(folder, config.logger, asdict(config), state.step)
        if log:
            log.summary(media_of(found))
            log.close()
        say(found.table)
        return found.exit_code


if __name__ == "__main__":
    run("train", TrainEntry, main)
