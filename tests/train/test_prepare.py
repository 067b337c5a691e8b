import gzip
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bases import tiny_tokenizer, write_base
from pydantic import TypeAdapter
from templates import QWEN_3, SWITCHED, SWITCHED_SPECIALS

from ctcdraft.data.generated import GENERATED
from ctcdraft.data.store import load_corpus, read_jsonl, read_manifest
from ctcdraft.data.template import with_template_args
from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.model import Decoder, load_base
from ctcdraft.train import examples
from ctcdraft.train import prepare as stage
from ctcdraft.train.prepare import DataConfig, prepare, prepared_folder
from ctcdraft.train.shards import read_shards


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("chat") / "b", eos_token_id=1, initializer_range=0.05)))


def conversations(count, turns=2):
    return [
        {
            "id": f"c{i}",
            "conversations": [
                {"from": who, "value": f"{who} {i} {t}"} for t in range(turns) for who in ("human", "gpt")
            ],
        }
        for i in range(count)
    ]


def prepared(base, tmp_path, rows, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    options = {"kind": "sharegpt", "max_new_tokens": 12, "holdout": 0.3, **options}
    return prepare(base, DataConfig(path=str(path), **options), 0, tmp_path / "cache")


def test_every_answer_is_the_bases_own(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, conversations(12))
    corpus = load_corpus(folder, "train")
    assert len(corpus) > 3
    for i in range(len(corpus)):
        ids, mask, labels = (list(map(int, column)) for column in corpus[i])
        assert ids == labels
        start = mask.index(1)
        answer = ids[start : start + mask[start:].index(0)] if 0 in mask[start:] else ids[start:]
        assert Decoder(chat_base).generate(ids[:start], 12).tokens == answer


def test_used_and_rejected_add_up_and_rejects_keep_their_reason(chat_base, tmp_path):
    rows = conversations(10)
    rows.insert(3, {"conversations": [{"from": "gpt", "value": "me first"}]})
    rows.append(17)
    rows.append({"conversations": [{"from": "human", "value": "x" * 900}]})
    folder = prepared(chat_base, tmp_path, rows, holdout=0.1)
    manifest = read_manifest(folder)
    rejects = read_jsonl(folder / "rejects.jsonl")
    assert manifest["read"] == 13
    assert manifest["used"] + manifest["rejected"] == 13
    reasons = {reject["row"]: reject["reason"] for reject in rejects}
    assert "starts with the assistant" in reasons["3"]
    assert "this is a int" in reasons["11"]
    assert any("more than the context holds" in reason for reason in reasons.values())


def test_heldout_questions_are_never_trained_on(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, conversations(30))
    asked = {q["turns"][0] for q in read_jsonl(folder / "heldout.jsonl")}
    corpus = load_corpus(folder, "train")
    seen = [chat_base.tokenizer.decode(corpus[i].ids.tolist()) for i in range(len(corpus))]
    assert asked
    assert not any(f"<u>{question}<" in text for question in asked for text in seen)


def test_prepared_data_is_reused_and_keyed_by_base_and_options(chat_base, base_folder, tmp_path, monkeypatch):
    folder = prepared(chat_base, tmp_path, conversations(8))
    monkeypatch.setattr(examples, "rewrite", Mock(side_effect=AssertionError("generated again")))
    assert prepared(chat_base, tmp_path, conversations(8)) == folder
    monkeypatch.undo()
    assert prepared(chat_base, tmp_path, conversations(8), max_new_tokens=5) != folder
    assert prepared(load_base(str(base_folder)), tmp_path, conversations(8)) != folder


@torch.no_grad()
def test_a_fine_tune_with_the_same_lm_head_and_tokenizer_has_data_of_its_own(chat_base, tmp_path):
    tuned = load_base(chat_base.path)
    tuned.decoder.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert tuned.identity == chat_base.identity
    folder, same, other = (
        prepared_folder(base, DataConfig(), 0, tmp_path) for base in (chat_base, load_base(chat_base.path), tuned)
    )
    assert folder == same != other


def test_an_interrupted_preparation_is_not_taken_for_one(chat_base, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "write_jsonl", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepared(chat_base, tmp_path, conversations(8))
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("data-*/manifest.json"))
    folder = prepared(chat_base, tmp_path, conversations(8))
    assert read_manifest(folder)["read"] == 8
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]


