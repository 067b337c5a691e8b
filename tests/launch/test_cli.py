import ast
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import run

from ctcdraft.launch import runs
from ctcdraft.launch.cli import Stopped, _quoted, compose, enter, typed
from ctcdraft.launch.schema import ChatEntry, EvalEntry, ExportEntry, TrainEntry, defaults_of
from ctcdraft.train.regenerate import RegenerateConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_into_the_schema(recipe):
    path = [] if recipe in ("smoke", "toy") else ["data.path=x.json"]
    config = typed(compose("train", [f"experiment={recipe}", *path]), TrainEntry)
    assert config.train.steps > 0


def test_the_gpu_recipes_are_the_real_thing():
    for recipe, name in (("vicuna_7b", "vicuna"), ("llama31_8b", "Llama-3.1-8B"), ("qwen3_8b", "Qwen3-8B")):
        config = typed(compose("train", [f"experiment={recipe}", "data.path=x.json"]), TrainEntry)
        assert name in config.base.path
        assert (config.base.dtype, config.train.precision, config.zero.stage) == ("bf16", "bf16", 2)
        assert config.train.split(8)[1] >= 1


@pytest.mark.slow
def test_every_choice_composes():
    for kind in ("ctc", "parallel", "medusa", "eagle", "mlp", "glide", "diffusion"):
        assert compose("train", [f"head={kind}"]).head.kind == kind
    for group in ("base", "objective", "zero", "draft", "bench", "logger"):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert compose("train", [f"{group}='{path.stem}'"])[group] is not None
    typed(compose("eval", ["bench=mt_bench", "bench.path=x"]), EvalEntry)
    typed(compose("export", ["name=a"]), ExportEntry)
    assert compose("prepare", ["data=text"]).data.kind == "text"


def test_no_choice_says_a_default_again():
    defaults = defaults_of(EvalEntry) | defaults_of(TrainEntry)
    for path in (ROOT / "conf").glob("*/*.yaml"):
        told = yaml.safe_load(path.read_text()) or {}
        if path.parent.name != "experiment":
            again = {key for key, value in told.items() if value == defaults[path.parent.name].get(key)}
            assert again <= {"kind", "stage", "mode"}, path


NAMES = (
    "a[1].jsonl",
    "a (1).jsonl",
    "a,b.jsonl",
    "a=b.jsonl",
    "my data",
    "it's",
    "a\\'b",
    "{a}",
    "end\\",
    "#1",
    "~a",
    "a b=[c]",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_that_is_there_needs_no_quotes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    config = compose("train", [_quoted(word) for word in ("zero=2", "data=sharegpt", f"data.path={name}")])
    assert config.data.path == name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("a,b.jsonl", "{a}")])
def test_what_is_no_syntax_needs_no_quotes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose("train", ["data=sharegpt", _quoted(f"data.path={name}")]).data.path == name


def test_a_name_of_digits_is_a_name():
    for name in ("20261127", "2026_11_27", "3.10", "12e4567"):
        assert typed(compose("train", [_quoted(f"name={name}")]), TrainEntry).name == name
    config = typed(compose("eval", [_quoted("base.eos=2"), _quoted("name=null")]), EvalEntry)
    assert (config.base.eos, config.name) == (2, None)


def test_a_value_that_could_be_several_is_a_sentence():
    with pytest.raises(ValueError, match=r"Ambiguous value .* To use it as string, quote the value"):
        compose("train", [_quoted("data.path=a,b.jsonl")])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("<|im_end|>", "<|im_end|>"),
        ("'<|im_end|>'", "<|im_end|>"),
        ("</s>", "</s>"),
        ("151645", 151645),
        ("[<|im_end|>,</s>,7]", ["<|im_end|>", "</s>", 7]),
        ("['<a,b>',7]", ["<a,b>", 7]),
        ("null", None),
    ],
)
def test_tokens_need_no_quotes_of_their_own(given, read):
    for entry, schema in (("train", TrainEntry), ("eval", EvalEntry)):
        config = typed(compose(entry, [_quoted(f"base.eos={given}")]), schema)
        assert config.base.eos == read


def test_a_date_is_a_date():
    assert typed(compose("train", ["base.date=2025-01-31"]), TrainEntry).base.date == "2025-01-31"
    for day in ("tomorrow", "31.1.2025", "2025-02-30"):
        with pytest.raises(ValueError, match=r"base\.date='.*': give the date .* as YYYY-MM-DD"):
            typed(compose("train", [f"base.date={day}"]), TrainEntry)


