"""report.html in a real browser: what it shows is answers.jsonl, and other people's text does nothing but show."""

import json
import re
import shutil

import pytest
from bases import write_base
from drafting import export_random_heads

from ctcdraft.eval.bench import BenchConfig
from ctcdraft.eval.evaluate import Measurement, evaluate
from ctcdraft.eval.plots import draw, intervals, svgs
from ctcdraft.model import DraftConfig, load_base

pytestmark = pytest.mark.slow  # a browser
HIT = "document.documentElement.dataset.hit = 1"
EVIL = [
    f"<script>{HIT}</script>",
    f'</script><img src="http://127.0.0.1:9/x" onerror="{HIT}"><b>bold</b>',
    "{{ 7 * 7 }} ${7 * 7} & &amp; <!-- --> ]]>",
]
EVIL_CATEGORY = f"$x^</text></svg><img src=x onerror='{HIT}'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An evaluation of two heads whose questions attack the page."""
    root = tmp_path_factory.mktemp("page")
    base = load_base(str(write_base(root / "b", eos_token_id=1, initializer_range=0.05)))
    rows = [{"question_id": i, "category": EVIL_CATEGORY if i else "plain", "turns": [EVIL[i]]} for i in range(3)]
    rows += [{"question_id": 7 + i, "category": f"category {i}", "turns": ["ask", *["again"][i:]]} for i in range(7)]
    questions = root / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(row) for row in rows))
    bench = BenchConfig("mt_bench", str(questions), max_new_tokens=24, temperatures=[0.0, 1.0], seeds=1)
    heads = export_random_heads(base, root / "heads", "one", "<i>two</i>")
    evaluate(Measurement(base, DraftConfig("tree", 8, budget="fixed"), bench), heads, root / "eval")
    return root / "eval"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev has it)")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium)
        yield started
        started.close()


