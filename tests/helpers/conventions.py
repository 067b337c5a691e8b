"""Rows in every convention that is read, each value of them a word of its own: whatever is neither rendered nor counted
as unread nor rejected was lost in silence. `make conventions`.

python tests/helpers/conventions.py [--inputs 2000] [--seed 0] [--templates <folder of *.jinja>] [--only 17]

Rows go through a file of some format, are read, and rendered by each template, as given answers and as questions for
the base. Ends with 1 where a value is lost; `--only` repeats it and shows the row.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow
from bases import tiny_tokenizer
from pyarrow import ipc, parquet
from templates import KNOWN, thinking
from tqdm import tqdm

from ctcdraft.data.messages import ARGUMENT_KEYS, LABEL_KEYS, THOUGHT_KEYS, without_nulls
from ctcdraft.data.records import ANSWERS, LISTS, QUESTIONS, SYSTEM, TOOLS, Conversation, record_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.data.template import LOST_TURN, prompt_ids, render, unread_in_prompt

WORD = re.compile(r"zq\d+z")
BATCH = 40  # rows to a file
SPECIAL = re.compile(r"<[|\uff5c][^<>\s'\"{}]{1,40}?[|\uff5c]>|</?(?:start_of_turn|end_of_turn|think|tool_call)>")
OWN = {name: template for name, (template, *_) in KNOWN.items()} | {key: thinking(key) for key in THOUGHT_KEYS}


class Writer:
    """Draws rows. `kinds` says of each word where it stands, by the name under which it would be counted."""

    def __init__(self, rng):
        self.rng, self.kinds = rng, {}

    def word(self, kind):
        word = f"zq{len(self.kinds)}z"
        self.kinds[word] = kind
        return word

    def text(self, kind):
        """Some of them with what needs escaping in JSON."""
        return self.word(kind) + self.rng.choice(["", "", "", ' "so"', "\nand\ton", " \\ ü 🦙"])

    def some(self, chance):
        return self.rng.random() < chance

    def row(self):
        row = self.rng.choices([self._listed, self._columns, self._questions], [7, 4, 1])[0]()
        if self.some(0.25):
            row[self.rng.choice(SYSTEM)] = self.text("system")
        if self.some(0.3):
            row[self.rng.choice(TOOLS)] = self._tools()
        if self.some(0.2):
            row[self.rng.choice(["source", "lang", "meta"])] = self.rng.choice(
                [self.word("column"), {"a": self.word("column")}]
            )
        if self.some(0.3):  # a union of schemas
            row = dict.fromkeys(("text", "input_ids", "chosen", "history", "tools", "system")) | row
        return row

    # -- shapes of rows -------------------------------------------------------------------------------------------

    def _listed(self):
        turns = self._turns()
        if self.some(0.15):
            turns = json.dumps(turns, ensure_ascii=False)
        return {self.rng.choice(LISTS): turns}

    def _columns(self):
        asked, answer = self.rng.choice([key for key in QUESTIONS if key != "input"]), self.rng.choice(ANSWERS)
        if self.some(0.3):  # TRL's
            question = {"role": "user", "content": self._content("turn")}
            return {asked: [question], answer: [self._answer("role", "content")]}
        row = {asked: self.text("turn"), answer: self.text("turn")}
        if self.some(0.3):
            row["input"] = self.rng.choice(["", self.text("turn")])
        if self.some(0.2):
            row["history"] = [[self.text("turn"), self.text("turn")] for _ in range(self.rng.randint(0, 2))]
        if self.some(0.2):
            row[self.rng.choice(THOUGHT_KEYS)] = self.text("thought")
        return row

    def _questions(self):
        turns = [self.text("turn") for _ in range(self.rng.randint(1, 3))]
        return {"turns": self.rng.choice([turns, json.dumps(turns)])}

    # -- turns ----------------------------------------------------------------------------------------------------

    def _turns(self):
        who, what = self.rng.choice([("from", "value"), ("role", "content")])
        turns = []
        if self.some(0.25):
            turns.append({who: self.rng.choice(["system", "developer"]), what: self._content("system")})
        for _ in range(self.rng.randint(1, 3)):
            turns.append({who: self.rng.choice(["user", "human", "prompter"]), what: self._content("turn")})
            if self.some(0.3):
                turns += self._use_of_a_tool(who, what)
            turns.append(self._answer(who, what))
        for turn in turns:
            if self.some(0.1):
                turn["name"] = self.word("name")
            if self.some(0.1):
                turn["timestamp"] = self.word("timestamp")
            if self.some(0.3):
                turn |= {"audio": None, "refusal": None, "tool_calls": turn.get("tool_calls")}
        return turns

    def _answer(self, who, what):
        turn = {who: self.rng.choice(["assistant", "gpt", "model"]), what: self._content("turn"), **self._weight()}
        return self._with_thought(turn, what)

    def _with_thought(self, turn, what):
        if self.some(0.3):
            thought = self.text("thought")
            if self.some(0.7):
                turn[self.rng.choice(THOUGHT_KEYS)] = thought
            else:
                kind = self.rng.choice(["thinking", "reasoning"])
                said = turn[what] if isinstance(turn[what], list) else [{"type": "text", "text": turn[what] or ""}]
                said = [part for part in said if part != {"type": "text", "text": ""}]
                turn[what] = [{"type": kind, self.rng.choice([kind, "text"]): thought}, *said]
        return turn

    def _content(self, kind):
        text = self.text(kind)
        parts = [{"type": self.rng.choice(["text", "input_text"]), "text": text}, {"text": self.text(kind)}]
        return self.rng.choice([text, text, text, parts[:1], parts, [text]])

    def _weight(self):
        key = self.rng.choice(LABEL_KEYS)
        return self.rng.choice([{}, {}, {}, {key: 1}, {key: True}, {key: 0}, {key: False}, {key: None}])

    def _use_of_a_tool(self, who, what):
        """A call and its result."""
        identity = self.word("id")
        call, result = self._call(who, what, identity), self._result(who, what, identity)
        return [self._with_thought(call, what) if isinstance(call.get(what), list | None) else call, result]

    def _call(self, who, what, identity):
        given = {self.word("turn"): self.text("turn"), "n": self.rng.randint(0, 9)}
        if self.some(0.3):
            given["nested"] = {"a": [self.word("turn"), None], "b": {}}
        name, text = f"f_{self.word('turn')}", json.dumps(given, ensure_ascii=False)
        function = {"name": name, self.rng.choice(ARGUMENT_KEYS): self.rng.choice([given, text])}
        openai = {"id": identity, "type": "function", "function": function}
        turn = {who: "assistant", what: None}
        form = self.rng.randrange(6)
        if form == 0:
            return {who: "function_call", what: json.dumps({"name": name, "arguments": given})}
        if form == 1:
            return turn | {"function_call": function}
        if form == 2:
            return turn | {what: [{"type": "tool_use", "id": identity, "name": name, "input": given}]}
        if form == 3:
            return turn | {"tool_calls": json.dumps([openai])}
        return turn | {"tool_calls": [openai] if form == 4 else [function]}

    def _result(self, who, what, identity):
        text = self.text("turn")
        if self.some(0.2):
            return {who: "user", what: [{"type": "tool_result", "tool_use_id": identity, "content": text}]}
        said = self.rng.choice([text, {"t": text}, [{"type": "text", "text": text}], [{"t": text}, 3]])
        turn = {who: self.rng.choice(["tool", "function", "observation", "ipython"]), what: said}
        return turn | {"tool_call_id": identity}

    def _tools(self):
        tools = []
        for _ in range(self.rng.randint(1, 2)):
            names = {self.word("tools"): {"type": "string", "description": self.text("tools")}}
            schema = {"type": "object", "properties": names}
            key = self.rng.choice(["parameters", "parameters", "input_schema"])
            tool = {"name": self.word("tools"), "description": self.text("tools"), key: schema}
            if key == "parameters" and self.some(0.7):
                tool = {"type": "function", "function": tool}
            tools.append(self.rng.choice([tool, tool, json.dumps(tool)]))
        return self.rng.choice([tools, tools, json.dumps(tools), tools[0]])


# -- files ----------------------------------------------------------------------------------------------------


def write_file(rows, folder, rng):
    """The rows in one or two files of some format; what no table takes lies beside it as JSON lines."""
    form = rng.choice(["lines", "list", "pretty", "wrapped", "members", "objects", "parquet", "arrow"])
    left = rows
    if form in ("parquet", "arrow"):
        table, left = _table(rows)
        if form == "parquet":
            parquet.write_table(table, folder / "rows.parquet")
        else:
            with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as out, ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)
    text = {
        "list": lambda: json.dumps(left),
        "pretty": lambda: json.dumps(left, indent=2, ensure_ascii=False),
        "wrapped": lambda: json.dumps({"version": 1, "data": left}),
        "members": lambda: json.dumps({str(i): row for i, row in enumerate(left)}),
        "objects": lambda: "\n".join(json.dumps(row, indent=1) for row in left),
    }.get(form, lambda: "\n".join(map(json.dumps, left)))
    if left:
        (folder / "rows.json").write_text(text(), encoding="utf-8")
    return form


def _table(rows):
    """A table of those rows that have types in common, which Parquet knows (an empty struct it does not), and the other
    rows."""
    taken, left, table = [], [], None
    for row in rows:
        try:
            wider = pyarrow.Table.from_pylist([*taken, row], schema=_schema([*taken, row]))
            parquet.write_table(wider, pyarrow.BufferOutputStream())
            table, taken = wider, [*taken, row]
        except pyarrow.ArrowException:
            left.append(row)
    return table, left


def _schema(rows):
    schemas = [pyarrow.Table.from_pylist([row]).schema for row in rows]
    return pyarrow.unify_schemas(schemas, promote_options="permissive")


# -- judging --------------------------------------------------------------------------------------------------


def templates_of(folder):
    """Tokenizers with the project's own templates, and with those of a folder."""
    texts = OWN | {path.stem: path.read_text() for path in (sorted(Path(folder).glob("*.jinja")) if folder else ())}
    return {name: tiny_tokenizer(text, tuple(dict.fromkeys(SPECIAL.findall(text)))) for name, text in texts.items()}


