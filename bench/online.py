"""A stream of requests whose topic changes, for a head that stays as it is and for one that learns on the way.

python bench/online.py --write FILE --without CATEGORY [--data toy|prompts] [--count 1800]: conversations of the other
    categories, to train a head on (data=sharegpt data.path=FILE; data=prompts has no answers: the base gives them)
python bench/online.py <exported head> --base <model> [--data toy|prompts] [--category CATEGORY] [--count 200]
    [--tokens 160] [--nodes 32] [--lookup] [--every 384] [--lr 3e-4] [--buffer 8192] [--dtype fp32]

The first half of the stream is of all other categories, the second of CATEGORY; without one, all is of all. Requests
are the first questions of conversations that such a training does not see, decoded greedily with both heads in turn.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

from measure import machine

from ctcdraft.data.generated import GENERATED
from ctcdraft.eval.bench import Question
from ctcdraft.eval.report import markdown_table
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.train.online import OnlineConfig, OnlineDecoder

WINDOW = 50  # requests of a row


def rows_of(data, keep, held_out):
    """Conversations of the categories that are kept, without an end."""
    generator = GENERATED[data]
    several = (
        {**vars(generator), "drawers": {name: generator.drawers[name]}} for name in filter(keep, generator.drawers)
    )
    streams = [type(generator)(**one).conversations(10**6, held_out=held_out) for one in several]
    return itertools.chain.from_iterable(zip(*streams, strict=False))


def question_of(row):
    turns = row.get("turns") or [row["conversations"][0]["value"]]
    return Question(row["id"], row["category"], tuple(turns[:1]))


def stream(options):
    half, category = options.count // 2, options.category
    before = rows_of(options.data, lambda name: name != category, held_out=True)
    after = rows_of(options.data, lambda name: name == category, held_out=False) if category else before
    return [*map(question_of, [*itertools.islice(before, half), *itertools.islice(after, options.count - half)])]


def timed(decoder, prompt, options):
    start = time.perf_counter()
    return decoder.generate(prompt, options.tokens), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", nargs="?")
    parser.add_argument("--base")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--without")
    parser.add_argument("--data", default="toy", choices=GENERATED)
    parser.add_argument("--category")
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup too")
    parser.add_argument("--every", type=int, default=384)
    parser.add_argument("--lr", type=float, default=OnlineConfig.lr)
    parser.add_argument("--buffer", type=int, default=OnlineConfig.buffer)
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    if unknown := {options.category, options.without} - {None, *GENERATED[options.data].drawers}:
        parser.error(f"no such category: {', '.join(unknown)}; choose of {', '.join(GENERATED[options.data].drawers)}")
    if options.write:
        rows = rows_of(options.data, lambda name: name != options.without, held_out=False)
        lines = (json.dumps(row) + "\n" for row in itertools.islice(rows, options.count or 1800))
        options.write.write_text("".join(lines), encoding="utf-8")
        return
    if options.head is None or options.base is None:
        parser.error("give an exported head and --base, or --write")
    options.count = options.count or 200
    base = load_base(options.base, options.dtype)
    head = load_head(options.head, base)
    draft = DraftConfig(nodes=options.nodes, budget="fixed", **({} if options.lookup else {"prompt_lookup": 0}))
    online = OnlineConfig(every=options.every, lr=options.lr, buffer=options.buffer)
    sides = {"frozen": Decoder(base, head, draft), "online": OnlineDecoder(base, head, draft, online)}
    found = []
    for number, question in enumerate(stream(options)):
        prompt = question.prompt_after(base)
        order = ("frozen", "online") if number % 2 else ("online", "frozen")
        outs = {side: timed(sides[side], prompt, options) for side in order}
        assert outs["frozen"][0].tokens == outs["online"][0].tokens or base.dtype.itemsize < 4, question
        found.append(outs)
    header = ("requests", "tokens", "frozen", "online", "ratio", "accepted", "seconds", "learning")
    print(f"{machine()}; {options.dtype}, N={options.nodes}; steps learnt: {sides['online'].steps}\n")
    print(markdown_table(header, [row(found, start) for start in range(0, len(found), WINDOW)]), flush=True)


def row(found, start):
    part = found[start : start + WINDOW]
    steps, grown, seconds = {}, {}, {}
    for side in ("frozen", "online"):
        outs = [one[side][0] for one in part]
        steps[side] = sum(out.steps for out in outs)
        grown[side] = sum(len(out.tokens) - 1 for out in outs)
        seconds[side] = sum(one[side][1] for one in part)
    rate = {side: grown[side] / max(1, steps[side]) for side in steps}
    learnt = sum(one["online"][0].seconds["learn"] for one in part)
    return (
        f"{start + 1} to {start + len(part)}",
        grown["online"],
        f"{rate['frozen']:.2f}",
        f"{rate['online']:.2f}",
        f"{rate['online'] / rate['frozen']:.2f}",
        f"{(rate['online'] - 1) / max(1e-9, rate['frozen'] - 1):.2f}",
        f"{seconds['frozen']:.0f}, {seconds['online']:.0f}",
        f"{learnt / seconds['online']:.0%}",
    )


if __name__ == "__main__":
    main()
