"""The base's own words through a server that fails, refuses, dies or is slow: nothing is lost or asked for twice."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import templates
from bases import tiny_tokenizer, write_base
from chat_server import ANSWERS, FAULTS, Handler, Server, serve
from commands import free_port
from regeneration import all_equal, config_of, conversations, done, lines
from workers import CONTEXT, preparing

from ctcdraft.data import server as http
from ctcdraft.data.records import conversation_of
from ctcdraft.data.server import Answer
from ctcdraft.data.store import load_corpus, read_jsonl, read_manifest
from ctcdraft.data.template import Rendered, with_template_args
from ctcdraft.model import load_base
from ctcdraft.train.prepare import prepare
from ctcdraft.train.regenerate import Dialogue

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(talking_base):
    return load_base(str(talking_base))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.2)


@contextmanager
def serving(base, **options):
    server = Server(base, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
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
        options = through(server, concurrency=64)
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


def own_server(base_at, port):
    process = CONTEXT.Process(target=serve, args=(str(base_at), port), daemon=True)
    process.start()
    return process


def transformers_server(base_at, port):
    if not all(find_spec(name) for name in ("fastapi", "uvicorn", "accelerate")):
        pytest.skip("transformers[serving] is not installed")
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", str(base_at)]
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", *options]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def until(answers, port):
    """Wait for a server to answer, or to be gone."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if (s.connect_ex(("127.0.0.1", port)) == 0) == answers:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not start, or end")


@pytest.mark.parametrize("kind", [own_server, transformers_server])
def test_a_server_killed_and_restarted_midway_changes_nothing(talking_base, base, tmp_path, kind):
    port = free_port()
    options = {"url": f"http://127.0.0.1:{port}/v1", "concurrency": 4, "timeout": 60.0, "retries": 5000}
    config = config_of(tmp_path, count=48, regenerate={**options, "model": str(talking_base)})
    server, cache = kind(talking_base, port), tmp_path / "cut"
    until(True, port)
    worker = preparing(base, config, cache)
    worker.start()
    while lines(cache) + 20 * done(cache) < 15:
        assert worker.is_alive()
        time.sleep(0.005)
    server.kill()
    until(False, port)
    time.sleep(0.5)
    assert worker.is_alive()
    server = kind(talking_base, port)
    try:
        worker.join()
        assert worker.exitcode == 0
        want = prepare(base, config, 0, tmp_path / "whole")
    finally:
        server.kill()
    assert all_equal(cache / want.name, want)
    assert read_manifest(want)["turns"]["errors"] == 0
    assert read_manifest(want)["turns"]["answered"] > 48


def test_a_client_killed_midway_asks_for_nothing_twice(base, tmp_path):
    with serving(base) as server:
        config = config_of(tmp_path, count=80, regenerate=through(server, timeout=20.0))
        want = prepare(base, config, 0, tmp_path / "whole")
        asked = sum(server.asked.values())
        server.asked.clear()
        ANSWERS.clear()  # or the kills come too late
        cache, kills = tmp_path / "cut", 0
        for at in (5, 30):
            worker = preparing(base, config, cache)
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
        asked = {json.dumps(body["messages"]) for body in sampled}  # a busy machine may have to ask twice
        assert len({body["seed"] for body in sampled}) == len(asked)
        server.bodies.clear()
        prepare(base, config_of(tmp_path, 12, regenerate=through(server)), 0, tmp_path / "b")
        assert {body["model"] for body in server.bodies} == {"tiny"}
        assert not any("seed" in body for body in server.bodies)


ASKED = [{"turns": [f"ask {i}"]} for i in range(9)]
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


@pytest.fixture(scope="module")
def thinking_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking") / "b"
    write_base(folder, context=512, vocab_size=262)
    tiny_tokenizer(templates.thinking("thinking"), ("<|im_start|>", "<|im_end|>")).save_pretrained(folder)
    return load_base(str(folder))


