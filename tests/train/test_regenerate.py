"""The base's own words, here and through a server: interrupted anywhere, nothing is lost or said twice."""

import json
import multiprocessing
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from bases import tiny_tokenizer, write_base
from chat_server import FAULTS, Handler, Server
from transformers import AutoModelForCausalLM

from ctcdraft.data import server as http
from ctcdraft.data.records import conversation_of
from ctcdraft.data.store import Journal, load_corpus, read_jsonl, read_manifest
from ctcdraft.model import Decoder, load_base
from ctcdraft.train import regenerate as stage
from ctcdraft.train.prepare import prepare
from ctcdraft.train.regenerate import RegenerateConfig, rewrite
from ctcdraft.train.shards import DataConfig

FORK = multiprocessing.get_context("fork")
SERVER = Path(__file__).parents[1] / "chat_server.py"


@pytest.fixture(scope="module")
def base_at(tmp_path_factory):
    """A base that says letters only, and ends about half of its answers: text and tokens tell the same."""
    folder = write_base(tmp_path_factory.mktemp("chat") / "b", eos_token_id=1, initializer_range=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    letters = tiny_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[[i for i in range(len(weight)) if i not in {*letters, 1}]] = 0.0
        weight[1] *= 1.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(base_at):
    return load_base(str(base_at))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.2)


def conversations(count, turns=2):
    rows = []
    for i in range(count):
        said = [{"from": who, "value": f"{who} {i} {t}"} for t in range(turns) for who in ("human", "gpt")]
        rows.append({"conversations": said})
    return rows


def config_of(tmp_path, count=60, rows=None, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows or conversations(count)))
    rewriting = RegenerateConfig(**options.pop("regenerate", {}))
    sizes = {"max_new_tokens": 8, "holdout": 0.2, "batch_size": 4, "shard_rows": 16, **options}
    return DataConfig(kind="sharegpt", path=str(path), regenerate=rewriting, **sizes)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def kept(folder):
    return {k: v for k, v in read_manifest(folder).items() if k != "options"}


def all_equal(folder, other):
    assert kept(folder) == kept(other)
    assert files(folder) == files(other)
    return True


def work_of(base, config, cache):
    torch.set_num_threads(1)
    prepare(base, config, 0, cache)


def lines(cache):
    return sum(len(path.read_bytes().splitlines()) for path in cache.glob("*.work/*.journal"))