def test_what_a_damaged_manifest_says_to_do_helps_and_so_does_its_removal_alone(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, conversations(8))
    manifest, files = (folder / "manifest.json").read_text(), sorted(path.name for path in folder.iterdir())
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=rf"manifest.json is damaged: delete {folder} and run the command again"):
        prepared(chat_base, tmp_path, conversations(8))
    (folder / "manifest.json").unlink()
    (folder / "left").touch()
    assert prepared(chat_base, tmp_path, conversations(8)) == folder
    assert (folder / "manifest.json").read_text() == manifest
    assert sorted(path.name for path in folder.iterdir()) == files
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]


def test_a_damaged_account_of_a_shard_names_the_shard(chat_base, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "join_corpora", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepared(chat_base, tmp_path, conversations(8))
    monkeypatch.undo()
    (account,) = (tmp_path / "cache").glob("data-*.work/00000/account.json")
    account.write_text("{")
    with pytest.raises(ValueError, match=rf"account.json is damaged: delete {account.parent} and run"):
        prepared(chat_base, tmp_path, conversations(8))
    shutil.rmtree(account.parent)
    assert read_manifest(prepared(chat_base, tmp_path, conversations(8)))["read"] == 8


def test_shards_are_joined_by_their_numbers_and_not_by_what_a_disk_lists(chat_base, tmp_path, monkeypatch):
    """A network disk may list a folder as it was a moment ago."""
    honest = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: (p for p in honest(folder) if p.name != "00001"))
    assert read_manifest(prepared(chat_base, tmp_path, conversations(12), shard_rows=4))["read"] == 12


def test_texts_are_cut_and_continued(chat_base, tmp_path):
    texts = [f"{'abcdefghij' * 4} {i}" for i in range(20)]
    folder = prepared(chat_base, tmp_path, [*texts, "short", 5], kind="text", prompt_tokens=[8, 16], samples_per_text=3)
    manifest = read_manifest(folder)
    assert manifest["read"] == 22
    assert manifest["rejected"] >= 1
    corpus = load_corpus(folder, "train")
    ids, mask, _ = (list(map(int, column)) for column in corpus[0])
    start = mask.index(1)
    assert 8 <= start <= 16
    assert all(mask[start:])
    assert Decoder(chat_base).generate(ids[:start], 12).tokens == ids[start:]


def test_given_answers_get_the_bases_argmax_as_labels(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, conversations(8), labels="argmax")
    corpus = load_corpus(folder, "train")
    ids, mask, labels = (list(map(int, column)) for column in corpus[0])
    assert "gpt" in chat_base.tokenizer.decode(ids)
    at = mask.index(1) + 1
    assert Decoder(chat_base).generate(ids[:at], 1).tokens == [labels[at]]


def test_half_characters_in_names_are_written_as_their_code(chat_base, tmp_path):
    half = "\ud800"
    rows = [row | {half: 1} for row in conversations(8)]
    bad = (
        {half: 1},
        {"messages": [{"role": half, "content": "q"}]},
        {"messages": [{"role": "user", "content": [{"type": half}]}]},
    )
    folder = prepared(chat_base, tmp_path, [*rows, *bad, {"x" * 9000: 1}])
    assert read_manifest(folder)["unread"] == {half: 8}
    rejects = [row["reason"] for row in read_jsonl(folder / "rejects.jsonl")]
    assert all("\\ud800" in reason for reason in rejects[:3])
    assert len(rejects) == 4
    assert max(map(len, rejects)) < 1000


def test_nothing_usable_is_an_error_that_names_the_commonest_reason(chat_base, tmp_path):
    with pytest.raises(ValueError, match=r"none gave a train sequence; 3 rejected \(2 of them: an object is needed"):
        prepared(chat_base, tmp_path, [{"a": 1}, 1, 2])


def test_nothing_usable_is_the_error_of_all_that_prepare_together(chat_base, tmp_path):
    (tmp_path / "rows.json").write_text("[1, 2, 3, 4]")
    config = DataConfig(kind="sharegpt", path=str(tmp_path / "rows.json"), shard_rows=1)
    with ThreadPoolExecutor(3) as pool:
        tries = [pool.submit(prepare, chat_base, config, 0, tmp_path / "cache") for _ in range(3)]
    assert [type(one.exception()) for one in tries] == [ValueError] * 3, [one.exception() for one in tries]
    assert all("of 4 rows none gave a train sequence; 4 rejected" in str(one.exception()) for one in tries)


