import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from bases import TEMPLATE, tiny_tokenizer, write_base
from commands import run
from templates import CHATML

from ctcdraft.launch import checks
from ctcdraft.launch.checks import Report, _template, _tokenizer
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import load_base

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def doctor(folder, *words, **env):
    return run([ROOT / "launch" / "doctor.py", *words], cwd=folder, **env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


def test_a_machine_with_nothing_on_it_yet_is_told_what_comes(folder):
    done = doctor(folder, "--json", "experiment=toy", "logger=none")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = dict(found["rows"])
    assert rows["torch"].startswith("2.")
    assert "`make train` makes it" in rows["base"]
    assert found["errors"] == []


def test_an_untrained_base_is_an_error_that_names_the_stage(folder):
    write_base(folder / "base")
    done = doctor(folder, "--json", "base=local", "base.path=base", "base.dtype=fp32", "logger=none")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    rows = dict(found["rows"])
    assert rows["end of answer"] == "supervised"
    assert ["The Rhine, the Danube and the Elbe.</s>", True] in found["pieces"]
    assert "not prepared yet" in rows["time to finish"]
    assert "another tokenizer, or a base that is not trained" in rows["one conversation: tokenizer"]
    assert found["errors"] == ["one conversation is not learnt; the first stage that disagrees is tokenizer"]


def checked(folder, template, tokenizer, vocabulary=None):
    write_base(folder, template=template, vocab_size=vocabulary or len(tokenizer))
    tokenizer.save_pretrained(folder)
    words = ["data=sharegpt", "data.path=x", "data.labels=given"]
    report, config = Report(), typed(compose("train", words), TrainEntry)
    for check in (_tokenizer, _template):
        check(report, config, load_base(str(folder)))
    return report


def test_an_end_of_turn_that_is_none_of_the_ends_of_sequence_is_the_one_warning(tmp_path):
    report = checked(tmp_path / "b", CHATML, tiny_tokenizer(CHATML, ("<|im_start|>", "<|im_end|>")))
    (warning,) = report.warnings
    assert "ends an answer with '<|im_end|>' (5), which is none of the base's ends of sequence (</s> (1))" in warning
    assert dict(report.rows)["ends of sequence"] == "</s> (1)"
    assert dict(report.rows)["end of answer"] == "decoding does NOT stop there"


def test_tokens_beyond_the_embeddings_are_said_and_a_template_that_writes_one_is_an_error(tmp_path):
    report = checked(tmp_path / "some", TEMPLATE, tiny_tokenizer(TEMPLATE, ("<x>", "<y>")), 260)
    (warning,) = report.warnings
    assert "the tokenizer has 2 tokens beyond the base's 260 embeddings (" in warning
    assert "rows and questions that hold them are rejected" in warning
    assert not report.errors
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<q>"])
    tokenizer.chat_template = TEMPLATE.replace("<u>", "<q>")
    (error,) = checked(tmp_path / "all", None, tokenizer, 260).errors
    assert error.startswith("the chat template cannot be used: token 260 ('<q>') is in all's tokenizer")


def test_the_pinned_date_is_said(tmp_path):
    dated = "{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE
    report = checked(tmp_path / "b", dated, tiny_tokenizer(dated))
    assert dict(report.rows)["date in the template"] == "2024-07-26, whatever the day (base.date)"
    assert not report.warnings


def test_a_base_that_is_not_there_is_one_sentence(folder):
    done = doctor(folder, "base=local", "base.path=./nowhere", "logger=none")
    assert done.returncode == 1
    assert "error: base: base.path=./nowhere: no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_options_are_one_sentence(folder):
    done = doctor(folder, "optim.lrr=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: optim.lrr: there is no such option")


@pytest.mark.parametrize(
    ("mode", "logger", "found"),
    [("disabled", "wandb", "not used"), ("dryrun", "wandb", "offline"), ("online", "tensorboard", "not used")],
)
def test_what_becomes_of_the_figures_is_said(monkeypatch, mode, logger, found):
    monkeypatch.setenv("WANDB_MODE", mode)
    report = Report()
    checks._wandb(report, typed(compose("train", [f"logger={logger}"]), TrainEntry))
    assert report.rows == [("W&B", found)]


def test_a_run_that_begins_as_another_runs_head_is_probed_from_that_head(tmp_path, monkeypatch):
    trainer = Mock(**{"return_value.probe.return_value": 1.0})
    monkeypatch.setattr(checks, "prepared_folder", lambda *_: tmp_path)
    monkeypatch.setattr(checks, "read_manifest", lambda _: {})
    monkeypatch.setattr(checks, "start_head", lambda config, base: config.train.start_from)
    monkeypatch.setattr(checks, "Trainer", trainer)
    config = typed(compose("train", ["train.start_from=first", "data.features=null"]), TrainEntry)
    checks._steps(Report(), config, None)
    assert trainer.call_args.kwargs["start"] == "first"
    assert trainer.return_value.close.called


@pytest.mark.parametrize("done", [True, False])
def test_steps_are_probed_from_stored_states_where_there_are_some(tmp_path, monkeypatch, done):
    probed, store = [], Mock(done=done)
    monkeypatch.setattr(checks, "prepared_folder", lambda *_: tmp_path)
    monkeypatch.setattr(checks, "read_manifest", lambda _: {})
    monkeypatch.setattr(checks, "feature_store", lambda *_: store, raising=False)
    trainer = Mock(**{"probe.return_value": 0.5})
    monkeypatch.setattr(checks, "Trainer", lambda *_, features=None, **__: probed.append(features) or trainer)
    report = Report()
    checks._steps(report, typed(compose("train", []), TrainEntry), None)
    assert probed == [store.open.return_value if done else None]
    assert ("which data.features will spare" in dict(report.rows)["time to finish"]) is not done
