import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from bases import write_base
from transformers import DynamicCache

from ctcdraft.model import Decoder, DraftConfig, HeadConfig, build_head, decoder, load_base
from ctcdraft.model.generate import continue_prompts
from ctcdraft.model.tree import Tree

HEADS = [HeadConfig(kind=kind, slots=5, width=32, mixer_width=16) for kind in ("ctc", "parallel", "medusa")]


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 260, rng.integers(1, longest)).tolist() for _ in range(count)]


def random_head(config, base, seed=0):
    torch.manual_seed(seed)
    head = build_head(config, base.hidden_size).to(base.dtype).eval()
    for p in head.parameters():
        p.data.add_(torch.randn_like(p) * 0.3)
    return head


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.kind)
@pytest.mark.parametrize("draft", [DraftConfig("tree", 1), DraftConfig("tree", 23), DraftConfig("chain", 4)])
def test_greedy_output_is_the_base_models_own(base, config, draft):
    speculative = Decoder(base, random_head(config, base), draft)
    for prompt in prompts(12):
        want = base.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
        )[0, len(prompt) :].tolist()
        assert Decoder(base).generate(prompt, 40).tokens == want
        assert speculative.generate(prompt, 40).tokens == want


def oracle_decoder(base, truth, wrong_at=None, nodes=16, seed=0):
    """A decoder whose tree holds the true continuation among random branches, wrong at one depth."""
    rng = np.random.default_rng(seed)

    class Scripted(Decoder):
        def tree_of(self, lattice, max_depth=None):
            depth = min(6, max_depth)
            at = len(self.done)
            path = truth[at : at + depth]
            tokens, parents, depths = [], [], []
            spine = -1
            for d, token in enumerate(path):
                for _ in range(2):  # decoys first, so the accepted path is not a prefix of the rows
                    tokens.append((token + int(rng.integers(1, 250))) % 260)
                    parents.append(spine)
                    depths.append(d + 1)
                tokens.append(token if wrong_at is None or d < wrong_at else (token + 251) % 260)
                parents.append(spine)
                depths.append(d + 1)
                spine = len(tokens) - 1
            return Tree(
                np.array(tokens, np.int64),
                np.array(parents, np.int64),
                np.array(depths, np.int64),
                np.ones(len(tokens), np.float32),
            )

        def _verify(self, root, tree, cache, clock):
            path, targets, hidden = super()._verify(root, tree, cache, clock)
            self.done += [int(tree.tokens[i]) for i in path] + [int(targets[path[-1] + 1 if path else 0])]
            self.caches.append((list(self.done), cache))
            return path, targets, hidden

    scripted = Scripted(base, random_head(HEADS[0], base), DraftConfig("tree", 64))
    scripted.done, scripted.caches = [truth[0]], []
    return scripted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scripted_drafts_are_accepted_and_the_cache_equals_a_fresh_prefill(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family, eos_token_id=259)), dtype="fp64")
    for wrong_at in (None, 0, 2):
        prompt = prompts(1, seed=3)[0]
        truth = Decoder(base).generate(prompt, 60).tokens
        scripted = oracle_decoder(base, truth + [5] * 10, wrong_at)
        out = scripted.generate(prompt, 60)
        assert out.tokens == truth
        assert max(out.accepted) == (6 if wrong_at is None else wrong_at)
        _, cache = scripted.caches[-1]
        length = cache.get_seq_length()
        fresh = DynamicCache()
        base.hidden(torch.tensor([(prompt + truth)[:length]]), cache=fresh)
        for mine, want in zip(cache.layers, fresh.layers, strict=True):
            assert torch.allclose(mine.keys, want.keys, atol=1e-10)
            assert torch.allclose(mine.values, want.values, atol=1e-10)


FAMILIES = {
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 128, "pad_token_id": 0},  # soft-capped logits
    "gemma3_text": {"sliding_window": 128, "pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.5, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # learned positions
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_of_bases_decode_losslessly(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family, **FAMILIES[family])), dtype="fp64")
    for prompt in prompts(3, seed=3, longest=20):
        limit = min(40, base.context_length - len(prompt))
        want = base.model.generate(
            torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )[0, len(prompt) :].tolist()
        out = oracle_decoder(base, want + [5] * 10).generate(prompt, limit)
        assert out.tokens == want
        assert len(want) < 8 or max(out.accepted) == 6


