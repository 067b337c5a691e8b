"""launch/eval.py on a tiny base: one head, several, their logs and what it refuses."""

import json
import shutil
import sys
import webbrowser

import pytest
from bases import TEMPLATE, tiny_tokenizer, write_base
from drafting import TRAINING, export_random_heads
from templates import SWITCHED, SWITCHED_SPECIALS
from wandb_file import history

from ctcdraft.data.template import with_template_args
from ctcdraft.launch import eval as entry
from ctcdraft.launch.cli import compose, enter, typed
from ctcdraft.launch.runs import run_base
from ctcdraft.launch.schema import BasePath, EvalEntry
from ctcdraft.model import export, export_head, load_base
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.heads import CtcConfig, head_on

pytestmark = pytest.mark.slow

SMALL = ["bench=toy", "bench.questions=2", "bench.max_new_tokens=5", "bench.warmups=0", "draft.nodes=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base with two runs that share it, and a head of each as a folder of its own."""
    root = tmp_path_factory.mktemp("evaluation")
    base = load_base(str(write_base(root / "base", eos_token_id=1, initializer_range=0.05)))
    for name, head in export_random_heads(base, root / "shipped", "a", "b").items():
        run = root / "runs" / name
        shutil.copytree(head, run / "head")
        (run / "config.yaml").write_text("run: {}")
        paths = {
            "base": base.path,
            "dtype": "fp32",
            "template": None,
            "data": f"data-{name}",
            "identity": base.identity,
        }
        (run / "paths.json").write_text(json.dumps(paths))
    return root


def start(place, words):
    config = typed(compose("eval", [f"runs_dir={place}/runs", *SMALL, *words]), EvalEntry)
    return entry.main(config)


def test_heads_are_compared_by_run_and_by_folder_and_logged(place, capsys):
    words = [f"heads=[a,{place}/shipped/b]", "logger=offline", "bench.temperatures=[0,1]", "bench.seeds=2"]
    assert start(place, words) == 0
    out = capsys.readouterr().out
    folder = place / "runs" / "a" / "eval" / "toy-heads"
    assert f"lies in {folder}" in out
    assert "| temperature 1" in out
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    (media,) = [row for row in history(file) if any(key.startswith("eval/table") for key in row)]
    for name in ("eval/questions", "plots/heads", "plots/by_category", "plots/calibration"):
        assert any(key.startswith(name) for key in media), name
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in folder.rglob("*.table.json")}
    sides = ("a", "b", "prompt lookup alone")
    assert [row[:2] for row in tables["table"]["data"]] == [[t, side] for t in (0, 1) for side in sides]
    columns = tables["questions"]["columns"]
    assert {"head", "question_id", "temperature", "seed", "answers", "tokens_per_step"} <= set(columns)
    assert len(tables["questions"]["data"]) == 2 * 2 * 3  # heads, questions, settings
    assert start(place, words) == 0
    assert "(reused)" in capsys.readouterr().out


def test_one_head_keeps_its_place_and_logs_a_row_per_question(place):
    assert start(place, ["name=a", "logger=offline"]) == 0
    folder = place / "runs" / "a" / "eval" / "toy"
    assert (folder / "results.json").is_file()
    (table,) = [path for path in folder.rglob("*.table.json") if path.name.startswith("questions")]
    assert len(json.loads(table.read_text())["data"]) == 2
    assert not (place / "runs" / "a" / "metrics.jsonl").exists()  # the log of the training is left alone


def test_a_head_that_learns_on_the_way_is_measured_by_itself(place, capsys):
    """Its outputs are plain decoding's, its seconds in the report, and nothing is left on disk but the report."""
    words = ["name=b", "logger=none", "bench.max_new_tokens=6"]
    assert start(place, words) == 0
    assert start(place, [*words, "online=on", "online.every=4", "online.lr=10"]) == 0
    assert "(reused)" not in capsys.readouterr().out
    folder = place / "runs" / "b" / "eval" / "toy"
    results = json.loads((folder / "results.json").read_text())
    assert results["online"] == {"every": 4, "lr": 10.0, "buffer": 8192}
    assert results["identical"]["identical"] == results["identical"]["compared"]
    assert 0 < results["time_share"]["learn"] < 1
    assert "learn" not in results["prompt_lookup_alone"]["time_share"]
    (times,) = [line for line in (folder / "report.md").read_text().splitlines() if "verify" in line]
    assert [cell.strip() for cell in times.split("|")[2:-1]] == ["verify", "draft", "tree", "learn", "other"]
    assert sorted(p.name for p in (place / "runs" / "b" / "head").iterdir()) == sorted(
        p.name for p in (place / "shipped" / "b").iterdir()
    )


