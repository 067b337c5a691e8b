"""base -> data: everything before training, with the same options as launch/train.py.

python launch/prepare.py data.show=5
Started several times with the same options, by torchrun or by hand, on one host or many that share cache_dir,
the processes share the work.
"""

from ctcdraft.launch import pipeline, runs
from ctcdraft.launch.cli import run
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.train import engine as ds


def main(config: TrainEntry) -> int:
    config = pipeline.with_resolved_dtype(config)
    runs.check_inputs(config)
    with ds.together():
        base = pipeline.get_base(config)
        pipeline.get_features(config, base, pipeline.get_data(config, base))
    return 0


if __name__ == "__main__":
    run("prepare", TrainEntry, main)
