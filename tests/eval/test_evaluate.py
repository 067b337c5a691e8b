import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bases import write_base
from drafting import TRAINING, export_random_heads

from ctcdraft.eval import evaluate as evaluation
from ctcdraft.eval import run as runner
from ctcdraft.eval.bench import BenchConfig, Question, Setting, load_questions
from ctcdraft.eval.control import Divergence
from ctcdraft.eval.evaluate import Evaluated, Measurement, evaluate
from ctcdraft.eval.report import figures, report
from ctcdraft.eval.results import LOOKUP_ALONE, aggregate, measured, of_one_head
from ctcdraft.eval.run import Turn, balanced_orders, run
from ctcdraft.model import Decoder, DraftConfig, export_head, load_base, load_head
from ctcdraft.model.decode.decoder import Generation
from ctcdraft.model.heads import CtcConfig, head_on

DRAFT = DraftConfig("tree", 8, budget="fixed")


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("eval") / "b", eos_token_id=1, initializer_range=0.05)))


@pytest.fixture(scope="module")
def head_folder(chat_base, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("head") / "head"
    export_head(head_on(chat_base, CtcConfig(slots=4)), chat_base, folder, TRAINING)
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
    results = evaluate(Measurement(chat_base, DRAFT, bench), {"": head_folder}, folder).results
    assert results == json.loads((folder / "results.json").read_text())
    fields = "bench base head decoder temperature seed device versions lossless questions tokens steps tokens_per_step"
    fields += " tokens_per_second speedup identical accepted_by_depth calibration time_share per_category"
    assert set(fields.split()) <= set(results)
    assert set(results["tokens_per_second"]) >= {"speculative", "vanilla"}
    assert set(results["speedup"]) == {"ratio_of_means", "ci95"}
    assert results["identical"] == {
        "compared": 10,
        "identical": 10,
        "beyond_bound": 0,
        "divergences": [],
        "same_shape": None,
    }
    assert set(results["time_share"]) == {"verify", "draft", "tree", "other"}
    assert abs(sum(results["time_share"].values()) - 1) < 1e-9
    assert set(results["per_category"]) == {"cat0", "cat1"}
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [len(answer["answers"]) for answer in answers] == [2] * 5
    assert sum(len(steps) for answer in answers for steps in answer["accepted"]) == results["steps"]
    for name in (
        "report.md",
        "report.html",
        "accepted_by_depth.png",
        "by_category.png",
        "calibration.png",
        "heads.png",
    ):
        assert (folder / name).stat().st_size > 100
    text = (folder / "report.md").read_text()
    assert "10 of 10" in text
    assert "| prompt lookup alone" in text
    alone = results["prompt_lookup_alone"]
    assert alone["identical"]["identical"] == 10
    assert alone["tokens_per_step"] >= 1.0
    assert set(results["accepted_by_source"]) == {"head", "lookup", "both"}


def test_the_first_answer_is_fed_back(chat_base):
    question = Question("1", "chat", ("ask", "again"))
    first = question.prompt_after(chat_base)
    answer = chat_base.tokenizer("xyz").input_ids
    second = question.prompt_after(chat_base, [[*answer, 1]])
    assert chat_base.tokenizer.decode(second) == "<u>ask<a>xyz</s><u>again<a>"
    assert second[: len(first)] == first
    assert question.asks == 2


@pytest.mark.slow
def test_the_same_evaluation_is_reused_and_another_is_kept_beside_it(
    chat_base, head_folder, questions, tmp_path, monkeypatch
):
    bench = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=4)
    folder = tmp_path / "eval" / "mt_bench"
    chain = DraftConfig("chain", 4, budget="fixed")

    def found(draft, seed=0):
        return evaluate(Measurement(chat_base, draft, bench, seed=seed), {"": head_folder}, folder)

    def is_known(draft, seed=0):
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "run", Mock(side_effect=ValueError("it is decoded")))
            try:
                return found(draft, seed).reused
            except ValueError:
                return False

    first = found(DRAFT)
    assert not first.reused
    assert found(DRAFT) == Evaluated(first.results, folder, reused=True)
    assert not is_known(chain)
    assert not is_known(DRAFT, seed=1)
    second = found(chain).results
    assert json.loads((folder / "results.json").read_text()) == second
    assert {path.name for path in folder.parent.iterdir()} == {"mt_bench", f"mt_bench-{first.results['setting']}"}
    shutil.copytree(folder, folder.with_name(f"mt_bench-{second['setting']}"))  # by hand: it is in nobody's way
    assert found(DRAFT).results == first.results  # and is the latest again
    assert json.loads((folder / "results.json").read_text()) == first.results
    assert {path.name for path in folder.parent.iterdir()} == {"mt_bench", f"mt_bench-{second['setting']}"}
    changed = tmp_path / "questions.jsonl"
    changed.write_text(json.dumps({"turns": ["another question"]}))
    assert str(changed) == questions
    assert not is_known(DRAFT)
    assert json.loads((folder / "results.json").read_text()) == first.results  # what failed has left nothing
    assert len([*folder.parent.iterdir()]) == 2


