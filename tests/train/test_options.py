"""Names of runs and of what is kept: hashes of the options that are not at their defaults."""

from dataclasses import MISSING, dataclass, field, fields, make_dataclass

import pytest

from ctcdraft.launch import runs
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.train import prepare, toy_base
from ctcdraft.train.options import MayDiffer, decisive, departures
from ctcdraft.train.prepare import DataConfig
from ctcdraft.train.step import TrainConfig

# What a name that leaves an option out stands for. Whoever changes a default changes the format too, and then this.
DEFAULTS = {
    (DataConfig, 5): {
        **{"kind": "toy", "path": None, "weights": None, "limit": None, "holdout": 0.1, "dedupe": True},
        **{"keep_out": None, "shard_rows": 2048, "labels": "rewrite", "turns": "each", "template_args": None},
        **{"regenerate": {"temperatures": [0.0], "top_p": 1.0, "model": None}, "prompt_tokens": [8, 140]},
        **{"samples_per_text": 4, "max_new_tokens": 192},
    },
    (toy_base.ToyBaseConfig, 5): {
        **{"seed": 0, "conversations": 12000, "held_out_conversations": 160, "vocab_size": 1024},
        **{"hidden_size": 128, "layers": 4, "heads": 4, "steps": 600, "batch_tokens": 768},
    },
}


@dataclass(frozen=True)
class Inner:
    width: int = 3
    shown: MayDiffer[int] = 1


@dataclass(frozen=True)
class Outer:
    labels: int
    inner: Inner = Inner()
    many: list[int] = field(default_factory=lambda: [1, 2])


def test_departures_are_what_decides_and_is_not_at_its_default():
    assert departures(Outer(5)) == {"labels": 5}  # it has no default
    assert departures(Outer(5, Inner(3, 9), [1, 2])) == {"labels": 5}
    assert departures(Outer(5, Inner(4), [2])) == {"labels": 5, "inner": {"width": 4}, "many": [2]}
    assert decisive(Outer(5)) == {"labels": 5, "inner": {"width": 3}, "many": [1, 2]}


def younger(kind):
    """The dataclass of a later version, with one option more, and one within it."""
    return make_dataclass(
        f"Later{kind.__name__}",
        [("young", int, field(default=7)), ("group", Inner, field(default=Inner()))],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )


def named(kind, **more):
    """The folder of a run of the smoke experiment, as an entry of that kind has it."""
    config = typed(compose("train", ["experiment=smoke", "base=toy", "runs_dir=none"]), TrainEntry)
    return runs.check_inputs(kind(**{option.name: getattr(config, option.name) for option in fields(config)}, **more))


def test_an_option_that_is_added_keeps_the_names_of_runs():
    later = younger(TrainEntry)
    assert named(later) == named(TrainEntry)
    assert named(later, young=8) != named(TrainEntry)
    assert named(later, group=Inner(4)) != named(TrainEntry)
    assert named(later, group=Inner(shown=4)) == named(TrainEntry)


def test_an_option_that_is_not_at_its_default_makes_another_name():
    config = typed(compose("train", ["experiment=smoke", "base=toy", "runs_dir=none", "seed=1"]), TrainEntry)
    assert runs.check_inputs(config) != named(TrainEntry)


@pytest.mark.parametrize("kind", [DataConfig, TrainConfig])
def test_an_option_that_is_added_departs_from_nothing(kind):
    assert departures(younger(kind)()) == departures(kind())
    assert departures(younger(kind)(young=8)) == departures(kind()) | {"young": 8}


@pytest.mark.parametrize(
    ("kind", "version"),
    [(DataConfig, prepare.FORMAT), (toy_base.ToyBaseConfig, toy_base.FORMAT_VERSION)],
)
def test_a_default_that_is_changed_changes_the_format(kind, version):
    now = decisive(kind())
    assert {name: now.get(name, MISSING) for name in DEFAULTS[kind, version]} == DEFAULTS[kind, version]