def test_the_page_is_opened_where_that_is_asked_for(place, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    words = ("name=a", "logger=none")
    assert start(place, words) == 0
    assert opened == []
    assert start(place, [*words, "open=true"]) == 0
    page = place / "runs" / "a" / "eval" / "toy" / "report.html"
    assert opened == [page.as_uri()]
    assert f"as a page: {page}" in capsys.readouterr().out
    assert start(place, [*words, "open=true", "count=true", f"cache_dir={place}/cache"]) == 0
    assert opened[1] == (place / "runs" / "a" / "eval" / "toy-count" / "report.html").as_uri()
    assert "prompt lookup alone" in (place / "runs" / "a" / "eval" / "toy-count" / "report.html").read_text()


def test_heads_are_counted_without_decoding(place, capsys, monkeypatch):
    monkeypatch.setattr(Decoder, "generate", None)
    for words, heads in ((["name=a"], ["a"]), (["heads=[a,b]"], ["a", "b"])):
        assert start(place, [*words, "count=true", f"cache_dir={place}/cache"]) == 0
        out = capsys.readouterr().out
        folder = place / "runs" / "a" / "eval" / "toy-count"
        assert f"lies in {folder}" in out
        drafts = json.loads((folder / "results.json").read_text())["drafts"]
        assert list(drafts) == [
            *(f"{head}{way}" for head in heads for way in ("", ", no lookup", ", no lookup, chain")),
            "prompt lookup alone",
        ]
        assert all(label in out for label in drafts)
        assert start(place, [*words, "count=true", f"cache_dir={place}/cache"]) == 0
        assert "(reused)" in capsys.readouterr().out


@pytest.mark.parametrize("heads", ["heads=[b,a]", "name=b"])
def test_a_decoder_that_is_wrong_for_one_head_fails_the_evaluation(place, monkeypatch, capsys, heads):
    honest = Decoder.generate

    def generate(decoder, prompt, limit, **settings):
        out = honest(decoder, prompt, limit, **settings)
        if decoder.head is not None and decoder.head.config.slots == 4 and len(out.tokens) > 2:
            out.tokens[2] = (out.tokens[2] + 1) % 260
        return out

    monkeypatch.setattr(Decoder, "generate", generate)
    assert start(place, [heads, "logger=none"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_a_head_of_the_hub_is_evaluated_among_the_runs(place, tmp_path, capsys, monkeypatch):
    asked, cache = [], tmp_path / "hub"
    shutil.copytree(place / "shipped" / "b", cache / "snapshots" / "0123")
    monkeypatch.setattr(export, "snapshot_download", lambda name, **_: asked.append(name) or cache / "snapshots/0123")
    monkeypatch.chdir(tmp_path)
    for words in (["head.path=someone/drafts"], ["heads=[someone/drafts]"]):
        assert start(place, [*words, f"base.path={place}/base", "count=true", f"cache_dir={place}/cache"]) == 0
        assert f"lies in {place}/runs/drafts/eval/toy-count" in capsys.readouterr().out
    assert set(asked) == {"someone/drafts"}
    assert sorted(path.name for path in (cache / "snapshots").iterdir()) == ["0123"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["heads=[a,nope]"], "name=nope: no such run in"),
        (["heads=[a,{place}/shipped/a]"], "two of them are called a"),
        (["heads=[someone/nothing]", "base.path={place}/base"], "someone/nothing: no such folder of an exported head"),
        (["heads=[a,b]", "bench=heldout"], "bench=heldout is for runs on the same data"),
        (["heads=[{place}/shipped/a]"], "needs base.path"),
        (["heads=[a,b]", "name=a"], "leave out name and head.path"),
        (["name=a", "head.path={place}/shipped/a"], "name and head.path each say which head"),
        (["name=a", "online=on", "count=true"], "online=on learns while it decodes"),
        (["name=a", "online=on", "online.every=0"], "online.every=0"),
        (["heads=[{place}/shipped/a]", "base.path={place}/other"], "was trained on base and cannot draft for other"),
        (["name=a", "bench=spec_bench"], "bench=spec_bench needs bench.path"),
        (["name=a", "bench=gsm8k", "bench.path={place}/none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(place, words, sentence, monkeypatch, capsys):
    if any("/other" in word for word in words) and not (place / "other").is_dir():
        write_base(place / "other", seed=5)
    words = [word.format(place=place) for word in words]
    monkeypatch.setattr(sys, "argv", ["eval.py", f"runs_dir={place}/runs", *SMALL, *words])
    with pytest.raises(SystemExit) as end:
        enter("eval", EvalEntry, entry.main)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("error: ") == 1


# -- what the chat template gets ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switched(tmp_path_factory):
    """A base whose template reads `enable_thinking`, and heads that were trained with it off, and without it."""
    root = tmp_path_factory.mktemp("switched")
    write_base(root / "base", eos_token_id=5, vocab_size=264)  # <|im_end|>
    tiny_tokenizer(SWITCHED, SWITCHED_SPECIALS).save_pretrained(root / "base")
    base = load_base(str(root / "base"))
    head = head_on(base, CtcConfig(slots=4))
    export_head(head, with_template_args(base, {"enable_thinking": False}), root / "off", TRAINING)
    export_head(head, base, root / "plain", TRAINING)
    return root


def prompts_of(monkeypatch, root, words):
    """What is decoded, as text."""
    found = set()
    honest = Decoder.generate

    def logged(decoder, prompt, limit, **options):
        found.add(decoder.base.tokenizer.decode(prompt))
        return honest(decoder, prompt, limit, **options)

    monkeypatch.setattr(Decoder, "generate", logged)
    start(root, [f"base.path={root}/base", "logger=none", "bench.questions=1", *words])
    return found


@pytest.mark.filterwarnings("error")
def test_a_head_is_evaluated_with_the_template_args_of_its_training(switched, monkeypatch):
    assert "template_args" in json.loads((switched / "off" / "config.json").read_text())
    assert '{"enable_thinking": false}' in (switched / "off" / "README.md").read_text()
    prompts = prompts_of(monkeypatch, switched, [f"head.path={switched}/off"])
    assert prompts
    assert all(prompt.endswith("<think></think>") for prompt in prompts)
    assert all(p.endswith("<think>") for p in prompts_of(monkeypatch, switched, [f"head.path={switched}/plain"]))


def test_other_template_args_are_used_where_asked_for_with_a_warning(switched, monkeypatch):
    words = [f"head.path={switched}/off", "data.template_args={enable_thinking: true}"]
    with pytest.warns(
        UserWarning, match=r'trained with data.template_args=\{"enable_thinking": false\} and drafts here'
    ):
        prompts = prompts_of(monkeypatch, switched, words)
    assert all(prompt.endswith("<think>") for prompt in prompts)
    with pytest.warns(UserWarning, match=r"for chats with \{\}"):
        prompts_of(monkeypatch, switched, [f"head.path={switched}/off", "data.template_args={}"])


def test_heads_of_several_template_args_need_a_word_on_which(switched, monkeypatch):
    heads = f"heads=[{switched}/off,{switched}/plain]"
    with pytest.raises(ValueError, match=r"trained under several data.template_args \(.*off: .*: say which to use"):
        prompts_of(monkeypatch, switched, [heads])
    with pytest.warns(UserWarning, match="the head in .*plain was trained with"):
        prompts_of(monkeypatch, switched, [heads, "data.template_args={enable_thinking: false}"])


def test_a_runs_ends_of_sequence_and_date_are_those_of_its_training(tmp_path):
    dated = write_base(tmp_path / "base", template="{{ strftime_now('%Y') }}" + TEMPLATE)
    run = tmp_path / "run"
    run.mkdir()
    paths = {"base": str(dated), "dtype": "fp32", "template": None, "data": "d", "identity": {"name": "base"}}
    for recorded, chosen, eos, day in (
        ({}, BasePath(), (1,), "2024-07-26"),
        ({"eos": ["</s>", 9], "date": "2025-01-31"}, BasePath(), (1, 9), "2025-01-31"),
        ({"eos": 9, "date": "2025-01-31"}, BasePath(eos=7, date="2025-02-01"), (7,), "2025-02-01"),
    ):
        (run / "paths.json").write_text(json.dumps(paths | recorded))
        base = run_base(run, chosen)
        assert (base.eos_ids, base.date) == (eos, day)
