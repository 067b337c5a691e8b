"""The fixed-shape step against the eager one: same paths, same caches, same drafts."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Barrier
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import HEADS, SETTINGS, assert_entries_of_a_fresh_prefill, oracle_decoder, prompts, random_head
from torch.utils._python_dispatch import TorchDispatchMode

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode import captured
from ctcdraft.model.decode.captured import width_of
from ctcdraft.model.heads.head import OnePassHead

pytestmark = pytest.mark.slow

PLAIN = [s for s in SETTINGS if "repetition_penalty" not in s]


DRAFTS = [DraftConfig(kind, n, budget="fixed") for kind, n in (("tree", 1), ("tree", 23), ("chain", 4))]


def pair(base, head, draft):
    """The same decoder twice: eager, and in fixed shapes (on a GPU as CUDA graphs)."""
    eager, static = Decoder(base, head, draft), Decoder(base, head, draft)
    eager.graphs, static.graphs = False, True
    return eager, static


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_output_is_the_base_models_own_by_eager_steps_and_in_fixed_shapes(base, answers, config, draft):
    """The latter of heads of one pass. Eight prompts one by one, and four more together."""
    head = random_head(config, base)
    eager, static = pair(base, head, draft)
    together, tokens = zip(*answers[8:], strict=True)
    assert [out.tokens for out in eager.generate(together, 40)] == [*tokens]
    for prompt, tokens in answers[:8]:
        want = eager.generate(prompt, 40)
        assert want.tokens == tokens
        if isinstance(head, OnePassHead):
            got = static.generate(prompt, 40)
            assert (got.tokens, got.accepted, got.finish) == (want.tokens, want.accepted, want.finish)
            assert np.allclose(got.expected, want.expected, atol=1e-5)
            assert not static._captured.in_use.locked()


@pytest.mark.parametrize("settings", PLAIN, ids=str)
def test_right_drafts_are_accepted_in_fixed_shapes(base, settings):
    asked = prompts(4, seed=21)
    want = Decoder(base).generate(asked, 50, seed=[*range(4)], **settings)
    for number, (prompt, plain) in enumerate(zip(asked, want, strict=True)):
        scripted = oracle_decoder(base, plain.tokens + [5] * 10)
        scripted.graphs = True
        out = scripted.generate(prompt, 50, seed=number, **settings)
        assert (out.tokens, out.text, out.finish) == (plain.tokens, plain.text, plain.finish)
        assert len(plain.tokens) <= 10 or max(out.accepted) == 6


def test_every_cache_entry_is_that_of_a_fresh_prefill(base):
    prompt = prompts(1, seed=3)[0]
    truth = Decoder(base).generate(prompt, 40).tokens
    scripted, seen = oracle_decoder(base, truth + [5] * 10), []
    scripted.graphs = True

    def check(active, cache):
        seen.append(assert_entries_of_a_fresh_prefill(base, cache, prompt + truth))

    scripted.check = check
    assert scripted.generate(prompt, 40).tokens == truth
    assert len(seen) > 5


def test_plain_decoding_has_fixed_shapes_too(base):
    eager, static = pair(base, None, None)
    for number, prompt in enumerate(prompts(4)):
        for settings in PLAIN:
            want = eager.generate(prompt, 30, seed=number, **settings).tokens
            assert static.generate(prompt, 30, seed=number, **settings).tokens == want


def test_what_fixed_shapes_do_not_cover_is_decoded_eagerly(base):
    eager, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    asked = prompts(3, seed=33)
    assert [o.tokens for o in static.generate(asked, 20)] == [o.tokens for o in eager.generate(asked, 20)]
    penalty = {"repetition_penalty": 1.3}
    assert static.generate(asked[0], 20, **penalty).tokens == eager.generate(asked[0], 20, **penalty).tokens
    assert static._captured is None


def test_two_streams_of_one_decoder_do_not_share_their_memory(base):
    eager, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    a, b = prompts(2, seed=9)
    first, second = static.stream(a, 30), static.stream(b, 30)
    spans = [[], []]
    for _ in range(5):
        spans[0].append(next(first))
        spans[1].append(next(second))
    for span, rest, prompt in ((spans[0], first, a), (spans[1], second, b)):
        *more, last = rest
        assert last.tokens == eager.generate(prompt, 30).tokens == [t for s in (*span, *more) for t in s.tokens]
    abandoned = static.stream(a, 30)
    next(abandoned)
    abandoned.close()
    assert not static._captured.in_use.locked()


def test_two_threads_that_come_at_once_do_not_share_it_either(base, monkeypatch):
    eager, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    asked, both, honest = prompts(2, seed=9), Barrier(2), static._captured_step
    want = [eager.generate(prompt, 30).tokens for prompt in asked]
    assert static.generate(asked[0], 30).tokens == want[0]
    monkeypatch.setattr(static, "_captured_step", lambda *given: (honest(*given), both.wait(60))[0])
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda prompt: static.generate(prompt, 30).tokens, asked)] == want
    assert not static._captured.in_use.locked()


def test_a_longer_request_gets_a_longer_cache(base):
    eager, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    for prompt, limit in (([5, 6], 5), (prompts(1, seed=1)[0], 200), ([7], 10)):
        assert static.generate(prompt, limit).tokens == eager.generate(prompt, limit).tokens


def test_a_budget_chosen_per_step_moves_between_shapes(base):
    head = random_head(HEADS[0], base)
    static = Decoder(base, head, DraftConfig("tree", 24, budget="measured"))
    static.graphs = True
    static.prepare()
    assert {rows for rows, *_ in static._captured._shapes} == {1, 2, 3, 5, 9, 17, 25}
    chosen = set()
    for slope, prompt in zip((0.0, 0.01, 0.1, 0.3, 2.0), prompts(5, seed=70), strict=True):
        static.budget = 1 + slope * np.arange(25.0)
        out = static.generate(prompt, 40)
        assert out.tokens == Decoder(base).generate(prompt, 40).tokens
        chosen |= {round(e, 3) for e in out.expected}
    assert len(chosen) > 2


def test_widths_are_few_and_never_too_small():
    widths = [width_of(n) for n in range(1, 9000)]
    assert all(width >= n for n, width in enumerate(widths, 1))
    assert widths == sorted(widths)
    assert all(width <= max(256, 1.26 * n + 256) for n, width in enumerate(widths, 1))
    assert len(set(widths)) < 25


class Recorded(TorchDispatchMode):
    """The names of all operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "is_nonzero", "equal"}


