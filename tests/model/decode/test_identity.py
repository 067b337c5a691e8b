"""Speculative output is plain output, token for token: hundreds of prompts, trees, budgets and settings."""

from itertools import chain

import numpy as np
import pytest
from bases import write_base
from drafting import HEADS, prompts, random_head, random_trees

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.draft.grafts import Phrases
from ctcdraft.model.heads.head import OnePassHead

pytestmark = pytest.mark.slow

PROMPTS = 40
GREEDY = {"eos": []}
SAMPLED = [{"temperature": t, "top_p": p, "eos": []} for t, p in ((0.3, 0.95), (0.7, 0.9), (1.0, 0.8))]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def wordy_base(request, tmp_path_factory):
    """It never ends by itself, so that many tokens are compared."""
    folder = write_base(tmp_path_factory.mktemp("wordy") / request.param, request.param, eos_token_id=259)
    return load_base(str(folder), dtype="fp64")


@pytest.mark.parametrize("settings", [GREEDY, *SAMPLED], ids=str)
def test_trees_of_any_shape_change_no_token(wordy_base, settings):
    """Eager steps and fixed shapes in turn. At a temperature thousands of tokens share the noise of plain sampling."""
    compared = accepted = 0
    asked = prompts(PROMPTS, seed=100, longest=40)
    plain = Decoder(wordy_base).generate(asked, 36, seed=[*range(PROMPTS)], **settings)
    for number, (prompt, want) in enumerate(zip(asked, plain, strict=True)):
        decoder = random_trees(wordy_base, want.tokens, number)
        decoder.graphs = bool(number % 2)
        out = decoder.generate(prompt, 36, seed=number, **settings)
        assert out.tokens == want.tokens
        compared += len(out.tokens)
        accepted += sum(out.accepted)
    assert compared == 36 * PROMPTS
    assert accepted > 0.3 * compared  # right drafts were there to be taken


OPTIONS = {
    "coupled": {"proposal": "shared"},
    "coupled chain": {"kind": "chain", "proposal": "shared", "trust": 0.5},
    "cape": {"kind": "cape"},
    "coupled cape": {"kind": "cape", "proposal": "shared"},
    "ranked": {"kind": "ranked", "k": [3, 2, 1]},
    "adaedl": {"stop": "adaedl"},
    "phrases": {"graft": ["phrases"]},
    "siblings": {"graft": ["siblings"]},
    "pearl": {"schedule": "pearl"},
    "coupled pearl": {"schedule": "pearl", "proposal": "shared", "graft": ["phrases"]},
    "all": {"proposal": "shared", "stop": "adaedl", "graft": ["phrases", "siblings"]},
}
SETTINGS = [
    GREEDY,
    {"temperature": 0.3, "top_p": 0.95, "eos": []},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "eos": []},
    {"temperature": 1.0, "eos": []},
]


BATCHES = [
    [prompt, prompt[::-1], prompt[1:] + prompt[:1]][: 1 + 2 * (number % 4 == 3)]
    for number, prompt in enumerate(prompts(12, seed=300, longest=30))
]


@pytest.fixture(scope="module")
def drafting(wordy_base):
    """A head for each batch, of every kind, and none for the last."""
    heads = [random_head(HEADS[number % len(HEADS)], wordy_base, number) for number in range(len(BATCHES) - 1)]
    return [*heads, None]


@pytest.fixture(scope="module")
def plain(wordy_base):
    """By settings, what plain decoding makes of each batch."""
    asked, seeds = [*chain(*BATCHES)], [seed for batch in BATCHES for seed in range(len(batch))]
    found = {}
    for settings in SETTINGS:
        outs = iter(Decoder(wordy_base).generate(asked, 20, seed=seeds, **settings))
        found[str(settings)] = [[next(outs).tokens for _ in batch] for batch in BATCHES]
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_no_draft_option_changes_a_token(wordy_base, drafting, plain, option, settings):
    """Alone and three together; eager steps and fixed shapes in turn; heads of every kind, and none."""
    for number, (batch, head, want) in enumerate(zip(BATCHES, drafting, plain[str(settings)], strict=True)):
        decoder = Decoder(wordy_base, head, DraftConfig(nodes=14, budget="fixed", **OPTIONS[option]))
        decoder.graphs = bool(number % 2) and (head is None or isinstance(head, OnePassHead))
        got = decoder.generate(batch, 20, seed=[*range(len(batch))], **settings)
        assert [one.tokens for one in got] == want


def test_a_poisoned_pool_of_phrases_changes_no_token(wordy_base, monkeypatch):
    rng, poisoned = np.random.default_rng(0), Phrases()
    decoder = Decoder(wordy_base, None, DraftConfig(nodes=14, budget="fixed", graft=["phrases"]))
    for token in range(260):
        for _ in range(5):
            poisoned.add(token, rng.integers(0, 259, 6).tolist())
    monkeypatch.setattr(decoder.drafter, "_phrases", lambda frontier: poisoned)
    asked = prompts(8, seed=400, longest=30)
    for prompt, want in zip(asked, Decoder(wordy_base).generate(asked, 30, eos=[]), strict=True):
        assert decoder.generate(prompt, 30, eos=[]).tokens == want.tokens


def test_budgets_and_heads_of_any_kind_change_no_token(wordy_base):
    rng, asked, want = np.random.default_rng(0), prompts(PROMPTS, seed=200, longest=40), {}
    for first, settings in enumerate([GREEDY, *SAMPLED]):
        numbers = range(first, PROMPTS, 4)
        outs = Decoder(wordy_base).generate([asked[i] for i in numbers], 24, seed=[*numbers], **settings)
        want |= zip(numbers, outs, strict=True)
    for number, prompt in enumerate(asked):
        config = HEADS[number % len(HEADS)]
        kind, nodes, top_k = ("tree", "chain")[number % 2], int(rng.integers(1, 70)), int(rng.integers(1, 20))
        decoder = Decoder(
            wordy_base, random_head(config, wordy_base, number), DraftConfig(kind, nodes, top_k, budget="fixed")
        )
        got = decoder.generate(prompt, 24, seed=number, **[GREEDY, *SAMPLED][number % 4])
        assert got.tokens == want[number].tokens