def lost(missing, kinds, unread):
    """Those of the missing words that nothing counts."""
    names, found = Counter(unread), []
    for word in missing:
        name = next((name for name in names if names[name] and counts(name, kinds[word])), None)
        if name is None:
            found.append(word)
        elif kinds[word] in ONE_BY_ONE and name != LOST_TURN:
            names[name] -= 1
    return found


ONE_BY_ONE = {"thought": ("thought", *THOUGHT_KEYS), "name": ("turn.name",), "timestamp": ("turn.timestamp",),
              "id": ("turn.tool_calls.id", "turn.tool_call_id")}  # fmt: skip
TOGETHER = {"tools": ("tools",), "system": ("system", "turn.content"), "column": ("source", "lang", "meta"),
            "turn": ("turn.content", "turn.tool_calls.function")}  # fmt: skip


def counts(name, kind):
    """Does a name under which something was counted as unread stand for a word of that kind?"""
    return any(sign in name for sign in (ONE_BY_ONE | TOGETHER)[kind]) or (
        name == LOST_TURN and kind not in ("tools", "system", "column")
    )


def judged(row, kinds, tokenizer):
    """What became of a row: ("whole" | "counted" | a reason of rejection, the words that were lost)."""
    if isinstance(row, RowError):
        return str(row), []
    try:
        chat = record_of(row, "0", "sharegpt")
        assert isinstance(chat, Conversation)
        gone = _lost_in_prompt(chat, kinds, tokenizer)
        if not any(message["role"] == "assistant" for message in chat.messages):
            return "questions alone", gone
    except ValueError as error:
        return str(error), []
    try:
        found = render(tokenizer, chat)
    except ValueError as error:
        return str(error), gone
    seen = words_of([tokenizer.decode(sequence.ids) for sequence in found.sequences])
    missing = sorted(words_of(without_nulls(row)) - seen)
    if found.unread and not missing:
        raise AssertionError(f"all is shown, and {found.unread} counted as unread: {row}")
    return "counted" if missing else "whole", gone + lost(missing, kinds, [*chat.unread, *found.unread])


