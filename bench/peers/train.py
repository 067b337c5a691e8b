"""Trains a drafter of speculators with its own trainer, on a CPU, for a given time; behind `--` stand its own options.

python bench/peers/train.py --minutes 25 -- --speculator-type dspark --verifier-name-or-path BASE --data-path STATES ...

Its trainer assumes an accelerator and ends by steps. Here it runs on the CPU and ends by CPU time, and its linear
learning rate (a hundredth of warm-up, then down to zero) follows the time used instead of the steps made. The drafter
lies in SAVE_PATH/last. All else, model, losses, optimisers, batches and saving, is its own.
"""

import argparse
import time
from itertools import count

import torch
from speculators.train import cli, distributed
from speculators.train.config import TrainConfig
from speculators.train.graceful_shutdown import with_graceful_shutdown
from speculators.train.trainer import Trainer
from torch.optim.lr_scheduler import LambdaLR

WARM_UP = 0.01  # share of the run, as its own schedule has it


class TimedTrainer(Trainer):
    """Its trainer, ended after `seconds` of this process's CPU time."""

    seconds: float

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.device_type = "cpu"
        self.schedulers = [LambdaLR(optimizer, lambda _: rate_at(self.used())) for optimizer in self.optimizers]

    def setup_trainer(self):
        super().setup_trainer()
        self.began = time.process_time()

    def used(self):
        """The share of its time that is gone."""
        return (time.process_time() - self.began) / self.seconds

    @with_graceful_shutdown()
    def run_training(self):
        for epoch in count():
            self.train_epoch(epoch, step_callback=self.end_in_time)
            if self.used() >= 1:
                break
        spent = (time.process_time() - self.began) / 60
        print(f"{self.global_step} steps in {epoch + 1} passes, {spent:.1f} minutes of CPU time", flush=True)
        self.maybe_save_checkpoint("last")

    def end_in_time(self):
        if self.used() >= 1:  # its loop ends behind the step that reaches max_steps
            self.config = self.config._replace(max_steps=self.global_step)


def rate_at(used):
    """The share of the full learning rate when that share of the time is gone."""
    return min(used / WARM_UP, max(0.0, (1 - used) / (1 - WARM_UP)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="CPU time of training, without loading")
    parser.add_argument("options", nargs="+", help="of `speculators train`, behind --")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} leaves no time to train: give more than 0")
    TimedTrainer.seconds = 60 * options.minutes
    distributed._local_rank = "cpu"  # it calls model.to(local rank)
    cli.maybe_setup_distributed = lambda: None
    cli.Trainer = TimedTrainer
    torch.accelerator.synchronize = lambda *_: None  # its step timer waits for an accelerator
    cli.main(TrainConfig.resolve(options.options))


if __name__ == "__main__":
    main()
