"""Tokens that a tokenizer has and the base has no embedding for: a row that holds one is rejected, wherever it is."""

import json
import re
import warnings

import pytest
from bases import tiny_tokenizer, write_base

from ctcdraft.data.records import conversation_of
from ctcdraft.data.server import Answer
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import load_corpus, read_jsonl, read_manifest
from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.model import Decoder, load_base
from ctcdraft.train.prepare import DataConfig, prepare
from ctcdraft.train.regenerate import Dialogue

NEW = "<new>"
REASON = "token 260 ('<new>') is in b's tokenizer, but not among its 260 embeddings"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("unreadable") / "b", eos_token_id=1, initializer_range=0.05)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([NEW])
    tokenizer.save_pretrained(folder)
    return load_base(str(folder))


def chat(number, *, new=None):
    """Two turns; `new` says which of their four texts holds the token."""
    texts = [f"{'question' if i % 2 == 0 else 'answer'} {number} {NEW if i == new else ''}" for i in range(4)]
    return {
        "messages": [{"role": role, "content": t} for role, t in zip(("user", "assistant") * 2, texts, strict=True)]
    }


def prepared(base, tmp_path, rows, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    options = {"kind": "sharegpt", "max_new_tokens": 6, "holdout": 0.5, **options}
    folder = prepare(base, DataConfig(path=str(path), **options), 0, tmp_path / "cache")
    corpus, account = load_corpus(folder, "train"), read_manifest(folder)
    assert corpus.ids.max() < base.token_count
    assert account["used"] + account["rejected"] == account["read"] == len(rows)
    return folder, [row["reason"] for row in read_jsonl(folder / "rejects.jsonl")]


@pytest.mark.parametrize("labels", ["rewrite", "argmax", "given"])
def test_in_conversations_and_the_questions_held_out_from_them(base, tmp_path, labels):
    rows = [chat(i, new=0 if i % 2 else None) for i in range(40)]
    folder, reasons = prepared(base, tmp_path, rows, labels=labels)
    assert reasons == [REASON] * 20
    for question in load_questions(BenchConfig("heldout", questions=None), base, folder, 0):
        assert Decoder(base).generate(question.prompt_after(base), 2).tokens


def test_in_a_prompt_as_a_text_or_as_tokens(base):
    for prompt in (f"question {NEW}", base.tokenizer(f"question {NEW}").input_ids):
        with pytest.raises(ValueError, match=f"^the prompt cannot be read: {re.escape(REASON)}$"):
            Decoder(base).generate(prompt, 2)
    with pytest.raises(ValueError, match="a token below 0"):
        Decoder(base).generate([5, -1], 2)


def test_in_answers_and_in_later_questions(base, tmp_path):
    rows = [chat(i, new=3 if i % 2 else None) for i in range(40)]
    assert set(prepared(base, tmp_path, rows)[1]) == set()  # the base writes answers of its own
    _, reasons = prepared(base, tmp_path, rows, labels="given")
    assert 0 < len(reasons) <= 20
    assert set(reasons) == {REASON}
    folder, reasons = prepared(base, tmp_path, [chat(i, new=None if i % 2 else 2) for i in range(40)])
    assert set(reasons) == {REASON}  # of those held out; a conversation's first answer stays
    loaded = load_questions(BenchConfig("heldout", questions=None), base, folder, 0)
    assert not any(NEW in turn for question in loaded for turn in question.turns)


@pytest.mark.parametrize("labels", ["argmax", "given"])
def test_in_rows_of_tokens(base, tmp_path, labels):
    rows = [{"input_ids": [5, 6 + i, 7, 260 if i % 2 else 8, 9, 9], "loss_mask": [0, 0, 0, 0, 1, 1]} for i in range(40)]
    rows.append({"input_ids": [5, 900, 8], "loss_mask": [0, 1, 1]})
    folder, reasons = prepared(base, tmp_path, rows, labels=labels)
    assert reasons.count(REASON) == 20
    assert [r for r in reasons if r != REASON] in ([], ["token 900, but b knows 260"])
    assert load_questions(BenchConfig("heldout", questions=None), base, folder, 0)


def test_in_texts(base, tmp_path):
    rows = [f"{NEW if i % 2 else ''} {i} {'a text ' * 4}" for i in range(40)]
    folder, reasons = prepared(base, tmp_path, rows, kind="text", prompt_tokens=[20, 60], samples_per_text=1)
    assert reasons == [REASON] * 20
    load = BenchConfig("heldout", questions=None, prompt_tokens=[4, 20])
    assert all(max(question.prompt) < 260 for question in load_questions(load, base, folder, 0))


def test_in_a_servers_answer(base):
    dialogue = Dialogue(base, conversation_of(chat(0), "x"), 0.0, 0)
    assert dialogue.next_prompt()
    with pytest.raises(RowError) as refused:
        dialogue.answer_text(Answer({"role": "assistant", "content": f"so {NEW}"}, cut=False))
    assert str(refused.value) == REASON


@pytest.mark.parametrize("kind", ["mt_bench", "gsm8k", "humaneval", "text"])
def test_in_benchmarks(base, tmp_path, kind):
    words = [f"{'a question ' * 3}{i} {NEW if i == 2 else 'as before'} here" for i in range(6)]
    row = {"mt_bench": lambda w: {"turns": ["first", w]}, "gsm8k": lambda w: {"question": w},
           "humaneval": lambda w: {"prompt": w}, "text": lambda w: {"text": w}}[kind]  # fmt: skip
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row(word)) + "\n" for word in words))
    config = BenchConfig(kind, str(path), questions=None, prompt_tokens=[38, 38])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loaded = load_questions(config, base, None, 0)
    assert len(loaded) == 5
    assert [str(w.message) for w in seen] == [
        f"bench={kind}: 1 of 6 questions cannot be asked (2: {REASON}); they are left out"
    ]
    path.write_text(json.dumps(row(words[2])) + "\n")
    with pytest.raises(ValueError, match=r"1 of 1 questions cannot be asked \(0: token 260"):
        load_questions(config, base, None, 0)


def test_a_held_out_question_that_the_template_refuses_is_a_reject_too(tmp_path):
    picky = "{% if 'no' in messages[0]['content'] %}{{ raise_exception('not that') }}{% endif %}"
    template = picky + "{% for m in messages %}<u>{{ m['content'] }}</s>{% endfor %}<a>"
    base = load_base(str(write_base(tmp_path / "p", template=template, eos_token_id=1)))
    rows = [{"turns": [f"{'no' if i % 2 else 'yes'} {i}"]} for i in range(40)]
    folder, reasons = prepared(base, tmp_path, rows)
    assert reasons == ["the chat template refuses it: not that"] * 20
    assert load_questions(BenchConfig("heldout", questions=None), base, folder, 0)
