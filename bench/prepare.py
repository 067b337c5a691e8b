"""How fast conversations are read, masked and packed beside the bare tokenizer, and in how much memory.

python bench/prepare.py [--conversations N] [--rounds N] [--tokenizer FOLDER]

Synthetic conversations of the toy corpus, joined to some 600 tokens each, go from a JSONL file to packed
rows on disk; every round also lets the tokenizer alone encode the same texts, already rendered, in the same batches.
The peak is that of a process of its own that does the whole file once.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread of it on either side

from transformers import AutoTokenizer

from ctcdraft.data.batches import first_fit
from ctcdraft.data.generated import TOY
from ctcdraft.data.records import conversation_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.data.store import Example, join_corpora, load_corpus, save_corpus
from ctcdraft.data.template import render
from ctcdraft.eval.report import markdown_table

SHARD = 2048
ROW = 2048


def write_conversations(path, count):
    """`count` conversations of some 600 tokens, each of several of the toy corpus; none twice."""
    pool = [row["conversations"] for row in TOY.conversations(6000)]
    with path.open("w") as stream:
        for number in range(count):
            turns = []
            for i in range(4):
                turns += pool[(number * 4 + i * 101 + number // 1500 * (i + 1)) % len(pool)]
            turns = [{**turns[0], "value": f"({number}) {turns[0]['value']}"}, *turns[1:]]
            stream.write(json.dumps({"id": str(number), "conversations": turns}) + "\n")


def conversations_of(path):
    seen = set()
    for number, row in enumerate(read_rows(str(path))):
        try:
            record = conversation_of(row, number)
        except RowError:
            continue
        digest = record.digest
        if digest not in seen:
            seen.add(digest)
            yield record


def shards(rows, size=SHARD):
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def engine(path, tokenizer, folder):
    """Read, check, drop equal rows, render, tokenise, mask, write, join, pack. The tokens, and the padding."""
    parts = []
    for number, batch in enumerate(shards(conversations_of(path))):
        examples = []
        for conversation in batch:
            with suppress(RowError):
                examples += (Example(ids, mask, ids) for ids, mask in render(tokenizer, conversation).sequences)
        parts.append(folder / f"{number}.safetensors")
        save_corpus(parts[-1], examples)
    join_corpora(folder / "train.safetensors", parts)
    corpus = load_corpus(folder, "train")
    rows = first_fit(corpus.lengths, ROW)
    return {
        "conversations": len(corpus),
        "tokens": len(corpus.ids),
        "answer_tokens": int(corpus.mask.sum()),
        "rows": len(rows),
        "padding": 1 - corpus.lengths.clip(max=ROW).sum() / (len(rows) * ROW),
    }


def bare(texts, tokenizer):
    """The tokenizer alone on texts that are there."""
    for batch in shards(texts):
        for encoding in tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False):
            encoding.ids  # noqa: B018 (handed over to Python, as anybody would)


def whole(path, tokenizer_folder, sender):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = engine(path, tokenizer, Path(folder))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send({**found, "seconds": seconds, "peak_mb": peak / 1024, "before_mb": before / 1024})


def vocabulary(base):
    return json.loads((base / "config.json").read_text())["vocab_size"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=4096, help="conversations of each timed round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokenizer", help="a folder; default: the toy base's, in .cache")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.tokenizer or str(max(Path(".cache").glob("toy-*"), key=vocabulary))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        path, sample = Path(place) / "all.jsonl", Path(place) / "sample.jsonl"
        write_conversations(path, options.conversations)
        write_conversations(sample, options.sample)
        texts = [
            tokenizer.apply_chat_template(list(record.messages), tokenize=False) for record in conversations_of(sample)
        ]
        seconds, busy = {"engine": [], "bare": []}, {"engine": [], "bare": []}
        for turn in range(options.rounds + 1):
            for name in seconds:
                start, cpu = time.perf_counter(), time.process_time()
                if name == "engine":
                    with tempfile.TemporaryDirectory() as out:
                        tokens = engine(sample, tokenizer, Path(out))["tokens"]
                else:
                    bare(texts, tokenizer)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                    busy[name].append(time.process_time() - cpu)
        receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=whole, args=(path, folder, sender))
        process.start()
        sender.close()
        full = receiver.recv()
        process.join()
        size = path.stat().st_size
    ratios = [sorted(b / e for e, b in zip(t["engine"], t["bare"], strict=True)) for t in (seconds, busy)]
    rows = [
        ("file", f"{full['conversations']:,} conversations, {size / 2**20:.0f} MB, {full['tokens'] / 1e6:.1f}M tokens"),
        ("whole file", f"{full['seconds']:.0f} s, {full['tokens'] / full['seconds'] / 1e3:.0f}k tokens/s"),
        ("peak memory", f"{full['peak_mb']:.0f} MB, of which {full['before_mb']:.0f} MB before the first row"),
        ("packed", f"{full['rows']:,} rows of {ROW}, {full['padding']:.2%} padding"),
        ("engine", f"{tokens / median(seconds['engine']) / 1e3:.0f}k tokens/s"),
        ("tokenizer alone", f"{tokens / median(seconds['bare']) / 1e3:.0f}k tokens/s"),
        *(
            (name, f"{median(found):.0%} (lowest {found[0]:.0%}, highest {found[-1]:.0%})")
            for name, found in zip(("engine / tokenizer, by the clock", "the same, by CPU time"), ratios, strict=True)
        ),
    ]
    print(f"Tokenizer on one thread; {options.rounds} interleaved rounds of {options.sample} conversations, medians.\n")
    print(markdown_table(("what", "measured"), rows))
    if options.out:
        options.out.write_text(json.dumps({"full": full, "seconds": seconds, "cpu_seconds": busy}, indent=1) + "\n")


if __name__ == "__main__":
    main()