def test_an_evaluation_that_was_cut_off_decodes_what_is_left(chat_base, head_folder, questions, tmp_path, monkeypatch):
    config = BenchConfig("mt_bench", questions, questions=3, max_new_tokens=3, warmups=0)
    measurement, folder = Measurement(chat_base, DRAFT, config), tmp_path / "eval" / "mt_bench"
    calls, honest = [], runner._timed

    def timed(*given):
        calls.append(given)
        if len(calls) == 8:  # in the second question: two turns by three sides each
            raise KeyboardInterrupt
        return honest(*given)

    monkeypatch.setattr(runner, "_timed", timed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(measurement, {"": head_folder}, folder)
    (kept,) = folder.parent.iterdir()
    with kept.open("a") as stream:
        stream.write('["1 0", "half of a li')
    found = evaluate(measurement, {"": head_folder}, folder)
    assert len(calls) == 8 + 12
    assert [path.name for path in folder.parent.iterdir()] == ["mt_bench"]
    whole = evaluate(measurement, {"": head_folder}, tmp_path / "another" / "mt_bench")
    assert len(calls) == 8 + 12 + 18
    assert whole.results["identical"] == found.results["identical"]
    assert whole.results["questions"] == found.results["questions"] == 3
    rows = [(one.folder / "answers.jsonl").read_text().splitlines() for one in (whole, found)]
    assert [json.loads(row)["answers"] for row in rows[0]] == [json.loads(row)["answers"] for row in rows[1]]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp32", {}), ("bf16", {}), ("fp32", {"kind": "ranked", "proposal": "sampled", "prompt_lookup": 0})],
)
def test_what_is_kept_of_a_question_is_all_of_it(chat_base, questions, dtype, options, monkeypatch):
    """Turns, divergences and trees come back from their file as they were."""
    base = load_base(chat_base.path, dtype)
    config = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=6, warmups=0, temperatures=[0, 1], seeds=1)
    sides = {"": Decoder(base, head_on(base, CtcConfig(slots=3)), replace(DRAFT, **options)), "x": shifting(base)}
    loaded, kept = load_questions(config, base, None, 0), {}
    honest, decoded = runner._decoded, []
    monkeypatch.setattr(runner, "_decoded", lambda *given: decoded.append(honest(*given)) or decoded[-1])
    found = run(base, sides, loaded, config, 0, kept)
    for label, turns in found.items():
        made = [turn for one in decoded for turn in one[label]]
        assert repr([bare(turn) for turn in turns]) == repr([bare(turn) for turn in made])
        assert all(a.question is b.question for a, b in zip(turns, made, strict=True))
    assert any(turn.drafted.trees for turn in found[""])
    assert any(turn.divergence for turn in found["x"])
    again = run(base, sides, loaded, config, 0, kept)
    assert len(decoded) == 4
    assert repr(again) == repr(found)