def test_answers_are_rewritten_by_default_and_regenerate_says_how():
    config = typed(compose("train", []), TrainEntry)
    assert (config.data.labels, config.data.regenerate) == ("rewrite", RegenerateConfig())
    words = ["data.regenerate.url=http://127.0.0.1:1/v1", "data.regenerate.temperatures=[0,0.7]"]
    assert typed(compose("train", words), TrainEntry).data.regenerate.temperatures == [0.0, 0.7]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["+data.regenerate.hurl=x"], "error: data.regenerate.hurl: there is no such option"),
        (["data.regenerate=false"], "error: data.regenerate=False: input should be a dictionary"),
        (["data.turns=first"], "error: data.turns=first: input should be 'each' or 'last'"),
        (["data.template_args=[1]"], "error: data.template_args=[1]: input should be a valid dictionary"),
        (["data.labels=keep"], "error: data.labels=keep: input should be 'rewrite', 'argmax' or 'given'"),
        (["data=text", "data.path=x", "data.labels=given"], "error: data.labels=given: the base continues every text"),
        (
            ["data.regenerate.temperatures=[]"],
            "error: data.regenerate.temperatures=[]: list should have at least 1 item",
        ),
        (["data=sharegpt", "data.path=[a,b]", "data.weights=[1]"], "error: data.weights=[1.0]: give one above 0"),
        (["optim.lr=abc"], "error: optim.lr=abc: input should be a valid number"),
        (["head=medusa", "head.rank=8"], "error: head.rank: what else was chosen has no such option"),
        (["optim.lrr=1"], "error: optim.lrr: there is no such option; did you mean optim.lr?"),
        (["head=mlp", "head.widht=8"], "error: head.widht: there is no such option; did you mean head.width?"),
        (["head.rnak=8", "nmae=a"], "error: head.rnak: there is no such option; did you mean head.rank?"),
        (
            ["head=hydra"],
            "error: head=hydra: there is no such choice; choose one of ctc, diffusion, eagle, glide, medusa, mlp, "
            "parallel",
        ),
        (["base="], "error: base=: there is no such choice; choose one of local, smollm2, tiny, toy"),
        (["+head.depth=1"], "error: head.depth: there is no such option"),
        (["objective.labels=21"], "error: objective.labels=21 do not fit into head.slots=5"),
        (["objective.labels=3"], "error: objective.labels=3 and head.band=1 leave slots without a label"),
        (["objective=ctc"], "error: objective=ctc asks where a draft ends, which head.band=1 decides"),
        (["head.merge=true"], "error: head.merge=true takes any number of blanks: use head.band=null"),
        (["draft.nodes=0"], "error: draft.nodes=0"),
        (["train.steps=1.5"], "error: train.steps=1.5: input should be a valid integer"),
        (["train.precision=fp8"], "error: train.precision=fp8: input should be 'auto', 'fp32' or 'bf16'"),
        (["train.steps=0"], "error: train.steps=0: input should be greater than 0"),
        (["train.micro_batch=0"], "error: train.micro_batch=0: input should be greater than 0"),
        (["train.max_minutes=inf"], "error: train.max_minutes=inf: input should be less than inf"),
        (["train.hang_minutes=0"], "error: train.hang_minutes=0: input should be greater than 0"),
        (["optim.lr=nan"], "error: optim.lr=nan: input should be"),
        (["optim.warmup=1"], "error: optim.warmup=1: input should be less than 1"),
        (["optim.floor=2"], "error: optim.floor=2: input should be less than or equal to 1"),
        (["optim.betas=[0.9]"], "error: optim.betas=[0.9]: list should have at least 2 items"),
        (["optim.betas=[0.9,1]"], "error: optim.betas.1=1: input should be less than 1"),
        (["zero.stage=4"], "error: zero.stage=4: input should be 0, 1, 2 or 3"),
        (["zero.offload=true"], "error: zero.offload=true needs zero=1, 2 or 3"),
        (["objective.kind=mse"], "error: objective.kind=mse: input should be 'prefix_ctc', 'ctc' or 'cross_entropy'"),
        (["objective.decay=0"], "error: objective.decay=0: input should be greater than 0"),
        (["objective.decay=nan"], "error: objective.decay=nan: input should be"),
        (["objective.negatives=0"], "error: objective.negatives=0: input should be greater than 0"),
        (["logger.mode=loud"], "error: logger.mode=loud: input should be 'wandb', 'offline', 'tensorboard'"),
        (["base=local"], "error: base=local needs base.path"),
        (["zero=7"], "error: zero=7: there is no such choice; choose one of 0, 1, 2, 3"),
        (["head=medusa"], "error: head=medusa cannot be trained with prefix_ctc: use objective=cross_entropy"),
        (["seed=-1"], "error: seed=-1: input should be greater than or equal to 0"),
        (["seed=4294967296"], "error: seed=4294967296: input should be less than 4294967296"),
        (["base.template=alpaca"], "error: base.template=alpaca: input should be 'plain' or"),
        (["head.slots"], "error: Error parsing override 'head.slots'"),
    ],
)
def test_bad_options_are_one_sentence_and_a_non_zero_exit(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, lambda config: 0)
    assert end.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith(sentence)
    assert err.count("\n") == 1