def test_what_has_no_known_meaning_is_counted_once_by_its_name(chat_base, tmp_path):
    rows = [row | {"source": "x", "empty": None} for row in conversations(10)]
    rows[3]["conversations"][0]["timestamp"] = 7
    rows.append({"conversations": [], "lost": 1})
    for labels in ("rewrite", "argmax"):
        folder = prepared(chat_base, tmp_path, rows, labels=labels, shard_rows=4)
        assert read_manifest(folder)["unread"] == {"source": 10, "turn.timestamp": 1}
    assert read_manifest(prepared(chat_base, tmp_path, conversations(10)))["unread"] == {}
    rows = [row | {"tools": [{"name": "clock"}]} for row in conversations(10)]
    for labels in ("rewrite", "argmax"):
        folder = prepared(chat_base, tmp_path, rows, labels=labels)
        used = 10 - sum(1 for _ in read_jsonl(folder / "heldout.jsonl"))
        assert read_manifest(folder)["unread"] == {"tools (the template shows none)": used}


@pytest.mark.parametrize("labels", ["argmax", "given"])
def test_an_answer_of_no_weight_is_read_and_has_no_label(chat_base, tmp_path, labels):
    rows = conversations(10)
    for row in rows:
        row["conversations"][1]["weight"] = 0
    rows[9]["conversations"][3]["train"] = False
    whole = prepared(chat_base, tmp_path, conversations(10), labels=labels, holdout=0.01)
    folder = prepared(chat_base, tmp_path, rows, labels=labels, holdout=0.01)
    assert [reject["row"] for reject in read_jsonl(folder / "rejects.jsonl")] == ["9"]
    assert "none of its answers is to be learned" in read_jsonl(folder / "rejects.jsonl")[0]["reason"]
    corpus, want = load_corpus(folder, "train"), load_corpus(whole, "train")
    for i in range(len(corpus)):
        mask = [int(m) for m in want[i].mask]
        first = mask.index(1)
        mask[first : mask.index(0, first)] = [0] * (mask.index(0, first) - first)
        assert corpus[i].ids.tolist() == want[i].ids.tolist()
        assert corpus[i].mask.tolist() == mask


def test_a_heldout_question_keeps_its_system_turn_and_tools_and_ends_before_a_tools_result(chat_base, tmp_path):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    rows = [{"system": "be kind", "tools": json.dumps(tools), **row} for row in conversations(30)]
    folder = prepared(chat_base, tmp_path, rows, labels="given")
    questions = read_jsonl(folder / "heldout.jsonl")
    assert questions
    assert all((q["system"], q["tools"], len(q["turns"])) == ("be kind", tools, 2) for q in questions)
    loaded = load_questions(BenchConfig("heldout"), chat_base, folder, 0)
    assert all((q.system, q.tools) == ("be kind", tools) for q in loaded)
    for row in rows:
        row["conversations"].insert(2, {"from": "tool", "value": "noon"})
        row["conversations"].insert(3, {"from": "gpt", "value": "so"})
    questions = read_jsonl(prepared(chat_base, tmp_path, rows, labels="given") / "heldout.jsonl")
    assert all(len(q["turns"]) == 1 for q in questions)


def test_equal_rows_are_used_once(chat_base, tmp_path):
    rows = conversations(10)
    folder = prepared(chat_base, tmp_path, [*rows, {**rows[3], "id": "other"}])
    manifest = read_manifest(folder)
    assert (manifest["read"], manifest["rejected"]) == (11, 1)
    assert read_jsonl(folder / "rejects.jsonl") == [{"row": "10", "reason": "the same as row 3"}]
    both = prepared(chat_base, tmp_path, [*rows, rows[3]], dedupe=False)
    assert read_manifest(both)["rejected"] == 0


TOKEN_ROWS = [{"input_ids": [i % 200 + 4, 5, 6, 7, 8, i % 100 + 9], "loss_mask": [0, 0, 1, 1, 1, 1]} for i in range(30)]


