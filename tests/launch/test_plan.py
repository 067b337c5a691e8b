"""`doctor --plan`: what a run would take, from a config.json alone."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bases import write_base

from ctcdraft.launch import cli, plan
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import load_base
from ctcdraft.model.heads import head_on, parameters_of

ROOT = Path(__file__).parents[2]
MEASURE = """
import sys, tempfile
from pathlib import Path
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.pipeline import get_base, get_data
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.train import engine
from ctcdraft.train.loop import Trainer
config = typed(compose("train", sys.argv[1:]), TrainEntry)
engine.init_distributed()
base = get_base(config)
with tempfile.TemporaryDirectory() as folder:
    Trainer(config, base, get_data(config, base), Path(folder)).probe(2)
print("peak", engine.peak_memory())
"""


def configured(*words):
    return typed(compose("train", ["logger=none", *words]), TrainEntry)


@pytest.mark.parametrize("options", [[], ["head=medusa", "objective=cross_entropy"], ["head.layers=1"]])
def test_sizes_without_weights_are_those_of_the_loaded_base(tmp_path, options):
    folder = write_base(tmp_path / "b")
    base, config = load_base(str(folder)), configured("base.dtype=fp32", *options)
    found = plan.estimated(config, str(folder / "config.json"), 0)
    head = parameters_of(head_on(base, config.head))
    assert found.parameters == found.active == parameters_of(base.model)
    assert found.parts["base"] == sum(p.nbytes for p in base.model.parameters())
    assert [found.parts[f"head: {part}"] for part in ("weights", "gradients", "moments")] == [
        4 * head,
        4 * head,
        8 * head,
    ]


def test_ranks_share_what_zero_shares_and_experts_count_as_they_are_used(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **shape}
    (tmp_path / "config.json").write_text(json.dumps({**moe, "intermediate_size": 96, "vocab_size": 500}))
    one, eight = (
        plan.estimated(configured("train.batch=8", "zero='3'"), str(tmp_path / "config.json"), n) for n in (1, 8)
    )
    for part in ("weights", "gradients", "moments"):
        assert eight.parts[f"head: {part}"] == one.parts[f"head: {part}"] / 8
    assert one.parts["base"] == eight.parts["base"] == 2 * one.parameters
    experts = 3 * 8 * 3 * 64 * 32
    assert one.active == one.parameters - experts * 6 // 8
    assert one.seconds == 8 * eight.seconds


def told(monkeypatch, capsys, words):
    """What the entry prints and says, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--plan", *words])
    monkeypatch.setattr(cli, "run", cli.enter)  # which would end this process
    with pytest.raises(SystemExit) as end:
        runpy.run_module("ctcdraft.launch.doctor", run_name="__main__")
    out = capsys.readouterr()
    return out.out, f"{out.err}{end.value.code}"


def test_it_prints_for_a_config_alone(tmp_path, monkeypatch, capsys):
    folder = write_base(tmp_path / "b")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    words = [f"base={folder}/config.json", "zero=2", "head.slots=4"]
    out, err = told(monkeypatch, capsys, ["gpus=2", *words])
    assert err.endswith("0")
    assert "| memory of each of 2 GPUs" in out
    assert "| 6 (train.batch)" in told(monkeypatch, capsys, ["gpus=3", *words])[0]  # of 4 rows, and 3 ranks
    as_json = json.loads(told(monkeypatch, capsys, ["--json", "gpus=0", *words])[0])
    assert as_json["total"] == pytest.approx(sum(as_json["parts"].values()))


def test_a_head_without_copied_layers_is_planned_too(tmp_path, monkeypatch, capsys):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    base = write_base(tmp_path / "b", "gpt2", **sizes)
    assert "| memory of each of 2 GPUs" in told(monkeypatch, capsys, ["gpus=2", f"base={base}/config.json"])[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpus=2"], "--plan needs gpus="),
        (["gpus=2", "base=none.json"], "base=none.json: no such file"),
        (["gpus=2", "base={folder}/tokenizer.json"], "tokenizer.json: no causal LM"),
        (["gpus=2", "base={folder}/mamba.json"], "mamba.json: no causal LM ('MambaConfig' object has no attribute"),
        (["gpus=2", "base={folder}/jamba.json", "head.slots=4"], "jamba.json: no layer runs in bf16"),
        (["gpus=many", "base={folder}/config.json"], "gpus=many: a whole number"),
        (["gpus=3", "base={folder}/config.json", "train.batch=4"], "train.batch=4 does not split over 3 ranks"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(base_folder, tmp_path, monkeypatch, capsys, words, sentence):
    folder = shutil.copytree(base_folder, tmp_path / "base")
    (folder / "mamba.json").write_text('{"model_type": "mamba", "num_hidden_layers": 1}')
    (folder / "jamba.json").write_text('{"model_type": "jamba", "num_hidden_layers": 8}')
    out, err = told(monkeypatch, capsys, [word.format(folder=folder) for word in words])
    assert out == ""
    assert err.count("error: ") == 1
    assert sentence in err
    assert not err.endswith("0")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the estimate of a CPU")
def test_the_estimate_is_within_15_percent_of_a_peak_on_smollm2(smollm2_path, tmp_path):
    said = [("human", "Count on from {}."), ("gpt", "{} and one more is what comes next. " * 30)]
    rows = [
        {"conversations": [{"from": who, "value": text.replace("{}", str(i))} for who, text in said]} for i in range(80)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    options = ["train.pack=true", "train.max_length=512", "logger=none", f"cache_dir={tmp_path}/cache"]
    data = ["data=sharegpt", f"data.path={tmp_path}/rows.json", "data.labels=given", "base.dtype=bf16"]
    words = [*options, *data, "base=local", f"base.path={smollm2_path}"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.rsplit("peak ", 1)[1])
    command = [sys.executable, ROOT / "launch" / "doctor.py", "--json", "--plan", "gpus=0"]
    planned = [f"base={smollm2_path}/config.json", "base.dtype=bf16", *options]
    estimate = json.loads(subprocess.run([*command, *planned], capture_output=True, text=True, check=True).stdout)[
        "total"
    ]
    assert abs(estimate / peak - 1) < 0.15, (estimate, peak)