def bare(turn):
    """With times in a plain dict, and without what draws a node's children, which only verifying needs."""
    trees = [(replace(tree, proposals=None), path) for tree, path in turn.drafted.trees or []]
    drafted = replace(turn.drafted, trees=trees, seconds=dict(turn.drafted.seconds))
    return replace(turn, drafted=drafted, plain=replace(turn.plain, seconds=dict(turn.plain.seconds)))


def test_where_no_question_can_be_decoded_nothing_is_left(chat_base, head_folder, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"turns": ["x" * 600]}))
    measurement = Measurement(chat_base, DRAFT, BenchConfig("mt_bench", str(path), max_new_tokens=4, warmups=0))
    with pytest.raises(ValueError, match="no question could be decoded"):
        evaluate(measurement, {"": head_folder}, tmp_path / "eval" / "mt_bench")
    assert not [*(tmp_path / "eval").iterdir()]


def test_where_no_report_can_be_made_what_was_decoded_is_kept(chat_base, head_folder, questions, tmp_path, monkeypatch):
    config = BenchConfig("mt_bench", questions, questions=1, max_new_tokens=3, warmups=0)
    measurement, folder = Measurement(chat_base, DRAFT, config), tmp_path / "eval" / "mt_bench"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "draw", Mock(side_effect=ValueError("no such font")))
        with pytest.raises(ValueError, match="no such font"):
            evaluate(measurement, {"": head_folder}, folder)
    monkeypatch.setattr(runner, "_timed", None)
    assert evaluate(measurement, {"": head_folder}, folder).results["questions"] == 1
    assert [path.name for path in folder.parent.iterdir()] == ["mt_bench"]


def test_where_nothing_can_be_written_nothing_is_decoded(chat_base, head_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "run", None)
    (tmp_path / "eval").touch()
    with pytest.raises(FileExistsError):
        evaluate(Measurement(chat_base, DRAFT, BenchConfig("toy")), {"": head_folder}, tmp_path / "eval" / "toy")


def test_a_base_with_other_weights_or_another_template_is_measured_anew(head_folder, chat_base):
    """Of one name, tokenizer and LM head, so that heads of the one draft for the other."""
    settings = []
    for name in ("as it is", "fine-tuned", "another template"):
        base = load_base(chat_base.path, template="vicuna" if "template" in name else None)
        if "tuned" in name:
            base.decoder.layers[0].mlp.up_proj.weight.mul_(1.1)
        assert base.identity == chat_base.identity
        settings.append(Measurement(base, DRAFT, BenchConfig("toy")).setting({"": head_folder}))
    assert all(one != other for one, other in itertools.combinations(settings, 2))


def shifting(base, place=3):
    """A decoder that puts out a wrong token at one place of every answer."""
    broken = Decoder(base)
    honest = broken.generate

    def generate(prompt, limit, **settings):
        out = honest(prompt, limit, **settings)
        out.tokens[place] = (out.tokens[place] + 1) % 260
        return out

    broken.generate = generate
    return broken


def results_of(turns):
    """Of an evaluation of one head with these turns, beside itself as its control."""
    found = of_one_head(measured({"": turns, LOOKUP_ALONE: turns}, 0))
    return {**found, "head": {"kind": "ctc"}}