def labels_of(base, tmp_path, monkeypatch, message, finish="stop", rows=ASKED):
    """(the labels of the first sequence as text, its manifest, what the server was asked) where it says that."""
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    monkeypatch.setattr(Handler, "_answer", lambda *_: json.dumps({"choices": [choice]}).encode())
    with serving(base) as server:
        folder = prepare(base, config_of(tmp_path, rows=rows, regenerate=through(server)), 0, tmp_path / "cache")
    ids, mask, _ = load_corpus(folder, "train")[0]
    return base.tokenizer.decode(ids[mask == 1].tolist()), read_manifest(folder), server.bodies


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_servers_thought_is_a_label_whatever_the_server_calls_it(thinking_base, tmp_path, monkeypatch, key):
    message = {"content": "hello", key: "let me see", "annotations": [], "audio": None, "provider": "x"}
    labels, manifest, _ = labels_of(thinking_base, tmp_path, monkeypatch, message)
    assert labels == "<think>let me see</think>hello<|im_end|>"
    assert set(manifest["unread"]) == {"answer.provider"}


@pytest.mark.parametrize("said", [{"tool_calls": [CALL]}, {"function_call": CALL["function"]}])
def test_a_servers_call_is_a_label_as_the_template_writes_it(thinking_base, tmp_path, monkeypatch, said):
    message = {"content": None, "reasoning": "hm", **said}
    labels, _, _ = labels_of(thinking_base, tmp_path, monkeypatch, message, next(iter(said)))
    assert labels == '<think>hm</think><call>{"name": "clock", "arguments": {"zone": "UTC"}}</call><|im_end|>'


