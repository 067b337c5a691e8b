"""`make ablation`, and the page that it ends with."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import ablation


def test_variants_stand_side_by_side_on_a_page():
    def counted(value):
        interval = [value - 0.1, value + 0.1]
        figures = {"tokens_per_step": value, "tokens_per_step_ci95": interval, "expected": value, "accepted": value}
        return {**figures, "right_at_depth": [value / 4] * 5}

    names = {"study-a<b>": 2.0, "study-c": 3.0}
    ways = {", no lookup, chain": 0.1, ", no lookup": 0.2, "": 0.3}
    found = {f"{name}{way}": counted(value + more) for name, value in names.items() for way, more in ways.items()}
    drafts = {name.removeprefix("study-"): ablation.drafts_of(name, found) for name in names}
    rows = [ablation.row(variant, 100, kinds.values()) for variant, kinds in drafts.items()]
    html = ablation.comparison("10 minutes each", drafts, (("variant", "steps"), rows))
    for shown in ("a&lt;b&gt;", "2.10 [2.00, 2.20]", "3.30 [3.20, 3.40]", "10 minutes each", "chain", "N=32, lookup"):
        assert shown in html
    assert "a<b>" not in html
    assert html.count('class="share"') == 2 * 3 * 5


@pytest.mark.slow
def test_ways_of_drafting_run_by_name_with_the_defaults_head(tmp_path, monkeypatch):
    only = "adaedl,mcsd"
    words = ["--hours", "0.0002", "--questions", "2", "--only", only, "--out", tmp_path, "experiment=smoke"]
    folders = [f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache"]
    monkeypatch.setattr(sys, "argv", [ablation.__file__, *map(str, words), *folders])

    def quick(words, **_):
        return run([*words[1:], *(["--tokens", 12] if words[1].name == "drafts.py" else [])], cwd=tmp_path)

    monkeypatch.setattr(ablation.subprocess, "run", quick)
    monkeypatch.setattr(ablation, "SETTLED", 4)
    ablation.main()
    report = (tmp_path / "ablation.md").read_text()
    heads = {line.split("|")[1].strip() for line in report.splitlines() if line.startswith("|")}
    assert {"default", "tree", "adaedl", "mcsd", "prompt lookup"} <= heads
    assert report.count("in distribution") == 1
    assert "Temperature 0" in report
    assert "Temperature 1" in report


def test_a_name_that_is_none_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--only", "medusa,madusa", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"madusa.*choose of .*coupled"):
        ablation.main()


def test_steps_are_kept_with_the_minutes_that_they_take(tmp_path, monkeypatch):
    def study(hours, only="default,medusa"):
        given = SimpleNamespace(name="study", only=only, hours=hours)
        return ablation.Study(given, [f"runs_dir={tmp_path}"])

    def probed(study, variant, options):
        (tmp_path / f"{study.name(variant)}-probe").mkdir()
        rows = [json.dumps({"step": step, "perf/step_seconds": 0.5}) for step in (1, 60)]
        (tmp_path / f"{study.name(variant)}-probe" / "metrics.jsonl").write_text("\n".join(rows))

    monkeypatch.setattr(ablation.Study, "run", probed)
    assert study(2).steps("medusa") == 7200
    assert study(2).steps("medusa") == 7200  # not timed again: the folder is there
    for hours, only in ((1, "default,medusa"), (2, "medusa")):
        with pytest.raises(SystemExit, match=r"study-medusa was given 60 minutes, .*give another --name"):
            study(hours, only)
