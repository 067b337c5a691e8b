"""Many prompts decoded together: each as if it were alone, whatever shares the cache with it."""

import random
from collections import deque

import pytest
import torch
from transformers import GenerationConfig

from ctcdraft.model import Decoder, load_base
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.decode import generate
from ctcdraft.model.decode.generate import POSITIONS, batches_by_length, continue_all
from ctcdraft.model.decode.request import Request


def prompts(count, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(4, 260) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_short_sequences_are_not_padded_to_a_long_one():
    lengths = [8000, *[500] * 63, 40000]
    batches = batches_by_length([range(length) for length in lengths], 64)
    assert sorted(i for batch in batches for i in batch) == [*range(65)]
    assert batches[-1] == [64]
    assert all(len(batch) * max(lengths[i] for i in batch) <= POSITIONS for batch in batches[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_greedy_tokens_are_those_of_transformers(base_folder, rows, dtype):
    base = load_base(str(base_folder), dtype=dtype)
    waiting = deque(Request(p, limit) for p, limit in zip(prompts(16, 100), [1, 7, 30, 60] * 4, strict=True))
    asked = list(waiting)
    assert {id(one) for one in continue_all(base, waiting, rows)} == {id(one) for one in asked}
    for one in asked:
        settings = GenerationConfig(max_new_tokens=one.max_new_tokens, eos_token_id=[*base.eos_ids], pad_token_id=0)
        ids = torch.tensor([one.prompt])
        want = base.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert one.tokens == want[0, len(one.prompt) :].tolist()


def test_samples_are_what_the_decoder_draws_from_the_same_seeds(base):
    kinds = [Sampling(), Sampling(0.9, top_p=0.8), Sampling(0.7)]
    asked = [Request(p, 20, kinds[i % 3], seed=i // 2) for i, p in enumerate(prompts(9, 40, seed=3))]
    list(continue_all(base, deque(asked), 4))
    for one in asked:
        options = {"temperature": one.sampling.temperature, "top_p": one.sampling.top_p, "seed": one.seed}
        assert one.tokens == Decoder(base).generate(one.prompt, 20, **options).tokens


def test_what_is_appended_while_others_run_is_continued_too(base):
    first = prompts(5, 60, seed=4)
    waiting, done = deque(Request(p, 10) for p in first), []
    for one in continue_all(base, waiting, 2):
        done.append(one)
        if len(done) <= len(first):
            waiting.append(Request([*one.prompt, *one.tokens, 7], 150))  # more than the cache had room for
    assert len(done) == 2 * len(first)
    for one in done:
        assert one.tokens == Decoder(base).generate(one.prompt, one.max_new_tokens).tokens


def test_long_prompts_come_last_in_fewer_rows(base, monkeypatch):
    made, make = [], Decoder.eager_step
    monkeypatch.setattr(Decoder, "eager_step", lambda *given: made.append(make(*given)) or made[-1])
    monkeypatch.setattr(generate, "SHORT", 40)
    monkeypatch.setattr(generate, "ENTRIES", 8 * 40)
    waiting = deque(Request([5 + i] * length, 6) for i, length in enumerate([200, 9, 9, 120, 9, 60, 9]))
    done = []
    for one in continue_all(base, waiting, 8):
        done.append(one)
        if len(one.prompt) == 120:
            waiting.append(Request([*one.prompt, *one.tokens, *[7] * 114], 6))
    assert [len(step.cache.lengths) for step in made] == [8, 2, 1]
    assert [len(one.prompt) for one in done] == [9, 9, 9, 9, 60, 120, 200, 240]
    for one in done:
        assert one.tokens == Decoder(base).generate(one.prompt, 6).tokens


def test_what_a_prompt_shares_with_a_row_is_not_read_again(base):
    system, turn = prompts(1, 1, seed=5)[0] * 40, [9, 8, 7]
    read: list[int] = []
    decoder = base.model.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, __, options: read.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        waiting, done = deque(Request([*system, 5 + i], 6) for i in range(4)), []
        for one in continue_all(base, waiting, 2):
            done.append(one)
            if len(one.prompt) < 43:
                waiting.append(Request([*one.prompt, *one.tokens, *turn], 6))
    finally:
        hook.remove()
    assert sorted(count for count in read if count > 1) == [4, 4, 4, 4, 41]  # the last token of an answer was not read
    assert len(done) == 8
    for one in done:
        assert one.tokens == Decoder(base).generate(one.prompt, 6).tokens


def test_the_end_of_the_context_ends_an_answer(base):
    one = Request(prompts(1, 1)[0] * (base.context_length - 3), 50)
    list(continue_all(base, deque([one]), 2))
    assert one.tokens == Decoder(base).generate(one.prompt, 50).tokens


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_that_is_empty_or_leaves_no_room_is_refused(base, length):
    with pytest.raises(ValueError, match=f"a prompt has {length} tokens"):
        list(continue_all(base, deque([Request([5] * length, 4)]), 2))