def done(cache):
    return len([path for path in cache.glob("*.work/?????") if path.is_dir()])


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.8, 0.8]])
def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(base, tmp_path, temperatures, monkeypatch):
    config = config_of(tmp_path, regenerate={"temperatures": temperatures})
    log = tmp_path / "batches"
    honest = stage.continue_batch

    def logged(base, prompts, *rest, **options):
        answers = honest(base, prompts, *rest, **options)
        time.sleep(0.02)
        with log.open("a") as stream:
            stream.write(json.dumps([prompts, options]) + "\n")
        return answers

    monkeypatch.setattr(stage, "continue_batch", logged)
    want = prepare(base, config, 0, tmp_path / "whole")
    batches = len(log.read_text().splitlines())
    log.unlink()
    rng, cache = random.Random(7), tmp_path / "cut"
    for kill in range(5):
        process = FORK.Process(target=work_of, args=(base, config, cache))
        process.start()
        enough = (kill + rng.random()) * batches / 6
        while process.is_alive() and (not log.exists() or len(log.read_text().splitlines()) < enough):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    folder = prepare(base, config, 0, cache)
    assert all_equal(folder, want)
    assert len(log.read_text().splitlines()) <= batches + 5  # what was in flight, and no more, is done again
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_two_processes_share_the_shards_and_give_the_bytes_of_one(base, tmp_path):
    config = config_of(tmp_path, count=100)
    want = prepare(base, config, 0, tmp_path / "one")
    workers = [FORK.Process(target=work_of, args=(base, config, tmp_path / "two")) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert all_equal(tmp_path / "two" / want.name, want)


def test_a_worker_that_dies_leaves_its_shard_to_the_other(base, tmp_path):
    config = config_of(tmp_path, count=100)
    want = prepare(base, config, 0, tmp_path / "one")
    workers = [FORK.Process(target=work_of, args=(base, config, tmp_path / "two")) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.4)
    workers[0].kill()
    workers[1].join()
    assert all_equal(tmp_path / "two" / want.name, want)


def test_a_sample_depends_on_its_seed_alone_and_every_temperature_has_its_own(base, tmp_path):
    config = config_of(tmp_path, count=20, regenerate={"temperatures": [0.0, 1.0, 1.0]})
    torch.manual_seed(1)
    first = prepare(base, config, 0, tmp_path / "a")
    torch.manual_seed(2)
    assert all_equal(prepare(base, config, 0, tmp_path / "b"), first)
    other = prepare(base, config, 1, tmp_path / "c")
    assert files(other)["train.safetensors"] != files(first)["train.safetensors"]
    corpus = load_corpus(first, "train")
    greedy, one, two = (corpus[i].ids.tolist() for i in range(3))
    prompt = corpus[0].mask.tolist().index(1)
    assert greedy[:prompt] == one[:prompt] == two[:prompt]
    assert len({tuple(x) for x in (greedy, one, two)}) == 3


def test_samples_do_not_depend_on_their_batch(base, tmp_path):
    options = {"count": 20, "regenerate": {"temperatures": [0.0, 1.0]}}
    want = prepare(base, config_of(tmp_path, batch_size=1, **options), 0, tmp_path / "a")
    for size in (3, 64):
        folder = prepare(base, config_of(tmp_path, batch_size=size, **options), 0, tmp_path / str(size))
        assert folder.name == want.name
        assert files(folder) == files(want)


def test_a_long_prompt_cuts_no_answer_but_its_own(base, tmp_path):
    journal, most = Journal(tmp_path / "journal"), 40
    prompts = [[5 + i % 200 for i in range(n)] for n in (30, 200, 230, 250)]
    work = [(prompt, 0.0, str(i)) for i, prompt in enumerate(prompts)]
    together = dict(stage.continued(base, work, 1.0, journal, max_new_tokens=most, batch_size=4, seed=0))
    for number, prompt in enumerate(prompts):
        room = min(most, base.context_length - len(prompt))
        assert together[number] == Decoder(base).generate(prompt, room).tokens


@contextmanager
def serving(base, **options):
    server = Server(base, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def through(server, **options):
    return {"url": server.url, "concurrency": 4, "timeout": 1.0, **options}


def test_a_server_gives_the_same_answers_as_the_base_here(base, tmp_path):
    with serving(base) as server:
        folder = prepare(base, config_of(tmp_path, regenerate=through(server)), 0, tmp_path / "a")
    here = prepare(base, config_of(tmp_path), 0, tmp_path / "b")
    got, want = load_corpus(folder, "train"), load_corpus(here, "train")
    assert got.ids.tolist() == want.ids.tolist()
    assert got.mask.tolist() == want.mask.tolist()
    turns = read_manifest(folder)["turns"]
    assert turns == read_manifest(here)["turns"]
    assert turns["answered"] > len(got)  # some had a second turn
    assert turns["skipped"] > 0  # some were cut


def test_every_fault_of_a_server_is_tried_again_and_nothing_is_lost(base, tmp_path):
    with serving(base) as server:
        want = prepare(base, config_of(tmp_path, 12, regenerate=through(server)), 0, tmp_path / "a")
    with serving(base, faults=FAULTS) as server:
        options = through(server, concurrency=64, timeout=2.0)
        folder = prepare(base, config_of(tmp_path, 12, regenerate=options), 0, tmp_path / "b")
    assert all_equal(folder, want)
    turns = read_manifest(folder)["turns"]
    assert turns["refused"] == turns["errors"] == 0
    assert turns["asked"] == turns["answered"] + turns["skipped"]


def test_what_a_server_refuses_is_rejected_with_its_words_and_counted(base, tmp_path):
    rows = conversations(24)
    with serving(base, refuse=("human 7 0", "human 9 1")) as server:
        config = config_of(tmp_path, rows=rows, regenerate=through(server), holdout=0.05)
        folder = prepare(base, config, 0, tmp_path / "a")
    manifest = read_manifest(folder)
    reasons = {row["row"]: row["reason"] for row in read_jsonl(folder / "rejects.jsonl")}
    assert "refuses: 400" in reasons["7"]
    assert "too long for me" in reasons["7"]
    assert "9" not in reasons  # its first answer is kept
    turns = manifest["turns"]
    assert turns["refused"] >= 1
    assert turns["asked"] == turns["answered"] + turns["refused"] + turns["skipped"]
    assert manifest["used"] + manifest["rejected"] == manifest["read"] == 24


def test_a_server_that_never_answers_stops_the_work_and_keeps_what_there_is(base, tmp_path):
    with serving(base, faults=["error"] * 99) as server:
        config = config_of(tmp_path, regenerate=through(server, retries=1))
        with pytest.raises(ValueError, match=r"turns got no answer .*failed 2 times, the last time: 500 out of memory"):
            prepare(base, config, 0, tmp_path / "a")
        assert len(server.asked) <= 2 * 4  # as many as may run at once twice over; then nobody is kept waiting
        server.faults = ()
        assert read_manifest(prepare(base, config, 0, tmp_path / "a"))["rejected"] == 0


def test_what_a_server_failed_at_is_asked_again_by_the_next_run_and_nothing_else(base, tmp_path):
    with serving(base) as server:
        config = config_of(tmp_path, regenerate=through(server, retries=0))
        want = prepare(base, config, 0, tmp_path / "a")
        honest = dict(server.asked)
        server.asked.clear()
        server.broken = ("human 3 0", "human 41 0", "human 58 1")
        for _ in range(2):
            with pytest.raises(ValueError, match="the same command asks for these again") as stopped:
                prepare(base, config, 0, tmp_path / "b")
        numbers = re.search(
            r"asked (\d+) = answered (\d+) \+ refused 0 \+ errors (\d+) \+ skipped (\d+)", str(stopped.value)
        )
        asked, *parts = map(int, numbers.groups())
        assert asked == sum(parts) == read_manifest(want)["turns"]["asked"]
        failed = {key: count for key, count in server.asked.items() if count > 1}
        assert list(failed.values()) == [2] * parts[1]
        assert all(any(word in key for word in server.broken) for key in failed)
        server.broken = ()
        assert all_equal(prepare(base, config, 0, tmp_path / "b"), want)
    assert dict(server.asked) == {key: 3 if key in failed else 1 for key in honest}


def test_errors_are_rejects_only_where_asked_for(base, tmp_path):
    with serving(base, broken=("human 3 0",)) as server:
        options = through(server, retries=0)
        with pytest.raises(ValueError, match="reject_errors=true rejects them"):
            prepare(base, config_of(tmp_path, 24, regenerate=options), 0, tmp_path / "a")
        options["reject_errors"] = True
        folder = prepare(base, config_of(tmp_path, 24, regenerate=options), 0, tmp_path / "a")
    manifest, (reject,) = read_manifest(folder), read_jsonl(folder / "rejects.jsonl")
    turns = manifest["turns"]
    assert reject["row"] == "3"
    assert "500 out of memory" in reject["reason"]
    assert (manifest["read"], manifest["rejected"], turns["errors"]) == (24, 1, 1)
    assert turns["asked"] == turns["answered"] + turns["errors"] + turns["skipped"]


def test_a_key_that_is_missing_is_no_reject(base, tmp_path, monkeypatch):
    def unauthorised(handler):
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler._send(b"who are you?", 401)

    monkeypatch.setattr(Handler, "do_POST", unauthorised)
    with serving(base) as server, pytest.raises(ValueError, match="401 who are you"):
        prepare(base, config_of(tmp_path, regenerate=through(server)), 0, tmp_path / "a")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def own_server(base_at, port):
    return [str(SERVER), str(base_at), str(port)]


def transformers_server(base_at, port):
    if not all(find_spec(name) for name in ("fastapi", "uvicorn", "accelerate")):
        pytest.skip("transformers[serving] is not installed")
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", str(base_at)]
    return ["-m", "transformers.cli.transformers", "serve", *options]


def started(words, port):
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("kind", [own_server, transformers_server])
def test_a_server_killed_and_restarted_midway_changes_nothing(base_at, base, tmp_path, kind):
    port = free_port()
    words = kind(base_at, port)
    options = {"url": f"http://127.0.0.1:{port}/v1", "concurrency": 4, "timeout": 60.0, "retries": 5000}
    config = config_of(tmp_path, count=48, regenerate={**options, "model": str(base_at)})
    server, cache = started(words, port), tmp_path / "cut"
    worker = FORK.Process(target=work_of, args=(base, config, cache))
    worker.start()
    while lines(cache) + 20 * done(cache) < 15:
        assert worker.is_alive()
        time.sleep(0.005)
    server.kill()
    server.wait()
    time.sleep(0.5)
    assert worker.is_alive()
    server = started(words, port)
    try:
        worker.join()
        assert worker.exitcode == 0
        want = prepare(base, config, 0, tmp_path / "whole")
    finally:
        server.kill()
        server.wait()
    assert all_equal(cache / want.name, want)
    assert read_manifest(want)["turns"]["errors"] == 0
    assert read_manifest(want)["turns"]["answered"] > 48


def test_a_client_killed_midway_asks_for_nothing_twice(base, tmp_path):
    with serving(base) as server:
        config = config_of(tmp_path, count=80, regenerate=through(server, timeout=20.0))
        want = prepare(base, config, 0, tmp_path / "whole")
        asked = sum(server.asked.values())
        server.asked.clear()
        cache, kills = tmp_path / "cut", 0
        for at in (5, 30):
            worker = FORK.Process(target=work_of, args=(base, config, cache))
            worker.start()
            while worker.is_alive() and lines(cache) + 20 * done(cache) < at:
                time.sleep(0.002)
            kills += worker.is_alive()
            worker.kill()
            worker.join()
        folder = prepare(base, config, 0, cache)
        assert kills == 2
        assert all_equal(folder, want)
        assert sum(server.asked.values()) <= asked + 2 * 4  # what was in flight


def test_requests_carry_what_was_asked_for(base, tmp_path):
    options = {"temperatures": [0.0, 0.7], "top_p": 0.9, "model": "mine"}
    with serving(base) as server:
        prepare(base, config_of(tmp_path, 12, regenerate=through(server, **options)), 0, tmp_path / "a")
        sampled = [body for body in server.bodies if body["temperature"]]
        assert sampled
        assert all(body["model"] == "mine" and body["top_p"] == 0.9 for body in sampled)
        assert len({body["seed"] for body in sampled}) == len(sampled)
        server.bodies.clear()
        prepare(base, config_of(tmp_path, 12, regenerate=through(server)), 0, tmp_path / "b")
        assert {body["model"] for body in server.bodies} == {"tiny"}
        assert not any("seed" in body for body in server.bodies)


def test_a_journal_forgets_the_half_line_of_a_killed_process(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    journal.put("a", [1, 2])
    journal.put("b", ["é"])
    journal.close()
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        again = Journal(path)
        assert again.get("b") is None
        again.put("c", 3)
        again.close()
        assert Journal(path).get("c") == 3
        assert (Journal(path).get("a") == [1, 2]) == (end > whole.index(b"\n"))


def said(*roles):
    return conversation_of({"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}, 0)


def rewritten(base, tmp_path, conversation, **options):
    journal = Journal(tmp_path / "journal")
    sizes = {"max_new_tokens": 8, "batch_size": 4, "seed": 0, "title": ""}
    (dialogue,), turns = rewrite(base, [conversation], RegenerateConfig(**options), journal, **sizes)
    return dialogue, turns


def test_nothing_follows_a_tool_that_the_base_may_not_have_called(base, tmp_path):
    dialogue, turns = rewritten(base, tmp_path, said("user", "assistant", "tool", "assistant", "user", "assistant"))
    assert (turns.asked, turns.answered, turns.skipped) == (2, 1, 1)
    assert dialogue.reason == "answer 1 was cut" or "same tool" in dialogue.reason
    assert len(dialogue.examples(last_turn=False)) == 1


def test_prompts_alone_are_answered_in_turn(base, tmp_path):
    conversation = conversation_of({"turns": ["one", "two"]}, 0)
    dialogue, turns = rewritten(base, tmp_path, conversation)
    assert turns.answered >= 1
    assert [m["role"] for m in dialogue.said][:3] == ["user", "assistant", "user"][: len(dialogue.said)]


def test_a_template_that_rewrites_history_gives_a_sequence_per_turn(base, tmp_path):
    forgetful = tiny_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}"
        "{{ m['content'] if loop.last else '...' }}</s>{% endgeneration %}{% else %}<u>{{ m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    dialogue, turns = rewritten(replace(base, tokenizer=forgetful), tmp_path, said("user", "assistant", "user"))
    sequences = dialogue.examples(last_turn=False)
    assert turns.answered == len(sequences)
    if turns.answered == 2:
        assert "<a>...</s>" in forgetful.decode(sequences[1].ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": []}, "temperatures"),
        ({"temperatures": [-1.0]}, "temperatures"),
        ({"url": "localhost:80"}, "give http://"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RegenerateConfig(**options)
