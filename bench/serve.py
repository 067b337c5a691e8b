"""vLLM plain against vLLM with a head, and against its own drafters: tokens per second, at several numbers of requests.

python bench/serve.py --head runs/<name>/head --base <model> [--bench mt_bench --path question.jsonl] [--http]

One process per system, all up at once: the engine alone, called from Python, or with --http its server. Questions go
to one of them at a time in groups, which take turns in balanced orders; a figure's interval is a bootstrap over groups.
Steps are those of the engine's own counters. An answer counts as identical where its tokens are those of the plain
engine with as many requests at once. By its processor: what an engine waits for other jobs on its core is left out.
"""

import argparse
import json
import re
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
from measure import keep, told
from tqdm import tqdm

from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.results import estimate
from ctcdraft.eval.run import balanced_orders
from ctcdraft.launch import serve
from ctcdraft.model import load_base

COUNTED = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
ARGS = "--max-num-seqs=16 --no-enable-prefix-caching"  # else a second round has less to read
LENGTH = 2048  # of contexts, where the base has as many
WARM_UP = 32  # questions before the first round, at least: each number of rows needs kernels of its own
HELPER = serve.ROOT / "tests" / "helpers" / "engine_run.py"


def speculation(system, options):
    """--speculative-config and --additional-config of a system."""
    own = {"num_speculative_tokens": options.nodes}
    if system.startswith("head"):
        own |= {"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer"}
        length = "fixed" if system == "head-fixed" else "measured"
        return own, {"ctcdraft": {"head": str(options.head.resolve()), "length": length}}
    if system == "suffix":  # needs the package arctic-inference; answers of other rounds would be drafted whole
        own |= {"suffix_decoding_max_cached_requests": 0}
    if system == "ngram":
        own |= {"prompt_lookup_min": 1, "prompt_lookup_max": 8}
    return own | {"method": system}, None


class Process:
    """A system that runs by itself."""

    def __init__(self, system, options, words, **pipes):
        words = [serve.engine_python(options.env), *words, f"--model={options.base}", f"--dtype={options.dtype}"]
        words += [f"--max-model-len={options.length}"]
        words += options.args.split()
        if system != "plain":
            for name, value in zip(("speculative", "additional"), speculation(system, options), strict=True):
                words += [f"--{name}-config={json.dumps(value)}"] if value else []
        options.logs.mkdir(parents=True, exist_ok=True)
        self.log = options.logs / f"{system}.log"
        with self.log.open("wb") as out:
            self.engine = subprocess.Popen(words, start_new_session=True, **{"stdout": out, "stderr": out} | pipes)


class Engine(Process):
    """vLLM's engine, called from Python."""

    def __init__(self, system, options, number):
        pipe = subprocess.PIPE
        super().__init__(system, options, [HELPER], stdin=pipe, stdout=pipe, text=True)

    def wait(self):
        if not self.engine.stdout.readline():
            raise ValueError(f"it did not start: {serve.reason_in(self.log)}")

    def answers(self, prompts, batch, tokens):
        """(tokens of each answer, seconds of all by the clock and by the processor, COUNTED), `batch` at once."""
        asked = {"prompts": prompts, "batch": batch, "sampling": {"max_tokens": tokens}}
        print(json.dumps(asked), file=self.engine.stdin, flush=True)
        found = json.loads(self.engine.stdout.readline())
        counted = np.array([found["counted"].get(name, 0) for name in COUNTED])
        return found["tokens"], (found["seconds"], found["cpu_seconds"]), counted


