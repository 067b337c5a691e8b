"""report.html: an evaluation as one page, which loads nothing and runs no script but its own (html/).

Questions, answers and names are other people's text. Jinja escapes all of it, the script puts it into text nodes, and
the page's Content-Security-Policy allows no other script and no address.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ctcdraft.model.decode.text import TextStream
from ctcdraft.model.draft.tree import Tree, source_name

from .plots import Panel, panels_of, svgs
from .report import figure_rows, figures, heading, sections, summary
from .results import Block, columns, heads_at
from .run import Turn

HTML = Path(__file__).resolve().parent / "html"
STEPS_SHOWN = 256  # of an answer, with their trees
Table = tuple[str, Sequence[Any], Sequence[Sequence[Any]]]  # caption, header, rows; a float is shown as a share


def page(
    title: str,
    about: str,
    panels: Iterable[Panel],
    tables: Sequence[Table],
    *,
    tiles: Mapping[str, Mapping[str, str]] | None = None,
    times: Mapping[str, Mapping[str, float]] | None = None,
    answers: Sequence[Mapping[str, Any]] = (),
) -> str:
    """HTML of one page. tiles: `figures` of each head; times: shares by what is timed; answers: `shown`."""
    script = (HTML / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(HTML), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=title,
        about=about,
        tiles=tiles or {},
        charts=[(name, Markup(svg)) for name, svg in svgs(panels)],
        times=times or {},
        answers=answers,
        tables=tables,
        style=Markup((HTML / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def results_page(results: dict[str, Any], turns: Mapping[str, Sequence[Turn]], tokenizer: Any) -> str:
    """Of an evaluation; turns by head, one head alone under "", and none where drafts were counted."""
    answers = [
        shown(label or results["head"]["kind"], turn, tokenizer)
        for label, several in turns.items()
        for turn in several
        if turn.drafted.trees
    ]
    first: dict[str, Block] = next(iter(heads_at(results).values()), {})
    return page(
        heading(results),
        summary(results),
        [panel for panels in panels_of(results).values() for panel in panels],
        [
            *(("Figures", *table) for table in figure_rows(results)),
            *((name, *table) for name, table in sections(results).items()),
        ],
        tiles={label: figures(block) for label, block in first.items()},
        times={label: block["time_share"] for label, block in columns(results).items()},
        answers=answers,
    )


def shown(head: str, turn: Turn, tokenizer: Any) -> dict[str, Any]:
    """An answer whose drafts were kept, as the page steps through it: per token its text, per step its tree."""
    out, question = turn.drafted, turn.question

    @cache
    def text_of(token: int) -> str:
        return tokenizer.decode([token])

    def nodes(tree: Tree) -> list[tuple[str, int, float, str]]:
        found = zip(tree.tokens, tree.parents, tree.psi, tree.source.tolist(), strict=True)
        return [(text_of(int(t)), int(parent), round(float(psi), 4), source_name(by)) for t, parent, psi, by in found]

    left, steps = len(out.tokens) - 1, []
    for number, (tree, path) in enumerate(out.trees or ()):
        taken = min(len(path) + 1, left)  # an end within a draft leaves out the rest
        left -= taken
        kept = nodes(tree) if number < STEPS_SHOWN else None
        steps.append({"taken": taken, "drafted": len(tree), "path": path, "nodes": kept})
    stream, tokens = TextStream(tokenizer), []
    for token in out.tokens:
        before = len(stream.text)
        stream.push(token)
        tokens.append(text_of(token) if token in tokenizer.all_special_ids else stream.text[before:])
    read = len(stream.text)
    stream.finish()
    tokens[-1] = stream.text[read:] + tokens[-1]  # half a character
    return {
        "head": head,
        "category": question.category,
        "question": question.turns[turn.number] if question.turns else tokenizer.decode(question.prompt),
        "tokens": tokens,
        "steps": steps,
        "seconds": turn.seconds,
        "plain": {
            "tokens": len(turn.plain.tokens),
            "seconds": turn.plain_seconds,
            "text": None if turn.plain.text == out.text else turn.plain.text,
        },
    }