def exit_code(results):
    return Evaluated(results, Path()).exit_code


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_token_is_seen_and_fails_the_evaluation(chat_base, questions, dtype):
    base = load_base(chat_base.path, dtype)
    config = BenchConfig("mt_bench", questions, max_new_tokens=12, temperatures=[0.0, 1.0], seeds=2)
    loaded, seed = load_questions(config, base, None, 0), 2  # of which no sample is shorter than the place
    results = results_of(run(base, {"": shifting(base)}, loaded, config, seed)[""])
    for block, turns in ((results, 10), (results["other_temperatures"][0], 20)):
        assert len(block["identical"]["divergences"]) == block["identical"]["compared"] == turns
        assert block["identical"]["identical"] == 0
        asked = itertools.product([q.id for q in loaded], config.settings(seed), (0, 1))
        where = [(q, s.temperature, s.seed, turn) for q, s, turn in asked if s.temperature == block["temperature"]]
        keys = ("question", "temperature", "seed", "turn")
        assert [tuple(found[key] for key in keys) for found in block["identical"]["divergences"]] == where
        for found in block["identical"]["divergences"]:
            assert found["position"] == 3
            assert 0 <= found["top2_gap"] <= found["other_gap"]
            assert found["within_bound"] == (found["other_gap"] <= found["bound"])
        assert not all(found["within_bound"] for found in block["identical"]["divergences"])
    assert exit_code(results) == 1
    honest = results_of(run(base, {"": Decoder(base)}, loaded, config, seed)[""])
    assert exit_code(honest) == 0


def test_samples_of_another_seed_are_seen(chat_base, questions):
    config = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=12, temperatures=[0.0, 1.0], seeds=1)
    other = Decoder(chat_base)
    honest = other.generate
    other.generate = lambda prompt, limit, seed=0, **settings: honest(prompt, limit, seed=seed + 1, **settings)
    results = results_of(run(chat_base, {"": other}, load_questions(config, chat_base, None, 0), config)[""])
    assert results["identical"]["divergences"] == []  # greedy decoding knows no seed
    (warm,) = results["other_temperatures"]
    assert warm["identical"]["identical"] == 0
    assert exit_code(results) == 1


def test_an_answer_that_just_ends_early_fails_the_evaluation(chat_base, questions):
    config = BenchConfig("mt_bench", questions, max_new_tokens=12)
    broken = Decoder(chat_base)
    honest = broken.generate
    broken.generate = lambda prompt, limit, **settings: honest(prompt, limit - 2, **settings)
    results = results_of(run(chat_base, {"": broken}, load_questions(config, chat_base, None, 0), config)[""])
    assert {d["other_gap"] for d in results["identical"]["divergences"]} == {None}
    assert exit_code(results) == 1


def test_what_rounding_explains_is_listed_and_does_not_fail():
    drafted = Generation([0] * 5, steps=2, accepted=[1, 1], expected=[1.0, 1.5])
    gaps = dict.fromkeys(("top2_gap", "other_gap"), 5e-6)
    divergence = Divergence(2, **gaps, bound=1e-5, shape_change=1e-6, within_bound=True)
    question = Question("7", "chat", ("x",))
    results = results_of([Turn(question, drafted=drafted, seconds=0.5, plain_seconds=1.0, divergence=divergence)])
    assert [d["within_bound"] for d in results["identical"]["divergences"]] == [True]
    assert results["identical"]["identical"] == 0
    assert exit_code(results) == 0


def answered(tokens, steps, fast, plain, accepted, expected, *, nodes=(), question=None, setting=None):
    drafted = Generation([0] * tokens, steps=steps, accepted=accepted, expected=expected, nodes=list(nodes))
    drafted.seconds["verify"] = fast / 2
    question = question or Question("q", "a", ("x",))
    alone, setting = Generation([0] * tokens), setting or Setting()
    return Turn(question, setting, drafted=drafted, seconds=fast, plain=alone, plain_seconds=plain)