def test_a_base_without_attention_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="keeps no keys and values"):
        load_base(str(write_base(tmp_path / "b", "mamba", **sizes)))


@pytest.mark.parametrize("fault", ["compaction", "positions", "mask"])
def test_negative_controls_do_change_the_output(base, monkeypatch, fault):
    prompt = prompts(1, seed=5)[0]
    truth = Decoder(base).generate(prompt, 60).tokens
    scripted = oracle_decoder(base, truth + [5] * 10)
    honest = scripted._tree_mask
    if fault == "compaction":
        first_rows = decoder.keep_entries
        monkeypatch.setattr(decoder, "keep_entries", lambda c, past, rows: first_rows(c, past, list(range(len(rows)))))
    elif fault == "positions":
        scripted._tree_mask = lambda tree, past: (honest(tree, past)[0], honest(tree, past)[1] + 1)
    else:
        monkeypatch.setattr(Tree, "ancestors", lambda tree: np.ones((len(tree) + 1,) * 2, bool))
    assert scripted.generate(prompt, 60).tokens != truth


def test_eager_attention_gets_the_same_mask(tmp_path):
    folder = write_base(tmp_path / "b", eos_token_id=259)
    base = load_base(str(folder), dtype="fp64")
    base.model.set_attn_implementation("eager")
    prompt = prompts(1, seed=5)[0]
    truth = Decoder(base).generate(prompt, 50).tokens
    assert oracle_decoder(base, truth + [5] * 10).generate(prompt, 50).tokens == truth


def test_end_of_sequence_and_limits_inside_an_accepted_span(base):
    prompt = prompts(1, seed=7)[0]
    long = Decoder(base).generate(prompt, 60).tokens
    if len(long) < 20:
        pytest.skip("this random base stops early")
    stop = long[9]
    first = long.index(stop)
    object.__setattr__(base, "eos_ids", (stop,))
    try:
        out = oracle_decoder(base, long + [5] * 10).generate(prompt, 60)
        assert out.tokens == long[: first + 1]
    finally:
        object.__setattr__(base, "eos_ids", (1,))
    for limit in (1, 2, 3, 8):
        assert oracle_decoder(base, long + [5] * 10).generate(prompt, limit).tokens == long[:limit]


def test_the_context_end_is_reached_and_not_passed(base):
    prompt = prompts(1, seed=8)[0] * 256
    prompt = prompt[: base.context_length - 5]
    plain = Decoder(base).generate(prompt, 50).tokens
    assert len(plain) <= 5
    assert Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 32)).generate(prompt, 50).tokens == plain


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [([], 5, "no tokens"), ([5] * 256, 5, "takes 256"), ([5], 0, "at least 1")],
)
def test_impossible_requests_are_refused(base, prompt, limit, message):
    with pytest.raises(ValueError, match=message):
        Decoder(base).generate(prompt, limit)


def test_bad_draft_settings_are_refused():
    with pytest.raises(ValueError, match="tree or chain"):
        DraftConfig(kind="forest")
    with pytest.raises(ValueError, match="at least 1"):
        DraftConfig(nodes=0)


def test_an_interrupted_call_leaves_nothing_behind(base, monkeypatch):
    prompt = prompts(1, seed=5)[0]
    speculative = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 16))
    want = speculative.generate(prompt, 30).tokens
    monkeypatch.setattr(decoder, "keep_entries", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        speculative.generate(prompts(1, seed=6, longest=60)[0], 30)
    monkeypatch.undo()
    assert speculative.generate(prompt, 30).tokens == want


def test_penalties_that_a_folder_brings_along_change_nothing(tmp_path):
    folder = write_base(tmp_path / "b", eos_token_id=1)
    plain = load_base(str(folder), dtype="fp64")
    settings = {"repetition_penalty": 1.9, "min_length": 20, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    base = load_base(str(folder), dtype="fp64")
    for prompt in prompts(4, seed=2):
        want = Decoder(plain).generate(prompt, 25).tokens
        assert Decoder(base).generate(prompt, 25).tokens == want
        assert dict(continue_prompts(base, [prompt], 25, 1))[0] == want


def test_an_empty_lattice_still_decodes(base):
    head = random_head(HEADS[0], base)
    head.blank.bias.data.fill_(1e4)
    out = Decoder(base, head, DraftConfig("tree", 8)).generate([5, 6, 7], 10)
    assert out.tokens == Decoder(base).generate([5, 6, 7], 10).tokens
    assert sum(out.accepted) == 0
