"""Each benchmark's rows, as its authors publish them, and what becomes of them."""

import gzip
import json
import sys
from unittest.mock import Mock

import pytest
import templates
from bases import write_base
from pydantic import TypeAdapter

from ctcdraft.data.records import record_of
from ctcdraft.eval.bench import FUNCTION_ENDS, BenchConfig, load_questions
from ctcdraft.model import load_base

CHAT = (("user", "a"), ("assistant", "x"), ("user", "b"))
CODE = 'def add(a, b):\n    """Add two numbers."""\n'


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("rows") / "chat")))


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory):
    """A base whose tokenizer has no chat template."""
    return load_base(str(write_base(tmp_path_factory.mktemp("rows") / "plain", template=None)))


def load(base, kind, path, questions=None):
    return load_questions(BenchConfig(kind, str(path), questions=questions), base, None, 0)


def written(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def asked(question):
    return question.id, question.category, question.turns


def test_spec_bench_counts_the_eight_categories_of_mt_bench_as_one_task(chat_base, tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 161, "category": "translation", "turns": ["c"]},
        {"question_id": 241, "category": "math_reasoning", "turns": ["d"], "reference": ["e"]},
    ]
    found = load(chat_base, "spec_bench", written(tmp_path / "question.jsonl", rows))
    want = [("81", "mt_bench", ("a", "b")), ("161", "translation", ("c",)), ("241", "math_reasoning", ("d",))]
    assert [asked(q) for q in found] == want
    assert asked(load(chat_base, "mt_bench", tmp_path / "question.jsonl")[0]) == ("81", "writing", ("a", "b"))


def test_turns_in_json_text_are_turns(chat_base, tmp_path):
    rows = [{"question_id": 1, "turns": '["a b", "c d"]'}, {"question_id": 2, "turns": "[INST] a"}]
    found = load(chat_base, "mt_bench", written(tmp_path / "q.jsonl", rows))
    assert [question.turns for question in found] == [("a b", "c d"), ("[INST] a",)]


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["a", "b"]},
        {"prompt": ["a", "b"]},
        {
            "messages": [
                {"role": role, "content": word} for role, word in (("user", "a"), ("assistant", "x"), ("user", "b"))
            ]
        },
        {
            "conversations": [
                {"from": name, "value": word} for name, word in (("human", "a"), ("gpt", "x"), ("human", "b"))
            ]
        },
    ],
)
def test_a_row_asks_what_its_user_says_in_any_form_of_a_conversation(chat_base, tmp_path, row):
    path = written(tmp_path / "q.jsonl", [row])
    for kind, turns in (("mt_bench", ("a", "b")), ("spec_bench", ("a", "b"))):
        assert [question.turns for question in load(chat_base, kind, path)] == [turns]
    assert record_of(row, "0", "mixed").question == {"turns": ["a", "b"]}  # as data.keep_out reads it