def test_given_answers_are_the_labels_and_the_base_does_not_run(chat_base, tmp_path, monkeypatch):
    for module in (chat_base.model, chat_base.model.model):
        monkeypatch.setattr(module, "forward", Mock(side_effect=AssertionError("the base ran")))
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_bytes(gzip.compress("\n".join(map(json.dumps, [*conversations(12), *TOKEN_ROWS])).encode()))
    config = DataConfig(kind="sharegpt", path=str(rows), labels="given", holdout=0.3)
    folder = prepare(chat_base, config, 0, tmp_path / "cache")
    manifest = read_manifest(folder)
    assert (manifest["read"], manifest["rejected"]) == (42, 0)
    corpus = load_corpus(folder, "train")
    forms = set()
    for i in range(len(corpus)):
        ids, mask, labels = (list(map(int, column)) for column in corpus[i])
        assert ids == labels
        forms.add(tuple(mask) == (0, 0, 1, 1, 1, 1))
    assert forms == {True, False}
    asked = load_questions(BenchConfig("heldout"), chat_base, folder, 0)
    assert {question.prompt[1:] for question in asked if question.prompt} == {(5,)}


def test_tokens_cannot_be_rewritten(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, [*TOKEN_ROWS[:2], *conversations(12)])
    assert {row["row"] for row in read_jsonl(folder / "rejects.jsonl")} <= {"0", "1"}
    with pytest.raises(ValueError, match=r"none gave a train .*cannot be rewritten: data.labels=given takes them"):
        prepared(chat_base, tmp_path, TOKEN_ROWS)


def test_tokens_get_the_bases_argmax_as_labels_where_asked(chat_base, tmp_path):
    rows = [*TOKEN_ROWS, {"input_ids": [5, 900], "loss_mask": [0, 1]}]
    folder = prepared(chat_base, tmp_path, rows, labels="argmax")
    corpus = load_corpus(folder, "train")
    ids, mask, labels = (list(map(int, column)) for column in corpus[0])
    assert mask == [0, 0, 1, 1, 1, 1]
    assert Decoder(chat_base).generate(ids[:3], 1).tokens == [labels[3]]
    (reject,) = read_jsonl(folder / "rejects.jsonl")
    assert "token 900, but b knows 260" in reject["reason"]


def test_texts_and_conversations_mix_in_the_shares_asked_for(chat_base, tmp_path):
    chats, texts = tmp_path / "chats.json", tmp_path / "texts.json"
    chats.write_text(json.dumps(conversations(60, turns=1)))
    texts.write_text(json.dumps([f"{'abcdefghij' * 3} {i}" for i in range(20)]))
    config = DataConfig(
        kind="mixed",
        path=[str(chats), str(texts)],
        weights=[0.75, 0.25],
        samples_per_text=1,
        max_new_tokens=4,
        holdout=0.3,
    )
    folder = prepare(chat_base, config, 0, tmp_path / "cache")
    manifest = read_manifest(folder)
    assert 76 <= manifest["read"] <= 81
    corpus = load_corpus(folder, "train")
    plain = sum(int(corpus[i].ids[0]) != 2 for i in range(len(corpus)))  # chats start with <u>
    assert 0.1 < plain / len(corpus) < 0.4
    forms = {"text" if "text" in row else "turns" for row in read_jsonl(folder / "heldout.jsonl")}
    assert forms == {"text", "turns"}
    questions = load_questions(BenchConfig("heldout", prompt_tokens=[8, 12]), chat_base, folder, 0)
    assert {bool(question.turns) for question in questions} == {True, False}


