"""What is counted along the base's own answers is what decoding comes to."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import export_random_heads

from ctcdraft.eval.bench import BenchConfig, Question, load_questions
from ctcdraft.eval.count import count, own_answers
from ctcdraft.eval.evaluate import LOOKUP_ALONE, Measurement, evaluate
from ctcdraft.eval.report import figure_rows, markdown_table
from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.decode import generate

BENCH = BenchConfig("toy", questions=6, max_new_tokens=24, warmups=0)
DRAFT = DraftConfig("tree", 6, budget="fixed")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("count") / "b", eos_token_id=1, initializer_range=0.1)
    return load_base(str(folder), dtype="fp64")


@pytest.fixture(scope="module")
def heads(base, tmp_path_factory):
    return export_random_heads(base, tmp_path_factory.mktemp("heads"), "a", "b")


@pytest.mark.slow
def test_a_count_is_what_decoding_gives(base, heads, tmp_path):
    measurement = Measurement(base, DRAFT, BENCH)
    counted = count(measurement, heads, tmp_path / "count", tmp_path / "cache").results
    (decoded, bare) = (
        evaluate(Measurement(base, draft, BENCH), heads, tmp_path / draft.kind).results["temperatures"][0]["heads"]
        for draft in (DRAFT, DraftConfig("chain", 6, budget="fixed", prompt_lookup=0))
    )
    for name in (*heads, LOOKUP_ALONE):
        for figure in ("tokens_per_step", "tokens_per_step_ci95"):
            assert counted["drafts"][name][figure] == decoded[name][figure]
    for name in heads:
        shown = counted["drafts"][name]
        assert shown["expected"] == pytest.approx(decoded[name]["calibration"]["expected"])
        assert shown["accepted"] == pytest.approx(decoded[name]["calibration"]["accepted"])
        assert shown["accepted_by_source"] == pytest.approx(decoded[name]["accepted_by_source"])
        assert counted["drafts"][f"{name}, no lookup, chain"]["tokens_per_step"] == bare[name]["tokens_per_step"]
    assert counted["drafts"][LOOKUP_ALONE]["accepted"] > 0
    assert json.loads((tmp_path / "count" / "results.json").read_text())["drafts"] == counted["drafts"]
    assert markdown_table(*figure_rows(counted)[0]) in (tmp_path / "count" / "report.md").read_text()


def test_answers_are_those_of_plain_decoding_and_are_asked_for_once(base, tmp_path, monkeypatch):
    questions = load_questions(BENCH, base, None, 0)
    told = own_answers(base, questions, 24, tmp_path)
    for question, turns in zip(questions, told, strict=True):
        answers = []
        for known in turns:
            prompt = question.prompt_after(base, answers)
            ids = torch.tensor([prompt])
            want = base.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=[1]
            )[0]
            assert known.tokens.tolist() == want.tolist()
            assert known.answered.sum() == len(want) - len(prompt)
            answers.append(want[len(prompt) :].tolist())
        assert len(turns) == len(question.turns)
    monkeypatch.setattr(generate, "continue_all", lambda base, waiting, rows: iter(()))  # asked nothing more
    again = own_answers(base, questions, 24, tmp_path)
    assert [[k.tokens.tolist() for k in turns] for turns in again] == [[k.tokens.tolist() for k in t] for t in told]


@torch.no_grad()
def test_a_fine_tune_with_the_same_lm_head_and_tokenizer_has_answers_of_its_own(base, tmp_path):
    tuned = load_base(base.path, dtype="fp64")
    tuned.decoder.layers[0].mlp.up_proj.weight[0, 0] += 1
    for number, asked in enumerate((base, load_base(base.path, dtype="fp64"), tuned)):
        own_answers(asked, [Question("1", "x", prompt=(5, 6))], 3, tmp_path)
        assert len([*tmp_path.glob("answers-*")]) == (2 if number == 2 else 1)


def test_an_answer_ends_where_decoding_ends_it(base, tmp_path):
    """At a stop string, as those of humaneval on a base without a chat template."""
    prompt, plain = (5, 6, 7), Decoder(base)
    stop = plain.generate(prompt, 24).text[9:11]
    question = Question("1", "humaneval", prompt=prompt, stop=(stop,))
    want = plain.generate(prompt, 24, stop=[stop])
    assert want.finish == "stop"
    ((known,),) = own_answers(base, [question], 24, tmp_path)
    assert known.tokens[known.answered].tolist() == want.tokens
    assert len(want.tokens) < 24


def test_sampled_answers_follow_the_seed_and_greedy_ones_do_not(base, tmp_path):
    asked = [Question("1", "x", prompt=(5, 6, 7))]
    for temperature, distinct in ((1.0, 3), (0.0, 1)):
        found = [own_answers(base, asked, 24, tmp_path, temperature, seed)[0][0] for seed in range(3)]
        assert len({tuple(known.tokens) for known in found}) == distinct
        assert len({known.seed for known in found}) == distinct


def test_a_prompt_that_fills_the_context_has_no_answer(base, tmp_path):
    questions = [Question("long", "x", prompt=tuple([5] * base.context_length)), Question("short", "x", prompt=(5, 6))]
    long, short = own_answers(base, questions, 3, tmp_path)
    assert long == []
    assert np.flatnonzero(short[0].answered)[0] == 2


def test_where_no_prompt_fits_nothing_is_counted(base, heads, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["ab" * base.context_length]}))
    measurement = Measurement(base, DRAFT, BenchConfig("mt_bench", str(questions), max_new_tokens=8))
    with pytest.raises(ValueError, match="no question could be counted"):
        count(measurement, heads, tmp_path / "count", tmp_path / "cache")
    assert not (tmp_path / "count").exists()


@pytest.mark.parametrize(
    ("temperatures", "draft", "words"),
    [
        ([0.0, 1.0], {}, "count=true counts at one temperature"),
        ([0.0], {"stop": "adaedl"}, "draft.stop=adaedl goes by what was decoded"),
        ([1.0], {"graft": ["phrases"]}, "draft.graft=.* goes by what was decoded"),
    ],
)
def test_what_only_decoding_can_tell_is_not_counted(base, heads, tmp_path, temperatures, draft, words):
    bench = BenchConfig("toy", temperatures=temperatures)
    with pytest.raises(ValueError, match=words):
        count(Measurement(base, replace(DRAFT, **draft), bench), heads, tmp_path / "c", tmp_path)
    assert not (tmp_path / "c").exists()


def test_questions_without_an_answer_are_not_counted(base, heads, tmp_path):
    turns = ["hello", "ab" * base.context_length]
    rows = [{"question_id": number, "category": "x", "turns": [turn]} for number, turn in enumerate(turns)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bench = BenchConfig("mt_bench", str(tmp_path / "q.jsonl"), max_new_tokens=8)
    found = count(Measurement(base, DRAFT, bench), {"a": heads["a"]}, tmp_path / "count", tmp_path / "cache")
    assert found.results["questions"] == 1


def test_a_turn_that_the_template_refuses_is_not_counted_nor_those_behind_it(base, monkeypatch, tmp_path):
    template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(base.tokenizer, "chat_template", template)
    asked = [Question("a", "x", turns=("one", "two", "three")), Question("b", "x", turns=("one",))]
    assert [len(known) for known in own_answers(base, asked, 4, tmp_path)] == [1, 1]