class Server(Process):
    """vLLM's OpenAI-compatible server, asked as its users ask it."""

    def __init__(self, system, options, number):
        self.model, port = str(options.base), options.port + number
        module = ["-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
        super().__init__(system, options, module)
        self.address, self.client = f"http://127.0.0.1:{port}", httpx.Client(timeout=3600)

    def wait(self):
        serve.wait_until_healthy(self.engine, self.address, self.log, 900)

    def counted(self):
        text = self.client.get(f"{self.address}/metrics").text
        found = [re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in COUNTED]
        return np.array([sum(map(float, values)) for values in found])

    def answers(self, prompts, batch, tokens):
        """As an engine's."""

        def ask(ids):
            asked = {"model": self.model, "prompt": ids, "max_tokens": tokens, "temperature": 0}
            reply = self.client.post(f"{self.address}/v1/completions", json=asked | {"return_token_ids": True})
            return reply.raise_for_status().json()["choices"][0]["token_ids"]

        before, start = self.counted(), time.perf_counter()
        with ThreadPoolExecutor(batch) as pool:
            said = [*pool.map(ask, prompts)]
        return said, (time.perf_counter() - start, np.nan), self.counted() - before


def measured(systems, prompts, batch, options):
    groups = np.array_split(np.arange(len(prompts)), max(1, len(prompts) // max(batch, options.group)))
    seconds, tokens, counts = defaultdict(list), defaultdict(list), defaultdict(float)
    orders = balanced_orders([*systems])
    for process in systems.values():  # compiles, and fills the head's step times
        process.answers(prompts[: max(WARM_UP, 2 * batch)], batch, options.tokens)
    for number, group in enumerate(tqdm(groups * options.rounds, f"batch {batch}", leave=False)):
        for system in orders[number % len(orders)]:
            said, taken, counted = systems[system].answers([prompts[i] for i in group], batch, options.tokens)
            seconds[system].append(taken)
            tokens[system].append(said)
            counts[system] = counts[system] + counted
    rows = []
    asked = len(prompts) * options.rounds
    for system in systems:
        same = sum(got == want for got, want in zip(*(chain(*tokens[name]) for name in (system, "plain")), strict=True))
        pair = (system, "plain")
        size_2G = np.array([[sum(map(len, group)) for group in tokens[name]] for name in pair])
        taken_22G = np.array([np.transpose(seconds[name]) for name in pair]).swapaxes(0, 1)
        (speedup, interval), (by_cpu, cpu_interval) = (estimate(0, size_2G / taken_2G) for taken_2G in taken_22G)
        drafts, drafted, accepted = counts[system]
        total = int(size_2G[0].sum())
        rows.append(
            {
                "batch": batch,
                "system": system,
                "tokens_per_second": total / taken_22G[0, 0].sum(),
                "speedup": speedup,
                "ci95": interval,
                "cpu_speedup": by_cpu,
                "cpu_ci95": cpu_interval,
                "steps": int(total - asked - accepted),
                "tokens_per_step": (total - asked) / max(1, total - asked - accepted),
                "accepted": accepted / max(1, drafted),
                "drafted": drafted / max(1, drafts),
                "identical": [same, asked],
            }
        )
    return rows


def table(rows):
    header = ("requests", "system", "tok/s", "times plain", "95%", "by its processor", "95%", "steps", "tokens/step")
    header += ("drafted", "identical")
    lines = [
        (
            row["batch"],
            row["system"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            "[{:.2f}, {:.2f}]".format(*row["ci95"]),
            f"{row['cpu_speedup']:.2f}",
            "[{:.2f}, {:.2f}]".format(*row["cpu_ci95"]),
            row["steps"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['drafted']:.1f}",
            "{} of {}".format(*row["identical"]),
        )
        for row in rows
    ]
    return markdown_table(header, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--env", type=Path, default=Path(".venv-vllm"))
    parser.add_argument("--systems", nargs="+", default=["plain", "head", "ngram", "suffix"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--bench", default="toy")
    parser.add_argument("--path")
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--group", type=int, default=4, help="questions of a group, at least")
    parser.add_argument("--rounds", type=int, default=1, help="how often each question is asked")
    parser.add_argument("--http", action="store_true", help="the whole server, not its engine alone")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--args", default=ARGS, help="of vLLM, for all systems")
    parser.add_argument("--logs", type=Path, default=Path(".cache"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        base = load_base(str(options.base))
        bench = BenchConfig(kind=options.bench, path=options.path, questions=options.questions)
        prompts = [question.prompt_after(base) for question in load_questions(bench, base, None, 0)]
        options.length = min(LENGTH, base.context_length)
    except ValueError as error:
        parser.error(str(error))
    started, up, rows, missing = [], {}, [], ""
    try:
        for number, system in enumerate(options.systems):
            started.append((Server if options.http else Engine)(system, options, number))
            try:
                started[-1].wait()
                up[system] = started[-1]
            except ValueError as error:  # a control whose package is not there
                missing += f"\n{system}: {error}"
        if "plain" not in up:
            parser.error(f"the plain engine is what all are measured beside, and it is not there{missing}")
        for batch in options.batch:
            rows += measured(up, prompts, batch, options)
            keep(rows, options.out)
    finally:
        for process in started:
            serve.end(process.engine)
    told(f"; {len(prompts)} questions, {options.tokens} tokens at most", table(rows) + missing)


if __name__ == "__main__":
    main()