def test_figures_are_what_their_names_say():
    second = Question("r", "b", ("x",))
    answers = [
        answered(11, 5, 1.0, 2.0, [1, 2, 0, 1, 1], [1.0, 2.0, 0.5, 1.0, 0.5], nodes=[8, 4, 0, 8, 5]),
        answered(21, 5, 1.0, 3.0, [3] * 5, [2.0, 3.0, 3.0, 3.0, 4.0], nodes=[15] * 5, question=second),
    ]
    results = aggregate(answers, 0)
    assert results["tokens_per_step"] == 3.0  # (10 + 20) / 10
    assert results["tokens_per_second"] == {"speculative": 16.0, "vanilla": 6.25}
    assert results["speedup"]["ratio_of_means"] == 16 / 6.25
    results["tokens_per_second"]["generate"] = 5.0
    rows = figures({**results, "difference": None})
    assert rows["draft nodes per step"] == "10.0"
    assert rows["speedup / tokens per step"] == "0.85"  # 2.56 / 3
    assert results["accepted_by_depth"] == [0.9, 0.6, 0.5]
    assert results["calibration"]["expected"] == 2.0
    assert results["calibration"]["accepted"] == 2.0
    assert results["time_share"]["verify"] == 0.5
    low, high = results["tokens_per_step_ci95"]
    assert low <= 3.0 <= high
    assert results["per_category"]["b"]["tokens_per_step"] == 4.0


def test_temperatures_and_seeds_are_told_apart_and_pooled_by_question():
    first, second = Question("1", "a", ("x",)), Question("2", "a", ("y",))
    answers = []
    for question, scale in ((first, 1), (second, 2)):
        for temperature, seed, grown in ((0.0, 5, 8), (1.0, 5, 4), (1.0, 6, 6)):
            where = {"question": question, "setting": Setting(temperature, seed)}
            answers.append(answered(grown * scale + 1, 2, 1.0, 2.0, [scale, scale], [1.0, 1.0], **where))
    results = results_of(answers)
    assert (results["temperature"], results["seed"], results["questions"]) == (0.0, 5, 2)
    assert results["tokens_per_step"] == 6.0  # (8 + 16) / 4
    assert results["seeds"]["std"] is None
    (warm,) = results["other_temperatures"]
    assert (warm["temperature"], warm["questions"], warm["steps"]) == (1.0, 2, 8)
    assert warm["tokens_per_step"] == 3.75  # (4 + 6 + 8 + 12) / 8
    assert [(row["seed"], row["tokens_per_step"]) for row in warm["seeds"]["each"]] == [(5, 3.0), (6, 4.5)]
    assert warm["seeds"]["std"]["tokens_per_step"] == pytest.approx(1.5 / 2**0.5)
    assert warm["identical"]["compared"] == 4
    assert warm["tokens_per_second"]["vanilla"] == (12 / 4 + 22 / 4) / 2  # of each question, over its seeds


@pytest.mark.slow
def test_seeded_samples_equal_plain_ones_and_are_reported(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, max_new_tokens=12, temperatures=[1.0, 0.0])
    folder = tmp_path / "e"
    results = evaluate(Measurement(chat_base, DRAFT, bench, seed=4), {"": head_folder}, folder).results
    assert (results["temperature"], results["seed"]) == (1.0, 4)
    assert results["identical"]["compared"] == results["identical"]["identical"] == 30
    assert [row["seed"] for row in results["seeds"]["each"]] == [4, 5, 6]
    (greedy,) = results["other_temperatures"]
    assert greedy["identical"]["identical"] == 10
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    samples = [row["answers"][0] for row in rows if row["question_id"] == "80" and row["temperature"] == 1.0]
    assert len(set(samples)) == 3
    text = (folder / "report.md").read_text()
    assert all(f"| temperature {temperature} " in text for temperature in (0, 1))
    assert "| std of both over seeds" in text
    assert text.count("| identical to plain decoding") == 2
    assert "| draft tokens | ctc, temperature 1 | prompt lookup alone, temperature 1 | ctc, temperature 0 |" in text


def test_a_turn_that_the_template_refuses_is_skipped_with_its_reason(chat_base, monkeypatch):
    template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(chat_base.tokenizer, "chat_template", template)
    asked = [Question("a", "x", turns=("one", "two", "three")), Question("b", "x", turns=("one",))]
    turns = run(chat_base, {"": Decoder(chat_base)}, asked, BenchConfig("toy", max_new_tokens=4, warmups=1))[""]
    assert [(turn.question.id, turn.number, bool(turn.skipped)) for turn in turns] == [
        ("a", 0, False),
        ("a", 1, True),
        ("b", 0, False),
    ]
    assert "one turn" in turns[1].skipped