@pytest.fixture
def opened(browser, folder):
    """Opens the page at a width and in a colour scheme; whatever it complains of or asks for fails the test."""
    contexts, complaints, asked = [], [], []

    def at(width=1400, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((folder / "report.html").as_uri())
        return page

    yield at
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(asked) == {(folder / "report.html").as_uri()}


def held(folder):
    """What the page steps through, read as a program would."""
    html = (folder / "report.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="answers">(.*?)</script>', html, re.DOTALL)[1])


def visible(text):
    return text.replace("\n", "↵").replace("\t", "⇥")


SHOWN = """() => {
    const texts = selector => [...document.querySelectorAll(selector)].map(one => one.textContent);
    return {
        where: texts("#where")[0], now: texts("#answer .now"), lists: texts("#tree ul"),
        path: texts("#tree .yes b"), own: texts("#tree .own b"), rejected: texts("#tree .no"),
    };
}"""


def test_the_tree_of_a_step_shows_the_accepted_path_of_the_answer(opened, folder):
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    page, accepted, branches, compared = opened(), 0, 0, 0
    for number, answer in enumerate(held(folder)):
        same = [r for r in rows if r["head"] == answer["head"] and r["category"] == answer["category"]]
        if answer["head"] == "prompt lookup alone":
            continue
        row = same[0]  # the first question of its category, at the first temperature
        page.select_option("#which", str(number))
        assert page.locator("#answer").text_content().removesuffix("</s>") == row["answers"][0]
        spans = page.locator("#answer > span").all_text_contents()
        done = 1
        for k, want in enumerate(row["accepted"][0], 1):
            page.locator("#step").fill(str(k))
            shown = page.evaluate(SHOWN)
            assert shown["where"] == f"step {k} of {len(row['accepted'][0])}"
            said = shown["path"] + shown["own"]
            assert len(shown["path"]) == want
            for text, node in zip(spans[done:], said, strict=False):
                if text and text.isascii():  # the tokens of this base are bytes: some are parts of a character
                    assert visible(text) == node
                    compared += 1
            assert len(shown["now"]) == len(said)
            assert len(shown["rejected"]) == len(answer["steps"][k - 1]["nodes"]) - want
            done += len(said)
            accepted, branches = accepted + want, branches + len(shown["lists"])
        assert done == len(spans)
    assert min(accepted, compared) > 20
    assert branches > 20


def test_at_most_one_answer_of_eight_categories_is_kept(folder):
    kept = [(answer["head"], answer["category"]) for answer in held(folder)]
    categories = ["plain", EVIL_CATEGORY, *(f"category {i}" for i in range(6))]
    assert kept == [(head, name) for head in ("one", "<i>two</i>", "prompt lookup alone") for name in categories]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_the_window_in_both_colour_schemes(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in ("article", "figure", "#answer", "#tree", "table", "svg"):
        assert page.locator(part).first.is_visible()
    # text differs from paper by WCAG's 4.5, in whatever it stands on, and the pictures' text too
    lightness = """selector => {
        const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const luminance = colour => {
            paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map(v => v / 255)
                .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const one = document.querySelector(selector), style = getComputedStyle(one);
        let under = one;
        while (getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)") under = under.parentElement;
        const ink = luminance(one.closest("svg") ? style.fill : style.color);
        const paper = luminance(getComputedStyle(under).backgroundColor);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    }"""
    page.locator("#step").fill("2")
    for part in ("h1", "header p", ".tiles strong", "td", "th", "figcaption", "svg text", "#question", ".node small"):
        assert page.evaluate(lightness, part) >= 4.5, part
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")


def test_the_keyboard_goes_through_an_answer(opened):
    page = opened()
    where = page.locator("#where")
    page.locator("#which").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#which").input_value() == "1"
    page.keyboard.press("Tab")
    if page.evaluate("document.activeElement.id") == "question":  # one that scrolls
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "answer"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert where.text_content().startswith("step 3 of")
    page.keyboard.press("ArrowLeft")
    assert where.text_content().startswith("step 2 of")
    page.keyboard.press("End")
    last = page.locator("#step").get_attribute("max")
    assert where.text_content() == f"step {last} of {last}"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert where.text_content() == f"step {int(last) - 1} of {last}"
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert where.text_content() == f"step 1 of {last}"


def test_a_token_is_looked_at_by_pointing_and_chosen_by_a_click(opened):
    page = opened()
    where = page.locator("#where")
    token = page.locator('#answer [data-step="3"]').last
    token.hover()
    assert where.text_content().startswith("step 3 of")
    page.locator("h1").hover()
    assert where.text_content().startswith("step 1 of")
    token.click()
    page.locator("h1").hover()
    assert where.text_content().startswith("step 3 of")


def test_what_others_wrote_is_shown_and_does_nothing(opened, folder):
    page = opened()
    for number, answer in enumerate(held(folder)):
        page.select_option("#which", str(number))
        assert page.locator("#question").text_content() == answer["question"]
        page.locator("#step").fill("2")
    assert {EVIL[0], EVIL[1]} <= {answer["question"] for answer in held(folder)}
    assert page.locator("html").get_attribute("data-hit") is None
    assert page.locator("img, b:not(.node b), i:not(.race i), iframe, link, object").count() == 0
    assert page.locator("script").count() == 2
    assert f"{EVIL_CATEGORY[:32]}..." in page.locator("svg text").all_text_contents()
    assert EVIL_CATEGORY in page.locator("td").all_text_contents()
    assert page.get_by_role("heading", name="<i>two</i>", exact=True).count() == 1


def test_what_is_written_from_right_to_left_is_shown_so(opened):
    page = opened()
    for part in ("question", "answer", "text"):
        page.evaluate(f"document.getElementById('{part}').textContent = 'שלום (world)'")
        assert page.evaluate(f"getComputedStyle(document.getElementById('{part}')).direction") == "rtl"


def test_the_policy_holds_where_escaping_would_not(browser, folder, tmp_path):
    """The control: the same page with such text unescaped."""
    html = (folder / "report.html").read_text(encoding="utf-8")
    broken, counted = re.subn(r"(?<=<main>)", f"<script>{HIT}</script>{EVIL[1][9:]}", html, count=1)
    assert counted == 1
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", broken)
    hits = []
    for name, text in (("policy", broken), ("none", bare)):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        page = browser.new_page()
        page.goto((tmp_path / f"{name}.html").as_uri())
        hits.append(page.locator("html").get_attribute("data-hit"))
        page.close()
    assert hits == [None, "1"]


def test_thousands_of_categories_are_drawn(tmp_path):
    """With as many names as there is room for."""
    block = {"tokens_per_step": 2.0, "tokens_per_step_ci95": [1.0, 3.0]}
    panel = intervals({"one": {f"category {i}": block for i in range(3000)}}, "tokens_per_step")
    draw({"many": [panel]}, tmp_path)
    assert (tmp_path / "many.png").stat().st_size > 1000
    ((_, svg),) = svgs([panel])
    assert "category 2999" in svg
    assert 100 < svg.count("category ") < 300


def test_names_that_the_pictures_font_lacks_are_no_warnings(tmp_path, recwarn):
    block = {"tokens_per_step": 2.0, "tokens_per_step_ci95": [1.0, 3.0]}
    panel = intervals({"one": {"写作": block, "math": block}}, "tokens_per_step")
    draw({"named": [panel]}, tmp_path)
    assert [str(warning.message) for warning in recwarn] == []
    assert "写作" in svgs([panel])[0][1]