def test_a_servers_own_answer_goes_back_to_it_as_openai_writes_it(thinking_base, tmp_path, monkeypatch):
    rows = [{"turns": [f"ask {i}", "again"]} for i in range(9)]
    message = {"content": "", "reasoning": "hm", "tool_calls": [CALL]}
    _, _, bodies = labels_of(thinking_base, tmp_path, monkeypatch, message, rows=rows)
    sent = next(body["messages"][1] for body in bodies if len(body["messages"]) == 3)
    assert sent == {
        "role": "assistant",
        "content": "",
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("turns", ["each", "last"])
def test_through_a_server_each_turn_is_learned_as_it_was_when_it_was_the_last(tmp_path, monkeypatch, turns):
    write_base(tmp_path / "b", context=512, vocab_size=264)
    tiny_tokenizer(templates.QWEN_3, ("<|im_start|>", "<|im_end|>", "<think>", "</think>")).save_pretrained(
        tmp_path / "b"
    )
    base, rows = load_base(str(tmp_path / "b")), [{"turns": [f"ask {i}", "again"]} for i in range(9)]
    message = {"role": "assistant", "content": "hello", "reasoning": "hm"}
    choice = {"message": message, "finish_reason": "stop"}
    monkeypatch.setattr(Handler, "_answer", lambda *_: json.dumps({"choices": [choice]}).encode())
    with serving(base) as server:
        config = config_of(tmp_path, rows=rows, regenerate=through(server), turns=turns)
        folder = prepare(base, config, 0, tmp_path / "cache")
    corpus, manifest = load_corpus(folder, "train"), read_manifest(folder)
    texts = {
        templates.shown(base.tokenizer, Rendered(*(column.tolist() for column in corpus[i][:2]))) for i in range(2)
    }
    answer = "<|im_start|>assistant\n[[<think>\nhm\n</think>\n\nhello<|im_end|>]]"
    asked = min(texts, key=len).split("<|im_end|>")[0]
    first = f"{asked}<|im_end|>\n{answer}"
    last = f"{asked}<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n{answer}"
    assert texts == {first, last} if turns == "each" else last in texts
    turns = manifest["turns"]
    assert turns["asked"] == turns["answered"] > 0
    assert manifest["unread"] == {}


def test_template_args_reach_the_base_here_and_a_server_alike(tmp_path):
    write_base(tmp_path / "b", context=512, vocab_size=264, eos_token_id=1)
    tiny_tokenizer(templates.SWITCHED, templates.SWITCHED_SPECIALS).save_pretrained(tmp_path / "b")
    plain, prompts = load_base(str(tmp_path / "b")), {}
    for off in (False, True):
        args = {"enable_thinking": False} if off else {}
        base, place = with_template_args(plain, args), tmp_path / str(off)
        here = prepare(base, config_of(tmp_path, 12, template_args=args or None), 0, place / "here")
        with serving(base) as server:
            config = config_of(tmp_path, 12, regenerate=through(server), template_args=args or None)
            there = prepare(base, config, 0, place / "there")
        assert all(body.get("chat_template_kwargs") == (args or None) for body in server.bodies)
        prompts[off] = {
            base.tokenizer.decode(ids[: mask.tolist().index(1)])
            for corpus in (load_corpus(here, "train"), load_corpus(there, "train"))
            for ids, mask, _ in (corpus[i] for i in range(len(corpus)))
        }
    assert all(text.endswith("assistant\n<think>") for text in prompts[False])
    assert all(text.endswith("assistant\n<think></think>") for text in prompts[True])


@pytest.mark.parametrize(
    ("message", "labels"),
    [
        ({"content": "hello", "reasoning": "hm"}, "<think>hm</think>hello"),
        ({"content": None, "reasoning": "let me think"}, "<think>let me think"),
    ],
)
def test_labels_of_a_cut_answer_are_its_own_words(thinking_base, tmp_path, monkeypatch, message, labels):
    assert labels_of(thinking_base, tmp_path, monkeypatch, message, "length")[0] == labels


@pytest.mark.parametrize(
    ("template", "said", "cut", "before"),
    [
        (templates.QWEN_3, "<think>\nlet me th", True, ""),
        (templates.QWEN_3, "<think>\nlet me think\n</think>\n\nhel", True, ""),
        (templates.QWEN_3, "<think>\nlet me think\n</think>\n\nhello", False, ""),
        (templates.R1, "let me think\n</think>\n\nhel", True, ""),
        (templates.R1, "let me think\n</think>\n\nhello", False, ""),
        (templates.SWITCHED, "let me th", True, ""),  # behind the <think> of the prompt
        (templates.SWITCHED, "let me think</think>hello", False, ""),
        (templates.SWITCHED, "hello", False, "</think>"),  # the thought was kept back: it is not this
    ],
)
def test_a_thought_that_no_parser_took_off_is_learned_as_it_was_said(tmp_path, template, said, cut, before):
    write_base(tmp_path / "b", context=512, vocab_size=264)
    tiny_tokenizer(template, templates.SWITCHED_SPECIALS).save_pretrained(tmp_path / "b")
    dialogue = Dialogue(load_base(str(tmp_path / "b")), conversation_of({"turns": ["ask"]}, 0), 0.0, 0)
    assert dialogue.next_prompt()
    dialogue.answer_text(Answer({"role": "assistant", "content": said}, cut))
    (example,) = dialogue.examples("each")
    ids, start = list(example.ids), len(dialogue.prompt)
    assert (ids[:start], example.mask[:start]) == (dialogue.prompt, [0] * start)
    assert dialogue.base.tokenizer.decode(ids[start:]) == before + said + ("" if cut else "<|im_end|>")
    assert all(example.mask[start:])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "what the answer gives to f is no JSON"),
        ({"content": [{"type": "audio", "data": "x"}]}, "the answer holds a part that is no text"),
    ],
)
def test_what_a_server_says_in_no_form_that_is_known_is_refused_once(
    thinking_base, tmp_path, monkeypatch, message, reason
):
    with pytest.raises(ValueError, match=f"7 of 7 requests were refused .*{reason}"):
        labels_of(thinking_base, tmp_path, monkeypatch, message, rows=[{"turns": [f"ask {i}"]} for i in range(9)])


def test_a_thought_that_the_template_does_not_show_is_no_label(base, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a thought, which the chat template does not show"):
        labels_of(base, tmp_path, monkeypatch, {"content": "hello", "reasoning": "hm"})