def _lost_in_prompt(chat, kinds, tokenizer):
    """What stands before the first answer, which is all that is rendered of a row whose answers are rewritten."""
    first = next(i for i, message in enumerate(chat.messages) if message["role"] == "user")
    asked = chat.messages[: first + 1]
    missing = words_of([asked, chat.tools]) - words_of(tokenizer.decode(prompt_ids(tokenizer, asked, chat.tools)))
    return lost(sorted(missing), kinds, unread_in_prompt(tokenizer, chat))


def words_of(value):
    return set(WORD.findall(json.dumps(value)))


def explore(inputs, seed, templates=None, only=None):
    """Outcomes by template, formats, and the losses as (number, template, words with their kinds, row)."""
    outcomes, formats, losses = {name: Counter() for name in templates or OWN}, Counter(), []
    tokenizers = templates_of(None) if templates is None else templates
    bar = tqdm(total=inputs, unit="row", mininterval=1)
    for start in range(0, inputs, BATCH):
        rng = random.Random(f"{seed} {start}")
        writer = Writer(rng)
        written = [writer.row() for _ in range(min(BATCH, inputs - start))]
        with tempfile.TemporaryDirectory() as folder:
            formats[write_file(written, Path(folder), rng)] += 1
            rows = [row for path in sorted(Path(folder).iterdir()) for row in read_rows(str(path))]
        assert len(rows) == len(written), (start, len(rows))
        found = set(WORD.findall(json.dumps(rows, default=str)))
        assert found == set(WORD.findall(json.dumps(written))), f"a file lost {found}"
        for number, row in enumerate(rows, start):
            bar.update()
            if only is not None and number != only:
                continue
            for name, tokenizer in tokenizers.items():
                outcome, words = judged(row, writer.kinds, tokenizer)
                outcomes[name][re.sub(r"\d+|zq\w+", "#", outcome)[:90]] += 1
                if words:
                    losses.append((number, name, {word: writer.kinds[word] for word in words}, row))
    bar.close()
    return outcomes, formats, losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--templates", help="a folder of *.jinja instead of the project's own")
    parser.add_argument("--only", type=int)
    parser.add_argument("--reasons", action="store_true", help="why rows are rejected")
    options = parser.parse_args()
    templates = templates_of(options.templates)
    outcomes, formats, losses = explore(options.inputs, options.seed, templates, options.only)
    print(f"{'template':24}{'rows':>8}{'whole':>8}{'counted':>9}{'rejected':>10}{'lost':>6}")
    for name, found in outcomes.items():
        rejected = found.total() - found["whole"] - found["counted"]
        wrong = sum(loss[1] == name for loss in losses)
        print(f"{name:24}{found.total():8}{found['whole']:8}{found['counted']:9}{rejected:10}{wrong:6}")
        for reason, times in found.most_common() if options.reasons else ():
            print(f"  {times:6} {reason}")
    print("files:", ", ".join(f"{form} {count}" for form, count in sorted(formats.items())))
    for number, name, words, row in losses[:20]:
        print(f"--only {number} ({name}) lost {words}", json.dumps(row, ensure_ascii=False) if options.only else "")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