@pytest.mark.parametrize("labels", ["argmax", "given"])
@pytest.mark.parametrize("turns", ["each", "last"])
def test_a_template_that_drops_thoughts_gives_a_sequence_per_turn(tmp_path, labels, turns):
    write_base(tmp_path / "b", context=512, vocab_size=264)
    tokenizer = tiny_tokenizer(QWEN_3, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    tokenizer.save_pretrained(tmp_path / "b")
    rows = conversations(9, turns=3)
    for row in rows:
        for turn in row["conversations"][1::2]:
            turn["reasoning_content"] = f"thought on {turn['value']}"
    folder = prepared(load_base(str(tmp_path / "b")), tmp_path, rows, labels=labels, turns=turns, holdout=0.2)
    manifest, corpus = read_manifest(folder), load_corpus(folder, "train")
    assert (manifest["read"], manifest["rejected"]) == (9, 0)
    per_row = 3 if turns == "each" else 1
    counted = len(corpus) + len(load_corpus(folder, "dev"))
    assert counted == per_row * (9 - manifest["heldout"])
    for i in range(len(corpus)):
        ids, mask, chosen = corpus[i]
        label, last = tokenizer.decode(ids[mask == 1]), 2 if turns == "last" else i % 3
        said = label.split("</think>\n\n")[1].removesuffix("<|im_end|>")
        assert label == f"<think>\nthought on {said}\n</think>\n\n{said}<|im_end|>"
        assert said.endswith(f" {last}")
        assert tokenizer.decode(ids).count("thought on") == 1
        assert (chosen.tolist() == ids.tolist()) == (labels == "given")
    dropped = 2 * (9 - manifest["heldout"]) if turns == "last" else 0
    assert sum(manifest["unread"].values()) == dropped


@pytest.mark.parametrize("labels", ["rewrite", "argmax", "given"])
def test_data_of_other_template_args_is_other_data(tmp_path, labels):
    write_base(tmp_path / "b", context=512, vocab_size=264, eos_token_id=1)
    tiny_tokenizer(SWITCHED, SWITCHED_SPECIALS).save_pretrained(tmp_path / "b")
    plain, folders = load_base(str(tmp_path / "b")), {}
    for ending, args in (("<think>", None), ("<think></think>", {"enable_thinking": False})):
        base = with_template_args(plain, args or {})
        folder = prepared(base, tmp_path, conversations(9, turns=1), labels=labels, template_args=args)
        ids, mask, _ = load_corpus(folder, "train")[0]
        assert base.tokenizer.decode(ids[: mask.tolist().index(1)]).endswith(f"assistant\n{ending}")
        assert read_manifest(folder)["options"]["template_args"] == args
        folders[folder] = ending
    assert len(folders) == 2


def test_a_conversation_of_which_a_sequence_is_too_long_is_rejected_whole(tmp_path):
    write_base(tmp_path / "b", context=128, vocab_size=264)
    tiny_tokenizer(QWEN_3, ("<|im_start|>", "<|im_end|>", "<think>", "</think>")).save_pretrained(tmp_path / "b")
    rows = conversations(12, turns=1)
    rows[5] = conversations(6, turns=4)[5]
    folder = prepared(load_base(str(tmp_path / "b")), tmp_path, rows, labels="given", holdout=0.05)
    manifest = read_manifest(folder)
    assert manifest["used"] + manifest["rejected"] == 12
    (reject,) = read_jsonl(folder / "rejects.jsonl")
    assert reject["row"] == "5"
    assert "more than the context holds" in reject["reason"]


def test_only_last_answers_are_labels_where_asked(chat_base, tmp_path):
    folder = prepared(chat_base, tmp_path, conversations(8), labels="argmax", turns="last")
    for i in range(len(corpus := load_corpus(folder, "train"))):
        mask = corpus[i].mask.tolist()
        assert sum(b > a for a, b in pairwise(mask)) == 1
        assert mask[-1] == 1


def long_questions(count):
    asked = [f"tell me in your own words number {i} why the {i} ships left harbour {i} at dawn" for i in range(count)]
    return [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "x"}]} for q in asked]


def test_rows_that_nearly_repeat_an_evaluation_question_are_dropped_or_reported(chat_base, tmp_path):
    rows = long_questions(40)
    questions = tmp_path / "question.jsonl"
    asked = rows[7]["conversations"][0]["value"]
    questions.write_text(json.dumps({"question_id": 81, "turns": [f"{asked.upper()}!", "and then?"]}))
    folder = prepared(chat_base, tmp_path, rows, keep_out=str(questions))
    (reject,) = read_jsonl(folder / "rejects.jsonl")
    assert reject["row"] == "7"
    assert "nearly question 0 of" in reject["reason"]

    held = read_jsonl(folder / "heldout.jsonl")[0]["turns"][0]
    echo = {"conversations": [{"from": "human", "value": f"Please, {held} :-)"}, {"from": "gpt", "value": "x"}]}
    echoes = [
        {"conversations": [{**turn, "value": turn["value"] + " " * i} for turn in echo["conversations"]]}
        for i in range(12)
    ]
    folder = prepared(chat_base, tmp_path, [*rows, *echoes])
    near = read_jsonl(folder / "near_duplicates.jsonl")
    assert len(near) == read_manifest(folder)["near_duplicates"] > 0
    assert all(held in row["asked"] for row in near)


def test_the_system_turn_does_not_decide_the_split(chat_base, tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "same"}, {"role": "user", "content": f"question {i}"}]}
        for i in range(40)
    ]
    manifest = read_manifest(prepared(chat_base, tmp_path, rows))
    assert manifest["heldout"] > 0
    assert manifest["dev"]["sequences"] > 1
    assert manifest["train"]["sequences"] > 10


