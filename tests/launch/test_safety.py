"""What others give us runs no code, becomes no path, and what is secret is written nowhere. Each with its control."""

import json
import pickle
import re
import shutil
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bases import write_base
from chat_server import Server
from commands import run

from ctcdraft.data.secrets import masked
from ctcdraft.launch import runs
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import load_base
from ctcdraft.model.heads import CtcConfig
from ctcdraft.train.prepare import DataConfig, prepare

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY, PASSWORD = "sk-0123456789abcdef", "hunter2hunter2"


class Bomb:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_pickled_weights_are_refused_unread(base_folder, tmp_path):
    folder, mark = shutil.copytree(base_folder, tmp_path / "base"), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    torch.save(Bomb(mark), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds its weights as pickles .*: save it again as safetensors"):
        load_base(str(folder))
    assert not mark.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists(), "the control: read as a pickle, it runs"


def test_a_heads_or_runs_folder_with_pickles_in_it_is_read_without_them(base, tmp_path):
    from ctcdraft.model import export_head, load_head
    from ctcdraft.model.heads import head_on

    head = head_on(base, CtcConfig(slots=4))
    training = {"objective": "prefix_ctc", "step": 3, "tokens": 100, "tokens_per_step": 1.5}
    export_head(head, base, tmp_path / "head", training)
    mark = tmp_path / "mark"
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / "head" / name).write_bytes(pickle.dumps(Bomb(mark)))
    load_head(tmp_path / "head", base)
    (tmp_path / "head" / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match="is damaged"):
        load_head(tmp_path / "head", base)
    assert not mark.exists()


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_a_base_brings_along_runs_only_where_it_was_asked_for(base_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, mark = shutil.copytree(base_folder, tmp_path / "own"), tmp_path / "mark"
    (folder / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"brings Python code .*base.trust_remote_code=true runs it"):
        load_base(str(folder))
    assert not mark.exists()
    assert load_base(str(folder), trust_remote_code=True).vocab_size == 260
    assert mark.exists(), "the control: asked for, it runs"


@pytest.mark.parametrize("entry", ["train", "eval", "chat", "export"])
def test_no_entry_trusts_code_by_default(entry):
    assert compose(entry, []).base.trust_remote_code is False


ODD = ["../../out", "/out", "a\x00b", "x" * 5000, "..", "con\n", "\u202egnp"]


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_names_in_rows_become_no_paths(tmp_path):
    base = load_base(str(write_base(tmp_path / "base", initializer_range=0.05)))
    made = {}
    for kind, ids in (("tame", [f"row {i}" for i in range(28)]), ("odd", ODD * 4)):
        work = tmp_path / kind / "deep" / "down"
        work.mkdir(parents=True)
        rows = [
            {"id": name, "conversation_id": name, "messages": [{"role": "user", "content": f"question {i}"}]}
            for i, name in enumerate(ids)
        ]
        (work / "rows.json").write_text(json.dumps(rows))
        config = DataConfig(kind="sharegpt", path=str(work / "rows.json"), max_new_tokens=8, holdout=0.3)
        prepare(base, config, 0, work / "cache")
        made[kind] = {re.sub(r"[0-9a-f]{12}", "<hash>", name) for name in everything_in(tmp_path / kind)}
    assert made["odd"] == made["tame"]


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "a\x00b", "a\nb", "x" * 300])
def test_a_runs_name_is_one_folder_name_wherever_it_is_said(tmp_path, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.yaml").write_text("run: {}")
    with pytest.raises(ValueError, match="one folder name"):
        runs.find_run(name, str(tmp_path / "runs"))


def test_what_is_secret_is_masked_and_nothing_else_is(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", f"{KEY}\r\n")  # as a file holds it
    said = f"POST https://me:{PASSWORD}@host:8000/v1?key=abc&n=2 with {KEY} failed; see http://host/v1 and a@b?c=d"
    assert masked(said) == (
        "POST https://***@host:8000/v1?key=***&n=*** with *** failed; see http://host/v1 and a@b?c=d"
    )
    assert masked({"a": [said, 3, None]}) == {"a": [masked(said), 3, None]}


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory):
    """A whole run that asks a server with a password and a key, and the same against a server that is not there."""
    work = tmp_path_factory.mktemp("secret")
    base = write_base(work / "base", initializer_range=0.05)
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(24)]
    (work / "rows.json").write_text(json.dumps(rows))
    server = Server(load_base(str(base)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["experiment=smoke", "base=local", "base.path=base", "data=sharegpt", "data.path=rows.json"]
    options += ["bench.questions=2"]
    said = []
    for name, url, retries in (("r", server.url, 2), ("dead", "http://127.0.0.1:9/v1", 0)):
        url = url.replace("://", f"://me:{PASSWORD}@")
        asked = [
            f"data.regenerate.url={url}",
            f"data.regenerate.retries={retries}",
            f"name={name}",
            f"cache_dir={name}",
        ]
        words = [ROOT / "launch" / "train.py", *options, *asked]
        done = run(words, cwd=work, OPENAI_API_KEY=f"{KEY}\r\n", WANDB_MODE="offline")
        said.append((done.returncode, done.stdout + done.stderr))
    server.shutdown()
    return work, said, server


def test_secrets_reach_the_server_and_neither_screen_nor_files(secret_run):
    work, ((code, said), (dead, cause)), server = secret_run
    assert (code, dead) == (0, 1)
    assert server.bodies, "the control: the server was asked, with what follows from the password"
    assert "http://***@127.0.0.1:9/v1" in cause
    files = [path for path in work.rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "wandb_id"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (KEY, PASSWORD):
        assert secret not in said + cause
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
    config = typed(compose("train", [f"data.regenerate.url=http://me:{PASSWORD}@h/v1"]), TrainEntry)
    assert PASSWORD in json.dumps(asdict(config)), "the control: it is in what is written down, unmasked"


def test_a_key_in_a_url_is_refused_without_being_repeated():
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        typed(compose("train", [f"data.regenerate.url='http://h/v1?key={KEY}'"]), TrainEntry)
    assert KEY not in str(error.value)


def test_one_command_at_a_time_trains_a_run(tmp_path):
    with runs.held(tmp_path / "run"):
        with (
            pytest.raises(ValueError, match="is being trained by another command: wait for it, or end it first"),
            runs.held(tmp_path / "run"),
        ):
            pass
        with runs.held(tmp_path / "other"):
            pass
    with runs.held(tmp_path / "run"):
        pass
