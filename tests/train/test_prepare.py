import json
from unittest.mock import Mock

import pytest
from bases import write_base

from ctcdraft.data.store import load_corpus, read_jsonl, read_manifest
from ctcdraft.model import Decoder, load_base
from ctcdraft.train import prepare as stage
from ctcdraft.train.prepare import DataConfig, prepare


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
    monkeypatch.setattr(stage, "rewrite", Mock(side_effect=AssertionError("generated again")))
    assert prepared(chat_base, tmp_path, conversations(8)) == folder
    monkeypatch.undo()
    assert prepared(chat_base, tmp_path, conversations(8), max_new_tokens=5) != folder
    assert prepared(load_base(str(base_folder)), tmp_path, conversations(8)) != folder


def test_an_interrupted_preparation_is_not_taken_for_one(chat_base, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "write_jsonl", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepared(chat_base, tmp_path, conversations(8))
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("data-*/manifest.json"))
    folder = prepared(chat_base, tmp_path, conversations(8))
    assert read_manifest(folder)["read"] == 8
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]


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
    folder = prepared(chat_base, tmp_path, conversations(8), regenerate=False)
    corpus = load_corpus(folder, "train")
    ids, mask, labels = (list(map(int, column)) for column in corpus[0])
    assert "gpt" in chat_base.tokenizer.decode(ids)
    at = mask.index(1) + 1
    assert Decoder(chat_base).generate(ids[:at], 1).tokens == [labels[at]]


def test_nothing_usable_is_an_error_that_names_a_reason(chat_base, tmp_path):
    with pytest.raises(ValueError, match=r"none gave a train sequence; 2 rejected .*an object is needed"):
        prepared(chat_base, tmp_path, [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "novel"}, "unknown"),
        ({"kind": "text"}, "needs data.path"),
        ({"kind": "text", "path": "x", "prompt_tokens": [9, 3]}, "prompt_tokens"),
        ({"holdout": 1.0}, "holdout"),
        ({"samples_per_text": 0}, "at least 1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)