@pytest.mark.parametrize(("entry", "kind"), [("eval", EvalEntry), ("chat", ChatEntry)])
@pytest.mark.parametrize(("word", "sentence"), [("seed=-1", "seed=-1: input"), ("base.template=x", "x: input should")])
def test_what_uses_a_head_checks_seed_and_template_too(entry, kind, word, sentence):
    with pytest.raises(ValueError, match=sentence):
        typed(compose(entry, [word]), kind)


def test_good_options_arrive_typed_and_launcher_words_are_dropped(monkeypatch):
    words = [
        "--local_rank=1",
        "--local-rank=1",
        "head.slots=12",
        "zero=2",
        "optim.lr=2e-3",
        "name=a",
        "data.prompt_tokens=[4,9]",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    seen = []
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, lambda config: seen.append(config) or 0)
    assert end.value.code == 0
    assert (seen[0].head.slots, seen[0].zero.stage, seen[0].optim.lr) == (12, 2, 2e-3)
    assert seen[0].data.prompt_tokens == [4, 9]


def test_hydras_own_flags_work(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--cfg", "job", "head.slots=11"])
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, lambda config: 1 / 0)
    assert end.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["head"]["slots"] == 11


def test_hydras_own_flags_print_no_password(monkeypatch, capsys):
    words = ["--cfg", "job", "data.regenerate.url=https://me:hunter22@host/v1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, lambda config: 1 / 0)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert yaml.safe_load(said)["data"]["regenerate"]["url"] == "https://***@host/v1"


def test_a_failure_under_hydras_flags_has_its_exit_code(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", "head.slots=9,10"])
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, lambda config: int(config.head.slots == 9))
    assert end.value.code == 1


def test_the_end_of_a_gpus_memory_is_one_sentence(monkeypatch, capsys):
    def task(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as end:
        enter("train", TrainEntry, task)
    said = "error: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB (take base.dtype=bf16, or"
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (Stopped(0), 0)], ids=["interrupted", "stopped"])
def test_what_stops_one_of_several_stops_all(monkeypatch, tmp_path, end, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", "head.slots=9,10"])
    begun = []

    def task(config):
        begun.append(config.head.slots)
        if isinstance(end, BaseException):
            raise end
        return end

    with pytest.raises(SystemExit) as ended:
        enter("train", TrainEntry, task)
    assert (ended.value.code, begun) == (code, [9])


ENDS = """
import atexit, sys, threading, time
from ctcdraft.launch.cli import run
from ctcdraft.launch.schema import TrainEntry

def task(config):
    threading.Thread(target=lambda: (time.sleep(0.3), print("waited for"))).start()
    if config.seed == 5:
        sys.exit("said")
    return config.seed

atexit.register(print, "registered", end="")
run("train", TrainEntry, task)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "code", "error"), [(0, 0, ""), (3, 3, ""), (5, 1, "said\n")])
def test_a_command_ends_with_its_code_once_all_is_done_that_waits_for_its_end(tmp_path, seed, code, error):
    (tmp_path / "ends.py").write_text(ENDS)
    done = run([tmp_path / "ends.py", f"seed={seed}"], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "waited for\nregistered", error)


def entry(tmp_path, *words):
    return typed(compose("train", [f"runs_dir={tmp_path}/runs", *words]), TrainEntry)


def test_a_run_is_named_by_what_decides_its_outcome(tmp_path):
    first = runs.check_inputs(entry(tmp_path))
    assert runs.check_inputs(entry(tmp_path, "logger=none", "bench.questions=3", "zero='2'")) == first
    assert runs.check_inputs(entry(tmp_path, "optim.lr=2e-3")) != first
    assert runs.check_inputs(entry(tmp_path, "name=mine")).name == "mine"


@pytest.mark.parametrize(
    ("name", "schema", "option", "found"),
    [
        ("train", TrainEntry, "cache_dir=~/x", "/home/me/x"),
        ("prepare", TrainEntry, "runs_dir=~/x", "/home/me/x"),
        ("eval", EvalEntry, "heads=[~/x,a/b]", ["/home/me/x", "a/b"]),
        ("export", ExportEntry, "output=~/x", "/home/me/x"),
    ],
)
def test_a_folder_may_lie_in_the_home_folder(monkeypatch, name, schema, option, found):
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(typed(compose(name, [_quoted(option)]), schema), option.split("=")[0]) == found


@pytest.mark.parametrize(
    "said",
    [
        "Hello, world",
        "true",
        "[hello]",
        "42",
        "a=b",
        'it\'s "so"',
        "What is ${HOME}, or '${x}'?",
        r"C:\a\'b' \${c} \\${d}\\",
    ],
)
def test_what_is_said_is_no_syntax(said):
    config = typed(compose("chat", [_quoted(f"prompt={said}"), _quoted(f"system={said}")]), ChatEntry)
    assert config.prompt == config.system == said
    assert typed(compose("chat", [_quoted("prompt=null")]), ChatEntry).prompt is None


@pytest.mark.parametrize("name", ["../x", "a/b", ".."])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ValueError, match="one folder name"):
        runs.check_inputs(entry(tmp_path, f"name='{name}'"))


@pytest.mark.parametrize(
    ("options", "world", "split"),
    [
        (["train.batch=8"], 4, (2, 1)),
        (["train.batch=8", "train.micro_batch=4"], 1, (4, 2)),
        (["train.batch=8", "train.micro_batch=4"], 4, (2, 1)),
        (["train.batch=12", "train.micro_batch=4"], 2, (3, 2)),
    ],
)
def test_a_batch_is_kept_whatever_the_ranks(options, world, split):
    train = typed(compose("train", options), TrainEntry).train
    assert train.split(world) == split
    assert split[0] * split[1] * world == train.batch


@pytest.mark.parametrize(("world", "rows"), [(1, 4), (2, 4), (3, 6), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (24, 24)])
def test_a_batch_that_is_not_said_splits_over_any_ranks(world, rows):
    train = typed(compose("train", []), TrainEntry).train
    micro, accumulation = train.split(world)
    assert micro * accumulation * world == train.rows_over(world) == rows


def test_a_batch_that_does_not_split_is_one_sentence():
    with pytest.raises(ValueError, match=r"train\.batch=4 does not split over 3 ranks: take a number of ranks"):
        typed(compose("train", ["train.batch=4"]), TrainEntry).train.split(3)


def test_a_missing_bench_file_is_found_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"bench.path=nope.jsonl: no such file"):
        runs.check_inputs(entry(tmp_path, "bench=mt_bench", "bench.path=nope.jsonl"))


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match="start with `make train`"):
        runs.find_run(None, str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("run: {}")
    with pytest.raises(ValueError, match=r"name=other: no such run in .*\(there: mine\)"):
        runs.find_run("other", str(tmp_path))
    assert runs.find_run(None, str(tmp_path)).name == "mine"


ALLOWED = {  # folders, and those of model/: what each may import
    "model": set(),
    "data": {"model"},
    "eval": {"model", "data"},
    "serve": {"model"},
    "train": {"model", "data"},
    "launch": {"model", "data", "train", "eval", "serve"},
}
FLOORS = ("base", "lattice", "loss", "draft", "load", "heads", "decode")  # of model/, each on those before
LEAVES = {"folders"}  # of model/ itself: what floors may import
OWNERS = {
    "hydra": {"launch"},
    "omegaconf": {"launch"},
    "deepspeed": {"train"},
    "wandb": {"train/log.py"},
    "vllm": {"serve/vllm.py"},
    "sglang": {"serve/sglang.py"},
}


def imports(path):
    """Names that a file imports, relative ones in full."""
    package = ["ctcdraft", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_imports_point_one_way_and_heavy_packages_have_one_owner():
    checked = 0
    for folder, others in ALLOWED.items():
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT)
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == "ctcdraft" and len(parts) > 1:
                    assert parts[1] in {folder, *others, "__version__"}, f"{place} imports {name}"
                    if place.parts[1] in FLOORS and len(parts) > 2:
                        below = {*FLOORS[: FLOORS.index(place.parts[1]) + 1], *LEAVES}
                        assert parts[2] in below, f"{place} imports {name}"
                assert {place.parts[0], str(place)} & OWNERS.get(parts[0], {folder}), f"{place} imports {name}"
                checked += 1
    assert checked > 200


def test_no_file_imports_itself_by_way_of_others():
    files = {f"ctcdraft.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}": path for path in product_files()}
    ahead = {name: {used for used in imports(path) if used in files} - {name} for name, path in files.items()}
    assert sum(map(len, ahead.values())) > 200
    while ends := [name for name, used in ahead.items() if not used & ahead.keys()]:
        for name in ends:
            del ahead[name]
    assert not ahead, f"these import each other: {sorted(ahead)}"


def product_files():
    return [path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"]