BAD = (
    b'{"conversations": [{"from": "human", "value": "cut off\n',
    b'{"conversations": [{"from": "human", "value": "' + b"x" * 17_000_000 + b'"}]}\n',
    b'{"conversations": [{"from": "human", "value": "\xff\xfe"}]}\n',
    b'{"conversations": [{"from": "human", "value": NaN}]}\n',
    b"NaN\n",
    b"[" * 200_000 + b"\n",
    b'{"conversations": []}\n',
    b"[]\n",
)


def test_the_malformed_rows_of_a_file_are_counted_and_cost_no_other(chat_base, tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        for i, row in enumerate(conversations(24, turns=1)):
            stream.write(json.dumps(row).encode() + b"\n")
            stream.write(BAD[i // 3] if i % 3 == 0 else b"")
    options = {"kind": "sharegpt", "max_new_tokens": 4, "holdout": 0.3, "labels": "argmax"}
    folder = prepare(chat_base, DataConfig(path=str(path), **options), 0, tmp_path / "cache")
    manifest = read_manifest(folder)
    assert (manifest["read"], manifest["used"], manifest["rejected"]) == (32, 24, 8)
    reasons = [row["reason"] for row in read_jsonl(folder / "rejects.jsonl")]
    wanted = ("no JSON", "MiB", "not UTF-8", "but a float", "a float", "recursion", "no list under", "a list")
    for reason, want in zip(reasons, wanted, strict=True):
        assert want in reason


FILES = {
    "sharegpt_vicuna_805.json": ("sharegpt", 805),
    "gsm8k_train.jsonl": ("sharegpt", 7473),
    "tinystories_900.json": ("text", 900),
}


@pytest.mark.parametrize("name", FILES)
def test_real_files_prepare_with_every_row_accounted_for(stories_base, shared, tmp_path, name):
    kind, count = FILES[name]
    limit = None if kind == "text" else 300  # the given answers are read by the base: a few hundred say it all
    config = DataConfig(
        kind=kind,
        path=str(shared / "data" / name),
        labels="rewrite" if kind == "text" else "argmax",
        limit=limit,
        samples_per_text=1,
        max_new_tokens=2,
    )
    manifest = read_manifest(prepare(stories_base, config, 0, tmp_path))
    assert manifest["read"] == (limit or count)
    assert manifest["used"] + manifest["rejected"] == manifest["read"]


def test_of_generated_rows_none_is_held_out_since_the_questions_are_others(chat_base, tmp_path):
    config = DataConfig(kind="toy", limit=30, holdout=0.5, max_new_tokens=2)
    folder = prepare(chat_base, config, 0, tmp_path)
    manifest, asked = read_manifest(folder), {q["turns"][0] for q in read_jsonl(folder / "heldout.jsonl")}
    assert (manifest["heldout"], len(asked)) == (0, 80)
    assert manifest["dev"]["sequences"] > 2
    learnt = read_shards(config, 0)
    assert sum(len(shard.splits["train"]) + len(shard.splits["dev"]) for shard in learnt) == manifest["used"] == 30


@pytest.mark.parametrize("kept_out", [False, True])
def test_what_is_generated_otherwise_is_prepared_anew(chat_base, tmp_path, monkeypatch, kept_out):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["what is it?"]}')
    config = DataConfig(kind="prompts", keep_out=str(questions) if kept_out else None)
    before = prepared_folder(chat_base, config, 0, tmp_path)
    monkeypatch.setitem(GENERATED, "prompts", replace(GENERATED["prompts"], exchanges=(1,)))
    assert prepared_folder(chat_base, config, 0, tmp_path) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sharegpt", "path": ["a", "b"], "weights": [1.0]}, "one above 0 for each of 2"),
        ({"kind": "sharegpt", "path": "a", "weights": [0.0]}, "greater than 0"),
        ({"show": -1}, "show"),
        ({"shard_rows": 0}, "shard_rows"),
        ({"limit": 0}, "limit"),
        ({"kind": "novel"}, "should be 'toy', 'prompts', 'sharegpt', 'text' or 'mixed'"),
        ({"kind": "text"}, "needs data.path"),
        ({"kind": "prompts", "path": "x"}, "data=prompts generates its rows: data.path=x goes with data=sharegpt"),
        ({"kind": "text", "path": "x", "prompt_tokens": [9, 3]}, "prompt_tokens"),
        ({"holdout": 1.0}, "holdout"),
        ({"samples_per_text": 0}, "samples_per_text"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(DataConfig).validate_python(options)
