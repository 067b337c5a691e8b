import json

import numpy as np
import pytest
import torch
from bases import write_base

from ctcdraft.eval import run as runner
from ctcdraft.eval.bench import BenchConfig, Question, load_questions
from ctcdraft.eval.evaluate import evaluate, reusable
from ctcdraft.eval.report import report
from ctcdraft.eval.results import aggregate
from ctcdraft.eval.run import Answered, Divergence, run
from ctcdraft.launch.stages import exit_code
from ctcdraft.model import Decoder, DraftConfig, HeadConfig, build_head, export_head, load_base

DRAFT = DraftConfig("tree", 8)
TRAINING = {"objective": "prefix_ctc", "step": 1, "tokens": 1, "simulated": 1.0}


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("eval") / "b", eos_token_id=1, initializer_range=0.05)))


@pytest.fixture(scope="module")
def head_folder(chat_base, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("head") / "head"
    export_head(build_head(HeadConfig(slots=4, width=32, mixer_width=16), 32), chat_base, folder, TRAINING)
    return folder


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"question_id": 80 + i, "category": f"cat{i % 2}", "turns": [f"ask {i}", "and then?"]} for i in range(5)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_results_hold_every_field_of_the_design(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, max_new_tokens=12)
    folder = tmp_path / "eval" / "mt_bench"
    results = evaluate(chat_base, head_folder, DRAFT, bench, folder, data_folder=None, seed=0)
    assert results == json.loads((folder / "results.json").read_text())
    fields = "bench base head decoder temperature seed device versions lossless questions tokens steps tokens_per_step"
    fields += " tokens_per_second speedup identical accepted_by_depth calibration time_share per_category"
    assert set(fields.split()) <= set(results)
    assert set(results["tokens_per_second"]) >= {"speculative", "vanilla"}
    assert set(results["speedup"]) == {"ratio_of_means", "ci95"}
    assert results["identical"] == {"compared": 10, "identical": 10, "ties": [], "divergences": []}
    assert set(results["time_share"]) == {"verify", "draft", "tree", "other"}
    assert abs(sum(results["time_share"].values()) - 1) < 1e-9
    assert set(results["per_category"]) == {"cat0", "cat1"}
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [len(answer["answers"]) for answer in answers] == [2] * 5
    for name in ("report.md", "accepted_by_depth.png", "by_category.png", "calibration.png"):
        assert (folder / name).stat().st_size > 100
    assert "10 of 10" in (folder / "report.md").read_text()


def test_the_first_answer_is_fed_back(chat_base):
    question = Question("1", "chat", ("ask", "again"))
    prompts = question.prompts(chat_base)
    first = next(prompts)
    answer = chat_base.tokenizer("xyz").input_ids
    second = prompts.send([*answer, 1])
    assert chat_base.tokenizer.decode(second) == "<u>ask<a>xyz</s><u>again<a>"
    assert second[: len(first)] == first


def test_the_same_evaluation_is_reused_and_another_is_not(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=4)
    folder = tmp_path / "e"
    results = evaluate(chat_base, head_folder, DRAFT, bench, folder, data_folder=None, seed=0)
    assert reusable(folder, chat_base, head_folder, DRAFT, bench, 0) == results
    assert reusable(folder, chat_base, head_folder, DraftConfig("chain", 4), bench, 0) is None
    assert reusable(folder, chat_base, head_folder, DRAFT, bench, 1) is None


def test_a_wrong_token_is_seen_and_fails_the_evaluation(chat_base, questions, monkeypatch):
    config = BenchConfig("mt_bench", questions, max_new_tokens=12)
    broken = Decoder(chat_base)
    honest = broken.generate

    def shifted(prompt, limit):
        out = honest(prompt, limit)
        out.tokens[3] = (out.tokens[3] + 1) % 260
        return out

    monkeypatch.setattr(broken, "generate", shifted)
    answers = run(chat_base, broken, load_questions(config, chat_base, None, 0), config)
    results = aggregate(answers, 0) | {"dtype": "float32"}
    assert len(results["identical"]["divergences"]) == 10
    assert results["identical"]["identical"] == 0
    first = results["identical"]["divergences"][0]
    assert first["position"] == 3
    assert first["top2_gap"] > 0
    assert exit_code(results) == 1
    assert exit_code(results | {"dtype": "bfloat16"}) == 0


def test_ties_are_listed_apart_and_do_not_fail():
    answer = Answered(Question("7", "chat", ("x",)), turns=1, tokens=5, grown=4, steps=2, accepted=[1, 1])
    answer.expected, answer.plain_seconds, answer.speculative_seconds = [1.0, 1.5], 1.0, 0.5
    answer.seconds["whole"] = 0.5
    answer.divergences = [Divergence("7", 0, 2, 5e-6)]
    results = aggregate([answer], 0) | {"dtype": "float32"}
    assert len(results["identical"]["ties"]) == 1
    assert results["identical"]["divergences"] == []
    assert results["identical"]["identical"] == 0
    assert exit_code(results) == 0