def test_a_prompt_that_fills_the_context_is_skipped_with_its_reason(chat_base, questions, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"turns": ["x" * 600]}, {"turns": ["short", "y" * 600]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = BenchConfig("mt_bench", str(path), max_new_tokens=4, warmups=0)
    answers = run(chat_base, {"": Decoder(chat_base)}, load_questions(config, chat_base, None, 0), config)[""]
    results = aggregate(answers, 0)
    assert results["questions"] == 1
    assert [s["question"] for s in results["skipped"]] == ["0", "1"]
    assert "turn 2 has" in results["skipped"][1]["reason"]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match="no question could be decoded: turn 1 has"):
        run(chat_base, {"": Decoder(chat_base)}, load_questions(config, chat_base, None, 0), config)


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
        ('{"text": "x"}', "row 0: no list under 'conversations' or 'messages', and no question"),
        ('{"turns": []}', "row 0: no list under 'conversations' or 'messages', and no question"),
        ('{"turns": ["a", 5]}', "row 0: turn 1 holds no text but a int"),
        ("not json", "row 0: no JSON"),
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
    with pytest.raises(ValueError, match="no run was chosen: take another"):
        load_questions(BenchConfig("heldout"), chat_base, None, 0)


def test_orders_are_balanced_over_questions_and_settings(chat_base, questions, monkeypatch):
    config = BenchConfig("mt_bench", questions, questions=3, max_new_tokens=3, warmups=0, temperatures=[0, 1], seeds=1)
    order = []
    honest = runner._timed
    monkeypatch.setattr(runner, "_timed", lambda d, *rest: order.append(names[d]) or honest(d, *rest))
    monkeypatch.setattr(runner, "Decoder", lambda base: plain)
    head = head_on(chat_base, CtcConfig(slots=2))
    plain, a, b = Decoder(chat_base), Decoder(chat_base, head, DRAFT), Decoder(chat_base, head, DRAFT)
    names = {plain: "p", a: "a", b: "b"}
    run(chat_base, {"a": a, "b": b}, load_questions(config, chat_base, None, 0), config)
    per_setting = ["".join(order[i : i + 6]) for i in range(0, len(order), 6)]  # two turns each
    assert per_setting == [side * 2 for side in ("pab", "abp", "abp", "bpa", "bpa", "bap")]


@pytest.mark.parametrize("count", range(1, 10))
def test_each_side_is_equally_often_in_each_place_and_behind_each_other(count):
    orders = balanced_orders(range(count))
    assert all(sorted(order) == [*range(count)] for order in orders)
    places = Counter(pair for order in orders for pair in enumerate(order))
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    times = len(orders) // count
    assert places == dict.fromkeys(itertools.product(range(count), repeat=2), times)
    assert behind == dict.fromkeys(itertools.permutations(range(count), 2), times)


def test_the_report_names_divergences_and_the_bound(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=4)
    results = evaluate(Measurement(chat_base, DRAFT, bench), {"": head_folder}, tmp_path / "e").results
    known = {"question": "81", "turn": 0, "position": 2, "temperature": 0.0, "seed": 0, "top2_gap": 0.25}
    gaps = {"other_gap": 0.25, "bound": 1e-5, "shape_change": 1e-6}
    results["identical"] |= {"identical": 3, "beyond_bound": 1}
    results["identical"]["divergences"] = [{**known, **gaps, "within_bound": False}]
    text = report(results)
    assert "Divergences from plain decoding" in text
    assert "Rounding may close a gap of 1e-05" in text
    assert "1 DIFFER" in text
    assert "BEYOND" in text


