"""The base's own words: interrupted anywhere, nothing is lost or said twice."""

import random
import signal
import time
from collections import deque
from dataclasses import replace

import pytest
import torch
from bases import tiny_tokenizer
from pydantic import TypeAdapter
from regeneration import all_equal, config_of, files
from workers import logged_answers, preparing, wait_for

from ctcdraft.data.records import conversation_of
from ctcdraft.data.server import ChatServer, Refusal
from ctcdraft.data.store import Journal, load_corpus
from ctcdraft.model import Decoder, load_base
from ctcdraft.model.decode import generate
from ctcdraft.train.prepare import DataConfig, prepare
from ctcdraft.train.regenerate import Dialogue, RegenerateConfig, rewrite

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(talking_base):
    return load_base(str(talking_base))


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.8, 0.8]])
def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(base, tmp_path, temperatures, monkeypatch):
    config = config_of(tmp_path, regenerate={"temperatures": temperatures})
    log = tmp_path / "answers"
    monkeypatch.setattr(generate, "continue_all", logged_answers(log))
    want = prepare(base, config, 0, tmp_path / "whole")
    answers = len(log.read_text().splitlines())
    log.unlink()
    rng, cache = random.Random(7), tmp_path / "cut"
    for kill in range(5):
        process = preparing(base, config, cache, log)
        process.start()
        enough = (kill + rng.random()) * answers / 6
        while process.is_alive() and (not log.exists() or len(log.read_text().splitlines()) < enough):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    folder = prepare(base, config, 0, cache)
    assert all_equal(folder, want)
    assert len(log.read_text().splitlines()) <= answers + 5  # none that is in the journal is decoded again
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_two_processes_share_the_shards_and_give_the_bytes_of_one(base, tmp_path):
    config = config_of(tmp_path, count=100)
    want = prepare(base, config, 0, tmp_path / "one")
    workers = [preparing(base, config, tmp_path / "two") for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert all_equal(tmp_path / "two" / want.name, want)


def test_a_worker_that_dies_leaves_its_shard_to_the_other(base, tmp_path):
    config = config_of(tmp_path, count=100)
    want = prepare(base, config, 0, tmp_path / "one")
    log = tmp_path / "answers"
    workers = [preparing(base, config, tmp_path / "two", log) for _ in range(2)]
    for worker in workers:
        worker.start()
    wait_for(log)
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
    work = deque((i, prompt, 0.0, str(i)) for i, prompt in enumerate(prompts))
    together = dict(generate.continued(base, work, 1.0, journal, max_new_tokens=most, batch_size=4, seed=0))
    for number, prompt in enumerate(prompts):
        room = min(most, base.context_length - len(prompt))
        assert together[number] == Decoder(base).generate(prompt, room).tokens


def test_a_few_refusals_of_a_server_are_rejects_and_many_end_the_work(base, tmp_path, monkeypatch):
    async def refuses(*_, **__):
        raise Refusal("400 too long for me")

    monkeypatch.setattr(ChatServer, "answer", refuses)
    journal, config = Journal(tmp_path / "journal"), config_of(tmp_path, regenerate={"url": "http://host/v1"})
    asked = [conversation_of({"turns": [f"ask {i}"]}, i) for i in range(5)]
    dialogues, turns = rewrite(base, asked[:4], config, journal, seed=0, title="")
    assert {dialogue.reason for dialogue in dialogues} == {"400 too long for me"}
    assert turns["refused"] == turns["asked"] == 4
    with pytest.raises(ValueError, match=r"5 of 5 requests were refused \(400 too long for me"):
        rewrite(base, asked, config, journal, seed=0, title="")


def test_a_journal_forgets_the_half_line_of_a_killed_process(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    journal["a"] = [1, 2]
    journal["b"] = ["é"]
    journal.close()
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        again = Journal(path)
        assert again.get("b") is None
        again["c"] = 3
        again.close()
        assert Journal(path).get("c") == 3
        assert (Journal(path).get("a") == [1, 2]) == (end > whole.index(b"\n"))


def said(*roles):
    return conversation_of({"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}, 0)


def rewritten(base, tmp_path, conversation, **options):
    journal = Journal(tmp_path / "journal")
    config = DataConfig(regenerate=RegenerateConfig(**options), max_new_tokens=8, batch_size=4)
    (dialogue,), turns = rewrite(base, [conversation], config, journal, seed=0, title="")
    return dialogue, turns


def test_nothing_follows_a_tool_that_the_base_may_not_have_called(base, tmp_path):
    dialogue, turns = rewritten(base, tmp_path, said("user", "assistant", "tool", "assistant", "user", "assistant"))
    assert (turns["asked"], turns["answered"], turns["skipped"]) == (2, 1, 1)
    assert dialogue.reason == "answer 1 was cut" or "same tool" in dialogue.reason
    assert len(dialogue.examples("each")) == 1


@pytest.mark.parametrize("off", [0, 1])
def test_an_answer_that_is_not_to_be_learned_is_rewritten_and_has_no_label(base, off):
    chat = said("user", "assistant", "user", "assistant")
    chat.messages[2 * off + 1]["label"] = False
    dialogue = Dialogue(base, chat, 0.0, 0)
    prompts, answers = [], ([70, 71, base.eos_ids[0]], [72, base.eos_ids[0]])
    for answer in answers:
        assert dialogue.next_prompt()
        prompts.append(dialogue.prompt)
        dialogue.answer(answer)
    (example,) = dialogue.examples("each")
    assert example.ids == [*prompts[1], *answers[1]]
    start = len(prompts[1 - off])
    assert [i for i, m in enumerate(example.mask) if m] == list(range(start, start + len(answers[1 - off])))
    last = dialogue.examples("last")
    assert last == ([] if off else [example])


def test_prompts_alone_are_answered_in_turn(base, tmp_path):
    conversation = conversation_of({"turns": ["one", "two"]}, 0)
    dialogue, turns = rewritten(base, tmp_path, conversation)
    assert turns["answered"] >= 1
    assert [m["role"] for m in dialogue.said][:3] == ["user", "assistant", "user"][: len(dialogue.said)]


def test_a_template_that_rewrites_history_gives_a_sequence_per_turn(base, tmp_path):
    forgetful = tiny_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}"
        "{{ m['content'] if loop.last else '...' }}</s>{% endgeneration %}{% else %}<u>{{ m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    dialogue, turns = rewritten(replace(base, tokenizer=forgetful), tmp_path, said("user", "assistant", "user"))
    sequences = dialogue.examples("each")
    assert dialogue.examples("last") == sequences[-1:]
    assert turns["answered"] == len(sequences)
    if turns["answered"] == 2:
        assert "<a>...</s>" in forgetful.decode(sequences[1].ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": []}, "temperatures"),
        ({"temperatures": [-1.0]}, "temperatures"),
        ({"url": "localhost:80"}, "give http://"),
        ({"url": "http://host:80a/v1"}, "give http://"),
        ({"url": "http://[::1/v1"}, "give http://"),
        ({"url": "http:///v1"}, "give http://"),
        ({"url": "http://host/v1 "}, "give http://"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(RegenerateConfig).validate_python(options)