@pytest.mark.parametrize("settings", PLAIN, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_no_operation_of_a_step_asks_the_device_for_a_value(tmp_path, family, settings):
    """What a CUDA graph cannot hold: a shape, a branch or a number that depends on data."""
    extra = {"sliding_window": 128, "pad_token_id": 0} if family == "gemma2" else {}
    base = load_base(str(write_base(tmp_path / "b", family, **extra)), dtype="fp64")
    _, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    static.generate([5, 6, 7], 12, **settings)
    (shape,) = static._captured._shapes.values()
    with Recorded() as seen, torch.no_grad():
        shape._verify()
        shape._draft()
    assert not seen.names & WAITING
    assert "sort" in seen.names
    with Recorded() as control:
        int(torch.ones(3).sum())
    assert control.names & WAITING


def test_graphs_are_made_and_run_on_the_device_of_the_base(base, monkeypatch):
    """Of another one than the current one a capture would hold nothing, and its replay would give the answer before."""
    _, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    prompt, current, seen = prompts(1)[0], ["another"], []
    want = static.generate(prompt, 12).tokens

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def graph_of(half):
        seen.append(current[-1])
        return lambda: (seen.append(current[-1]), half())

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(captured, "_graph_of", graph_of)
    monkeypatch.setattr(captured, "_sync_debug_mode", lambda mode: nullcontext())
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    static._captured.capture = True
    for shape in static._captured._shapes.values():
        shape.halves = []
    assert static.generate(prompt, 12).tokens == want
    assert len(seen) > 4
    assert set(seen) == {base.device}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: nothing is captured")
def test_a_base_that_waits_for_its_device_is_decoded_without_graphs(base, monkeypatch):
    eager, static = pair(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    prompt, hidden = prompts(1)[0], Base.hidden

    def waiting(self, *given, **options):
        states = hidden(self, *given, **options)
        return states * int(states.isfinite().all())

    monkeypatch.setattr(Base, "hidden", waiting)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        tokens = static.generate(prompt, 30).tokens
    assert tokens == eager.generate(prompt, 30).tokens
    assert torch.rand(2, device=base.device).isfinite().all()  # a capture that failed would have broken the generator