@pytest.mark.slow
def test_below_float32_the_report_has_the_control(chat_base, head_folder, questions, tmp_path):
    bench = BenchConfig("mt_bench", questions, questions=2, max_new_tokens=8)
    base = load_base(chat_base.path, "bf16")
    results = evaluate(Measurement(base, DRAFT, bench), {"": head_folder}, tmp_path / "e").results
    assert results["rounding_bound"] == "8 spacings of bfloat16 at the largest logit"
    control = results["identical"]["same_shape"]
    assert control["positions"] == results["tokens"] == 32
    (row,) = [
        line for line in report(results).splitlines() if line.startswith("| ctc, temperature 0 ") and " | 32 " in line
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    *counts, gap = control.values()
    assert cells[1:] == [*map(str, counts), f"{gap:.3g}", str(len(results["identical"]["divergences"])), "4"]


def test_a_questions_stop_strings_end_both_sides(chat_base, head_folder):
    base = chat_base
    prompt = tuple(base.tokenizer("abc").input_ids)
    whole = Decoder(base).generate(list(prompt), 30).text
    stop = whole[10:12]
    question = Question("1", "humaneval", prompt=prompt, stop=(stop,))
    decoder = Decoder(base, load_head(head_folder, base), DRAFT)
    (turn,) = run(base, {"": decoder}, [question], BenchConfig(max_new_tokens=30))[""]
    assert turn.plain.text == whole[: whole.index(stop)]
    assert len(turn.drafted.tokens) < 30
    assert turn.divergence is None


def test_names_of_others_break_no_table_of_the_report(chat_base, head_folder, tmp_path):
    row = {"question_id": "1", "category": "a|b\n<img src=x>", "turns": ["hello"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    bench = BenchConfig("mt_bench", str(tmp_path / "q.jsonl"), max_new_tokens=4)
    results = evaluate(Measurement(chat_base, DRAFT, bench), {"x|<y>": head_folder}, tmp_path / "e").results
    text = report(results)
    assert "| a\\|b &lt;img src=x> | x\\|&lt;y>, temperature 0 " in text
    assert "| temperature 0 " in text
    assert " | x\\|&lt;y> " in text
    assert "\n<img" not in text


@pytest.mark.slow
def test_several_heads_leave_one_comparison(chat_base, tmp_path):
    heads = export_random_heads(chat_base, tmp_path / "heads", "one", "two", "three")
    bench = BenchConfig("toy", questions=3, max_new_tokens=6, temperatures=[0.0, 1.0], seeds=2)
    folder = tmp_path / "eval" / "toy-heads"
    found = evaluate(Measurement(chat_base, DraftConfig("tree", 4, budget="fixed"), bench), heads, folder).results
    assert found == json.loads((folder / "results.json").read_text())
    assert list(found["heads"]) == ["one", "two", "three"]
    assert [block["temperature"] for block in found["temperatures"]] == [0.0, 1.0]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for block in found["temperatures"]:
        assert block["heads"]["one"]["difference"] is None
        assert set(block["heads"]["two"]["difference"]) == {"tokens_per_step", "speedup"}
        assert list(block["heads"]) == ["one", "two", "three", "prompt lookup alone"]
        alone = block["heads"]["prompt lookup alone"]
        assert alone["identical"]["compared"] == alone["identical"]["identical"] > 0
        assert alone["accepted_by_source"]["head"] == 0.0
        turns = 3 * 2 * (2 if block["temperature"] else 1)
        for label in heads:
            head, none = block["heads"][label], {"divergences": [], "same_shape": None}
            assert head["identical"] == {"compared": turns, "identical": turns, "beyond_bound": 0, **none}
            rows = [row for row in answers if (row["head"], row["temperature"]) == (label, block["temperature"])]
            assert head["tokens"] == sum(row["tokens"] for row in rows)
            assert head["tokens_per_step"] == sum(row["tokens"] - row["turns"] for row in rows) / head["steps"]
    assert (folder / "heads.png").stat().st_size > 1000
    report = (folder / "report.md").read_text()
    assert "| three" in report
    assert "| prompt lookup alone" in report
    assert "| temperature 1" in report
    assert "| draft tokens | one, temperature 0 | two, temperature 0 | three, temperature 0 |" in report