def test_a_question_keeps_its_system_turn_and_its_tools(tmp_path):
    base = load_base(str(write_base(tmp_path / "b", template=templates.thinking("thinking"))))
    tool = {"type": "function", "function": {"name": "clock"}}
    rows = [{"question_id": 1, "system": "be kind", "tools": json.dumps([tool]), "turns": ["a", "b"]}]
    (question,) = load(base, "mt_bench", written(tmp_path / "q.jsonl", rows))
    first = base.tokenizer.decode(question.prompt_after(base))
    want = (
        f"<|im_start|>tools\n{json.dumps([tool])}<|im_end|>\n<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first == want
    second = base.tokenizer.decode(question.prompt_after(base, [base.tokenizer("c").input_ids]))
    assert second == f"{want}c<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert hash(question) == hash(question)


def test_a_few_questions_are_of_all_categories(chat_base, tmp_path):
    """A benchmark lists one category after the other."""
    every = load_questions(BenchConfig("toy", questions=None), chat_base, None, 0)
    for few in (8, 24, 40):
        found = load_questions(BenchConfig("toy", questions=few), chat_base, None, 0)
        assert found == [every[place * 80 // few] for place in range(few)]
        assert len({question.category for question in found}) == 8
    assert load_questions(BenchConfig("toy", questions=100), chat_base, None, 0) == every
    rows = [{"turns": ["good"]} for _ in range(9)] + [{"turns": []}]
    path = written(tmp_path / "question.jsonl", rows)
    assert [q.id for q in load(chat_base, "mt_bench", path, 3)] == ["0", "3", "6"]
    with pytest.raises(ValueError, match="row 9: no list"):
        load(chat_base, "mt_bench", path)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many?", "answer": "Two. #### 2"},
        {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]},
        {"question_id": 0, "category": "gsm8k", "turns": ["How many?"]},
    ],
)
def test_gsm8k_asks_the_question_alone(chat_base, tmp_path, row):
    (found,) = load(chat_base, "gsm8k", written(tmp_path / "test.jsonl", [row]))
    assert asked(found) == ("0", "gsm8k", ("How many?",))


