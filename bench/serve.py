"""vLLM plain against vLLM with a head, and against its own drafters: tokens per second, at several numbers of requests.

python bench/serve.py --head runs/<name>/head --base <model> [--bench mt_bench --path question.jsonl] [--batch 1 4 8 16]

One server per system, all up at once. Questions go to one of them at a time in groups, which take turns in balanced
orders; a figure's interval is a bootstrap over groups. Steps are those of the engine's own counters. An answer counts
as identical where its tokens are those of the plain engine with as many requests at once.
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
from types import SimpleNamespace

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

COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


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


def started(system, port, options, folder):
    words = [serve.engine_python(options.env), "-m", "vllm.entrypoints.openai.api_server", f"--model={options.base}"]
    words += [f"--port={port}", "--host=127.0.0.1", f"--dtype={options.dtype}", *options.args.split()]
    if system != "plain":
        for name, value in zip(("speculative", "additional"), speculation(system, options), strict=True):
            words += [f"--{name}-config={json.dumps(value)}"] if value else []
    log = folder / f"{system}.log"
    with log.open("wb") as out:
        engine = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    return SimpleNamespace(engine=engine, address=address, log=log, client=httpx.Client(timeout=3600))


def counters(server):
    text = server.client.get(f"{server.address}/metrics").text
    found = [re.findall(rf"^vllm:spec_decode_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in COUNTED]
    return np.array([sum(map(float, values)) for values in found])


def answers(server, prompts, batch, options):
    """(tokens of each answer, seconds of all of them), `batch` at once."""

    def ask(ids):
        asked = {"model": str(options.base), "prompt": ids, "max_tokens": options.tokens, "temperature": 0}
        reply = server.client.post(f"{server.address}/v1/completions", json=asked | {"return_token_ids": True})
        return reply.raise_for_status().json()["choices"][0]["token_ids"]

    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        tokens = [*pool.map(ask, prompts)]
    return tokens, time.perf_counter() - start


def measured(servers, prompts, batch, options):
    groups = np.array_split(np.arange(len(prompts)), max(1, len(prompts) // max(batch, options.group)))
    seconds, tokens, counts = defaultdict(list), defaultdict(list), defaultdict(float)
    orders = balanced_orders([*servers])
    for server in servers.values():  # compiles, and fills the head's step times
        answers(server, prompts[: 2 * batch], batch, options)
    for number, group in enumerate(tqdm(groups, f"batch {batch}", leave=False)):
        for system in orders[number % len(orders)]:
            before = counters(servers[system])
            said, taken = answers(servers[system], [prompts[i] for i in group], batch, options)
            seconds[system].append(taken)
            tokens[system].append(said)
            counts[system] = counts[system] + counters(servers[system]) - before
    rows = []
    for system in servers:
        same = sum(got == want for got, want in zip(*(chain(*tokens[name]) for name in (system, "plain")), strict=True))
        sizes = {name: [sum(map(len, group)) for group in tokens[name]] for name in (system, "plain")}
        rates = np.array([np.divide(sizes[name], seconds[name]) for name in (system, "plain")])
        speedup, interval = estimate(0, rates)
        drafts, drafted, accepted = counts[system]
        total = sum(sizes[system])
        rows.append(
            {
                "batch": batch,
                "system": system,
                "tokens_per_second": total / sum(seconds[system]),
                "speedup": speedup,
                "ci95": interval,
                "steps": int(total - len(prompts) - accepted),
                "tokens_per_step": (total - len(prompts)) / max(1, total - len(prompts) - accepted),
                "accepted": accepted / max(1, drafted),
                "drafted": drafted / max(1, drafts),
                "identical": [same, len(prompts)],
            }
        )
    return rows


def table(rows):
    header = ("requests", "system", "tok/s", "times plain", "95%", "steps", "tokens/step", "drafted", "identical")
    lines = [
        (
            row["batch"],
            row["system"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            "[{:.2f}, {:.2f}]".format(*row["ci95"]),
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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--args", default="--max-model-len=2048 --max-num-seqs=16", help="of vLLM, for all systems")
    parser.add_argument("--logs", type=Path, default=Path(".cache"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = load_base(str(options.base))
    bench = BenchConfig(kind=options.bench, path=options.path, questions=options.questions)
    prompts = [question.prompt_after(base) for question in load_questions(bench, base, None, 0)]
    servers, up, rows, missing = {}, {}, [], ""
    try:
        for number, system in enumerate(options.systems):
            servers[system] = server = started(system, options.port + number, options, options.logs)
            try:
                serve.wait_until_healthy(server.engine, server.address, server.log, 900)
                up[system] = server
            except ValueError as error:  # a control whose package is not there
                missing += f"\n{system}: {error}"
        for batch in options.batch:
            rows += measured(up, prompts, batch, options)
            keep(rows, options.out)
    finally:
        for server in servers.values():
            serve.end(server.engine)
    told(f"; {len(prompts)} questions, {options.tokens} tokens at most", table(rows) + missing)


if __name__ == "__main__":
    main()
