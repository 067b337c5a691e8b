import json
import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
import wandb
from wandb_file import history

from ctcdraft.train import log
from ctcdraft.train.log import LoggerConfig, Media, RunLog, Wandb, log_evaluation

pytestmark = pytest.mark.slow

UNREACHABLE = """
import sys
from pathlib import Path
from ctcdraft.train import log
log.INIT_SECONDS = 3
run = log.RunLog(Path(sys.argv[1]), log.LoggerConfig("wandb"), {}, 0)
for step, loss in ((1, 3.0), (2, 2.0)):
    run.write({"step": step, "train/loss": loss})
run.close()
"""


class Run:
    """What W&B was asked for, and told."""

    def __init__(self, **asked):
        self.asked, self.logged, self.alerts = asked, [], []
        self.offline, self.entity = asked["mode"] == "offline", "someone"

    def alert(self, title, text, level):
        self.alerts.append(text)

    def log(self, row, step=None):
        self.logged.append((step, row))

    def finish(self):
        """Nothing is uploaded."""


@pytest.fixture
def runs(monkeypatch):
    """The W&B runs that were started, on a machine that has a key and a network."""
    started = []
    monkeypatch.setattr(wandb, "init", lambda **asked: started.append(Run(**asked)) or started[-1])
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return started


def sitting(folder, step, rows):
    log = RunLog(folder, LoggerConfig("wandb"), {"a": 1}, step)
    for number in rows:
        log.write({"step": number, "train/loss": 1.0})
    log.close()


def test_a_resumed_run_continues_the_same_run_online(runs, tmp_path):
    sitting(tmp_path / "mine", 0, [1, 2, 3])
    sitting(tmp_path / "mine", 2, [3, 4])  # killed after row 3, before its checkpoint
    sitting(tmp_path / "other", 0, [1])
    first, second, other = (run.asked for run in runs)
    assert first["id"] == second["id"] != other["id"]
    assert [run["resume"] for run in (first, second)] == ["allow", "allow"]
    assert [run["mode"] for run in (first, second)] == ["online", "online"]
    assert first["name"] == second["name"] == "mine"
    assert [step for step, _ in runs[1].logged] == [3, 4]


def test_without_a_network_the_same_run_goes_on_offline(runs, tmp_path, monkeypatch, capsys):
    sitting(tmp_path, 0, [1])
    online = wandb.init

    def unreachable(**asked):
        if asked["mode"] == "online":
            raise wandb.errors.CommError("no route; key 0123456789")
        return online(**asked)

    monkeypatch.setattr(wandb, "init", unreachable)
    sitting(tmp_path, 1, [2])
    said = capsys.readouterr().out
    assert "cannot go online (no route; key ***), logging offline" in said
    assert runs[1].asked["mode"] == "offline"
    assert runs[1].asked["id"] == runs[0].asked["id"]


def test_the_real_wandb_goes_on_offline_under_the_same_id_where_nobody_listens(tmp_path):
    """In a process of its own: W&B keeps what it was told at its first start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
    environment.pop("WANDB_MODE", None)
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot go online" in done.stdout
    assert "0" * 40 not in done.stdout
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert (tmp_path / "run" / "wandb_id").read_text() in file.name
    assert [row["train/loss"] for row in history(file)] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("said", "modes"),
    [
        ({"WANDB_MODE": "disabled"}, []),
        ({"WANDB_MODE": "dryrun"}, ["offline"]),
        ({"WANDB_MODE": "no mode"}, []),
        ({"WANDB_API_KEY": ""}, ["offline"]),
        ({"WANDB_API_KEY": "", "WANDB_BASE_URL": "https://wandb.corp"}, ["online"]),
        ({"settings": "mode = disabled"}, []),
        ({"settings": "mode = offline"}, ["offline"]),
        ({"WANDB_API_KEY": "", "settings": "base_url = https://wandb.corp"}, ["online"]),  # wandb login --host
    ],
)
def test_what_the_machine_says_of_wandb_holds(runs, tmp_path, monkeypatch, capsys, said, modes):
    (tmp_path / "netrc").write_text("machine wandb.corp login user password 0123456789\n")
    (tmp_path / "settings").write_text(f"[default]\n{said.pop('settings', '')}\n")
    for name, value in {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path), **said}.items():
        monkeypatch.setenv(name, value)
    sitting(tmp_path / "run", 0, [1])
    assert [run.asked["mode"] for run in runs] == modes
    keyless = said == {"WANDB_API_KEY": ""} and modes == ["offline"]
    assert ("no key found" in capsys.readouterr().out) == keyless
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["step"] == 1


def test_without_any_wandb_the_figures_are_in_the_file(runs, tmp_path, monkeypatch, capsys):
    def broken(**asked):
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", broken)
    sitting(tmp_path, 0, [1])
    assert "W&B: not used (No space left on device)" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


@pytest.mark.parametrize(
    "rubbish", [b'{"step": 3', b"\xff\xfe\n", b'{"step": "4"}\n', b"[]\n", b'{"step": 2}\n', b"[" * 9999 + b"\n"]
)
def test_what_is_no_row_of_its_own_step_does_not_stay(tmp_path, rubbish):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + rubbish)
    log = RunLog(tmp_path, LoggerConfig("none"), {}, 5)
    log.write({"step": 6})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 6]


def test_a_run_outlives_wandb(tmp_path, capsys):
    log = RunLog(tmp_path / "run", LoggerConfig("none"), {}, 0)
    log.sink = Wandb(Mock())
    log.write({"step": 1, "loss": 3.0})
    log.sink.run.log.side_effect = ConnectionResetError("Connection lost")
    log.write({"step": 2, "loss": 2.0})
    log.write({"step": 3, "loss": 1.0})
    log.summary(Media({}, {}, {}))
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.count("W&B: gone (Connection lost)") == said.count("\n") == 1


def test_warnings_are_alerts(runs, tmp_path):
    log = RunLog(tmp_path, LoggerConfig("wandb"), {}, 0)
    log.alert("the loss jumped")
    log.close()
    assert runs[0].alerts == ["the loss jumped"]


def test_tensorboard_has_the_same_figures(tmp_path):
    from matplotlib import pyplot
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pyplot.imsave(tmp_path / "p.png", [[0.0, 1.0]])
    log = RunLog(tmp_path / "run", LoggerConfig("tensorboard"), {}, 0)
    for step, loss in ((1, 3.0), (2, 2.0)):
        log.write({"step": step, "train/loss": loss})
    log.alert("the loss jumped")
    log.summary(Media({"eval/tokens_per_step": 2.5, "eval/head": "ctc"}, {"p": tmp_path / "p.png"}, {}))
    log.close()
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 3.0), (2, 2.0)]
    assert [event.value for event in found.Scalars("eval/tokens_per_step")] == [2.5]
    assert found.Tags()["images"] == ["plots/p"]
    assert found.Tags()["tensors"] == ["warnings/text_summary"]


@pytest.mark.parametrize("error", [ValueError("logger=tensorboard needs the package"), ConnectionError("lost")])
def test_an_evaluation_that_cannot_be_logged_is_there_all_the_same(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(log, "_sink", Mock(side_effect=error))
    log_evaluation(tmp_path, "a", LoggerConfig("tensorboard"), {}, Media({}, {}, {}))
    assert f"the evaluation is not logged ({error}); {tmp_path} holds it" in capsys.readouterr().out