def test_a_chat_model_is_asked_for_humanevals_code_and_another_base_continues_it(chat_base, plain_base, tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": CODE, "test": "x"}).encode()))
    (chat,) = load(chat_base, "humaneval", path)
    assert asked(chat) == ("HumanEval/0", "humaneval", (CODE,))
    assert chat_base.tokenizer.decode(chat.prompt_after(chat_base)).startswith("<u>def add")
    (plain,) = load(plain_base, "humaneval", path)
    assert plain.prompt_after(plain_base) == plain_base.tokenizer(CODE).input_ids
    assert plain.stop == FUNCTION_ENDS


def test_a_damaged_archive_is_one_sentence(chat_base, tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}" * 500)[:-9])
    with pytest.raises(ValueError, match=r"HumanEval.jsonl.gz is damaged after 0 rows"):
        load(chat_base, "humaneval", path)


def hub_like(folder, config, rows):
    """A dataset repository as the Hub holds it: README.md with the configurations, files below."""
    (folder / config).mkdir(parents=True)
    for split in ("train", "test"):
        written(folder / config / f"{split}.jsonl", [{**row, "split": split} for row in rows])
    files = "".join(f"  - {{split: {s}, path: {config}/{s}.jsonl}}\n" for s in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def test_a_dataset_repository_gives_its_test_split(chat_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub_like(tmp_path / "openai" / "gsm8k", "main", [{"question": f"q{i}", "answer": "a"} for i in range(3)])
    found = load(chat_base, "gsm8k", "openai/gsm8k", questions=2)
    assert [q.turns for q in found] == [("q0",), ("q1",)]


def test_the_hub_is_asked_for_the_right_configuration(chat_base, monkeypatch):
    hub = Mock(return_value={"test": [{"question": "q"}]})
    monkeypatch.setitem(sys.modules, "datasets", Mock(load_dataset=hub))
    load(chat_base, "gsm8k", "openai/gsm8k")
    assert hub.call_args.args == ("openai/gsm8k", "main")
    load(chat_base, "gsm8k", "someone/gsm8k")
    assert hub.call_args.args == ("someone/gsm8k", None)
    hub.return_value = {"train": [{"prompt": ["one", "two"], "category": "writing", "prompt_id": 5}]}
    (found,) = load(chat_base, "mt_bench", "HuggingFaceH4/mt_bench_prompts")
    assert hub.call_args.args == ("HuggingFaceH4/mt_bench_prompts", None)
    assert asked(found) == ("5", "writing", ("one", "two"))


def test_no_hub_is_one_sentence(chat_base, monkeypatch):
    hub = Mock(side_effect=ConnectionError("no network\nand a long story"))
    monkeypatch.setitem(sys.modules, "datasets", Mock(load_dataset=hub))
    with pytest.raises(ValueError, match=r"bench.path=openai/gsm8k: no such file, and the Hub .* \(no network\)$"):
        load(chat_base, "gsm8k", "openai/gsm8k")


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("gsm8k", '{"text": "x"}', r"row 0: no list under .*, and no question \(its columns: text\)"),
        ("gsm8k", '{"messages": []}', "row 0: no list under"),
        ("gsm8k", '{"messages": [{"role": "system", "content": "x"}]}', "row 0: no user turn"),
        ("gsm8k", '{"input_ids": [1, 2], "loss_mask": [0, 1]}', "row 0: tokens, where a question is due"),
        ("humaneval", '{"task_id": "x", "prompt": " "}', r"row 0: turn 0 \(from the user\) is empty"),
        ("gsm8k", '{"turns": ["a", "b"]}', "row 0: 2 turns, where gsm8k asks one question"),
        ("spec_bench", '{"turns": ["a"]}\n[1]', "row 1: an object is needed, this is a list"),
    ],
)
def test_a_row_without_a_question_is_named(chat_base, tmp_path, kind, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(chat_base, kind, path)


def test_a_missing_file_is_named_under_its_option(chat_base):
    with pytest.raises(ValueError, match=r"^bench.path=nope.jsonl: no such file$"):
        load(chat_base, "spec_bench", "nope.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "spec_bench"}, "bench=spec_bench needs bench.path"),
        ({"kind": "arena"}, "kind\n.*input should be 'heldout', 'toy'"),
        ({"questions": 0}, "questions\n.*greater than 0"),
        ({"max_new_tokens": 0}, "max_new_tokens\n.*greater than 0"),
        ({"warmups": -1}, "warmups\n.*greater than or equal to 0"),
        ({"prompt_tokens": [5]}, "prompt_tokens\n.*at least 2 items"),
        ({"prompt_tokens": [0, 5]}, "prompt_tokens.0\n.*greater than 0"),
        ({"prompt_tokens": [6, 5]}, "give .shortest, longest."),
        ({"temperatures": []}, "temperatures\n.*at least 1 item"),
        ({"temperatures": [1.0, 1]}, "each once"),
        ({"temperatures": [-1.0]}, "temperature=-1.0"),
        ({"seeds": 0}, "seeds\n.*greater than 0"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=f"(?i){message}"):
        TypeAdapter(BenchConfig).validate_python(options)


def test_greedy_decoding_needs_one_seed_and_sampling_several():
    settings = BenchConfig(temperatures=[0.0, 1.0]).settings(7)
    assert [(s.temperature, s.seed) for s in settings] == [(0.0, 7), (1.0, 7), (1.0, 8), (1.0, 9)]


def test_the_real_files_load(chat_base, shared):
    mt_bench = load(chat_base, "mt_bench", shared / "data" / "mt_bench.jsonl")
    assert len(mt_bench) == 80
    assert {len(q.turns) for q in mt_bench} == {2}
    assert len({q.category for q in mt_bench}) == 8
    gsm8k = load(chat_base, "gsm8k", shared / "data" / "gsm8k_train.jsonl", questions=80)
    assert len(gsm8k) == 80
    assert gsm8k[0].turns[0].startswith("Natalia sold clips")


def test_data_that_kept_nothing_from_training_says_what_to_do(base, tmp_path):
    written(tmp_path / "heldout.jsonl", [])
    with pytest.raises(ValueError, match=r"no question is left.*data\.holdout"):
        load_questions(BenchConfig("heldout"), base, tmp_path, 0)


def test_a_text_that_was_kept_from_training_is_called_by_its_row(chat_base, tmp_path):
    rows = [{"question_id": name, "category": "text", "text": "abcdef" * 20} for name in ("31", "1:7")]
    written(tmp_path / "heldout.jsonl", rows)
    config = BenchConfig("heldout", prompt_tokens=[4, 8])
    assert [question.id for question in load_questions(config, chat_base, tmp_path, 0)] == ["31", "1:7"]