def answered(tokens, steps, fast, plain, accepted, expected, category="a"):
    out = Answered(Question("q", category, ("x",)), 1, tokens, steps, fast, plain, accepted, expected)
    out.grown = tokens - 1
    out.seconds["whole"] = fast
    out.seconds["verify"] = fast / 2
    return out


def test_figures_are_what_their_names_say():
    answers = [
        answered(11, 5, 1.0, 2.0, [1, 2, 0, 1, 1], [1.0, 2.0, 0.5, 1.0, 0.5]),
        answered(21, 5, 1.0, 3.0, [3, 3, 3, 3, 3], [2.0, 3.0, 3.0, 3.0, 4.0], "b"),
    ]
    results = aggregate(answers, 0)
    assert results["tokens_per_step"] == 3.0  # (10 + 20) / 10
    assert results["tokens_per_step_mean_over_questions"] == 3.0
    assert results["tokens_per_second"] == {"speculative": 16.0, "vanilla": 6.25}
    assert results["speedup"]["ratio_of_means"] == 16 / 6.25
    assert results["accepted_by_depth"] == [0.9, 0.6, 0.5]
    assert results["calibration"]["expected"] == 2.0
    assert results["calibration"]["accepted"] == 2.0
    assert results["time_share"]["verify"] == 0.5
    low, high = results["tokens_per_step_ci95"]
    assert low <= 3.0 <= high
    assert results["per_category"]["b"]["tokens_per_step"] == 4.0


def test_a_prompt_that_fills_the_context_is_skipped_with_its_reason(chat_base, questions, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"turns": ["x" * 600]}, {"turns": ["short", "y" * 600]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = BenchConfig("mt_bench", str(path), max_new_tokens=4, warmups=0)
    results = aggregate(run(chat_base, Decoder(chat_base), load_questions(config, chat_base, None, 0), config), 0)
    assert results["questions"] == 1
    assert [s["question"] for s in results["skipped"]] == ["0", "1"]
    assert "turn 2 has" in results["skipped"][1]["reason"]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match="no question could be decoded"):
        run(chat_base, Decoder(chat_base), load_questions(config, chat_base, None, 0), config)


def test_texts_give_prompts_of_the_asked_lengths(chat_base, tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["abcdefghijklmnopqrstuvwxyz" * 3] * 10))
    config = BenchConfig("text", str(path), questions=6, prompt_tokens=[5, 9])
    found = load_questions(config, chat_base, None, 0)
    assert len(found) == 6
    assert all(5 <= len(q.prompt) <= 9 for q in found)
    assert [q.prompt for q in found] == [q.prompt for q in load_questions(config, chat_base, None, 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "x"}', "row 0 has no list of 'turns'"),
        ('{"turns": []}', "row 0 has no list of 'turns'"),
        ('{"turns": ["a", 5]}', "row 0 has no list of 'turns'"),
        ("not json", "row 0 has no list of 'turns'"),
        ("", "is empty"),
    ],
)
def test_bad_questions_are_refused(chat_base, tmp_path, content, message):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_questions(BenchConfig("mt_bench", str(path)), chat_base, None, 0)


def test_heldout_needs_the_prepared_data(chat_base, tmp_path):
    with pytest.raises(ValueError, match="prepared data, which is gone"):
        load_questions(BenchConfig("heldout"), chat_base, tmp_path, 0)


def test_plain_and_speculative_take_turns_at_going_first(chat_base, questions, monkeypatch):
    config = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=3, warmups=0)
    order = []
    honest = runner._timed
    monkeypatch.setattr(runner, "_timed", lambda d, *rest: order.append(d.head is not None) or honest(d, *rest))
    head = build_head(HeadConfig(slots=2, width=32, mixer_width=16), 32)
    run(chat_base, Decoder(chat_base, head, DRAFT), load_questions(config, chat_base, None, 0), config)
    assert order == [False, True, False, True, True, False, True, False]
    assert np.mean(order) == 0.5


def test_the_report_names_divergences(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=4)
    results = evaluate(chat_base, head_folder, DRAFT, bench, tmp_path / "e", data_folder=None, seed=0)
    results["identical"]["divergences"] = [{"question": "81", "turn": 0, "position": 2, "top2_gap": 0.25}]
    text = report(results)
    assert "Divergences from plain decoding" in text
    assert "1 DIFFER" in text
