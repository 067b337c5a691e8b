import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import HEADS, SETTINGS, assert_entries_of_a_fresh_prefill, oracle_decoder, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode import step
from ctcdraft.model.decode.decoder import Generation
from ctcdraft.model.draft.budget import chain_of
from ctcdraft.model.draft.tree import Tree


def test_plain_output_is_the_base_models_own(base, answers):
    for prompt, want in answers:
        assert Decoder(base).generate(prompt, 40).tokens == want


@pytest.mark.parametrize("fixed", [False, True])
def test_every_draft_looks_up_all_that_was_read(base, monkeypatch, fixed):
    decoder = Decoder(base, random_head(HEADS[1], base), DraftConfig("tree", 9, budget="fixed"))
    decoder.graphs = fixed
    reads, make = [], decoder.drafter.tree
    monkeypatch.setattr(
        decoder.drafter, "tree", lambda one, behind: reads.append(behind.read.tolist()) or make(one, behind)
    )
    prompt = prompts(1, seed=4)[0]
    found = decoder.generate(prompt, 40)
    whole, length = [*prompt, *found.tokens], len(prompt) + 1
    assert len(reads) == len(found.accepted) > 5
    for read, accepted in zip(reads, found.accepted, strict=True):
        assert read == whole[:length]
        length += accepted + 1


def test_drafts_are_kept_where_they_are_asked_for(base):
    prompt = prompts(1, seed=4)[0]
    decoder = oracle_decoder(base, Decoder(base).generate(prompt, 40).tokens, wrong_at=2)
    found = decoder.generate(prompt, 40, keep_trees=True)
    assert [len(tree) for tree, _ in found.trees] == found.nodes
    assert [len(path) for _, path in found.trees] == found.accepted
    done = 1
    for tree, path in found.trees:
        assert tree.tokens[path].tolist() == found.tokens[done : done + len(path)]
        assert tree.path_of(found.tokens[done:])[: len(path)] == path
        done += len(path) + 1
    assert sum(found.accepted) > 5
    assert decoder.generate(prompt, 40).trees is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scripted_drafts_are_accepted_and_the_cache_equals_a_fresh_prefill(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family, eos_token_id=259)), dtype="fp64")
    for wrong_at in (None, 0, 2):
        prompt = prompts(1, seed=3)[0]
        truth = Decoder(base).generate(prompt, 60).tokens
        scripted = oracle_decoder(base, truth + [5] * 10, wrong_at)
        checked = []

        def check(active, cache, prompt=prompt, truth=truth, checked=checked):
            checked.append(assert_entries_of_a_fresh_prefill(base, cache, prompt + truth))

        scripted.check = check
        out = scripted.generate(prompt, 60)
        assert out.tokens == truth
        assert max(out.accepted) == (6 if wrong_at is None else wrong_at)
        assert len(checked) == out.steps


FAMILIES = {
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 128, "pad_token_id": 0},  # soft-capped logits
    "gemma3_text": {"sliding_window": 128, "pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "phi3, longrope": {
        "pad_token_id": 0,
        "original_max_position_embeddings": 48,  # a row beyond turns all rows by other angles
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    },
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.5, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # learned positions
}


CONTEXTS = {"phi3, longrope": 48}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_of_bases_decode_losslessly(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family.split(",")[0], **FAMILIES[family])), dtype="fp64")
    assert base.context_length == CONTEXTS.get(family, 256)
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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bloom", {}),  # knows no mask but that of padding
        ("trocr", {}),  # counts positions by itself
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 16}),  # hides places of the cache
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_base_that_would_verify_trees_wrongly_is_refused(tmp_path, family, options, dtype):
    with pytest.raises(ValueError, match="mask and the positions of a draft tree"):
        load_base(str(write_base(tmp_path / "b", family, **options)), dtype)


@pytest.mark.parametrize("fault", ["compaction", "positions", "mask"])
def test_negative_controls_do_change_the_output(base, monkeypatch, fault):
    prompt = prompts(1, seed=5)[0]
    truth = Decoder(base).generate(prompt, 60).tokens
    scripted = oracle_decoder(base, truth + [5] * 10)
    scripted.graphs = False  # what is broken here is the eager step's
    honest = step.tree_mask
    if fault == "compaction":
        commit = TreeCache.commit
        monkeypatch.setattr(TreeCache, "commit", lambda self, rows: commit(self, [range(len(r)) for r in rows]))
    elif fault == "positions":

        def shifted(*given):
            mask = honest(*given)
            return mask._replace(positions_BL=mask.positions_BL + 1)

        monkeypatch.setattr(step, "tree_mask", shifted)
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
    assert (
        Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 32, budget="fixed")).generate(prompt, 50).tokens
        == plain
    )


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [([], 5, "has 0 tokens"), ([5] * 256, 5, "256 tokens; .* takes 1 to 255"), ([5], 0, "at least 1")],
)
def test_impossible_requests_are_refused(base, prompt, limit, message):
    with pytest.raises(ValueError, match=message):
        Decoder(base).generate(prompt, limit)


def test_bad_draft_settings_are_refused():
    with pytest.raises(ValueError, match="'tree', 'chain', 'cape' or 'ranked'"):
        DraftConfig(kind="forest")
    with pytest.raises(ValueError, match="nodes\n  Input should be greater than 0"):
        DraftConfig(nodes=0)
    with pytest.raises(ValueError, match="'auto', 'fixed' or 'measured'"):
        DraftConfig(budget="free")


def test_an_interrupted_call_leaves_nothing_behind(base, monkeypatch):
    prompt = prompts(1, seed=5)[0]
    speculative = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 16, budget="fixed"))
    speculative.graphs = False  # whose steps commit by a kernel of their own
    want = speculative.generate(prompt, 30).tokens
    monkeypatch.setattr(TreeCache, "commit", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        speculative.generate(prompts(1, seed=6, longest=60)[0], 30)
    monkeypatch.undo()
    assert speculative.generate(prompt, 30).tokens == want


def test_another_thread_may_decode_meanwhile(base):
    """It goes through the copied layers while these have been entered, by another head of the same base too."""
    here, there = (Decoder(base, random_head(HEADS[1], base, seed), DraftConfig(budget="fixed")) for seed in (0, 1))
    asked = prompts(2, seed=7)
    want = [here.generate(asked[0], 8).tokens, there.generate(asked[1], 4).tokens]
    with ThreadPoolExecutor(1) as thread:
        meanwhile = []

        def enter(*_):
            if not meanwhile:
                meanwhile.append(None)
                meanwhile[0] = thread.submit(there.generate, asked[1], 4).result().tokens

        with base.decoder.layers[-1].register_forward_pre_hook(enter):
            assert here.generate(asked[0], 8).tokens == want[0]
        assert meanwhile == want[1:]


def test_another_thread_may_come_by_while_a_hook_is_half_set(base, monkeypatch):
    decoder, prompt = Decoder(base, random_head(HEADS[1], base), DraftConfig(budget="fixed")), prompts(1, seed=7)[0]
    want = decoder.generate(prompt, 4).tokens
    with ThreadPoolExecutor(1) as thread:

        class Halves(dict):
            def __setitem__(self, key, value):
                assert thread.submit(Decoder(base).generate, prompt, 4).result().tokens == want
                super().__setitem__(key, value)

        monkeypatch.setattr(base.decoder.layers[-1], "_forward_pre_hooks_with_kwargs", Halves())
        assert decoder.generate(prompt, 4).tokens == want


def test_penalties_that_a_folder_brings_along_change_nothing(tmp_path):
    folder = write_base(tmp_path / "b", eos_token_id=1)
    plain = load_base(str(folder), dtype="fp64")
    settings = {"repetition_penalty": 1.9, "min_length": 20, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    base = load_base(str(folder), dtype="fp64")
    for prompt in prompts(4, seed=2):
        want = Decoder(plain).generate(prompt, 25).tokens
        assert Decoder(base).generate(prompt, 25).tokens == want


def test_an_empty_lattice_still_decodes(base):
    head = random_head(HEADS[0], base)
    head.blank.bias.data.fill_(1e4)
    out = Decoder(base, head, DraftConfig("tree", 8, budget="fixed")).generate([5, 6, 7], 10)
    assert out.tokens == Decoder(base).generate([5, 6, 7], 10).tokens
    assert sum(out.accepted) == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("right", [True, False])
def test_seeded_speculative_output_is_seeded_plain_output(base, settings, right):
    """Token for token, whether drafts are right (a script that knows the answer) or random."""
    asked, head = prompts(6, seed=21), random_head(HEADS[0], base)
    want = Decoder(base).generate(asked, 50, seed=[*range(6)], **settings)
    for number, (prompt, plain) in enumerate(zip(asked, want, strict=True)):
        drafting = (
            oracle_decoder(base, plain.tokens + [5] * 10)
            if right
            else Decoder(base, head, DraftConfig("tree", 12, budget="fixed"))
        )
        out = drafting.generate(prompt, 50, seed=number, **settings)
        assert (out.tokens, out.finish, out.text) == (plain.tokens, plain.finish, plain.text)
        if right and len(plain.tokens) > 10:
            assert max(out.accepted) == 6


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_choosing_everywhere_at_once_is_choosing_along_the_walk(base, settings, monkeypatch):
    """What a GPU does in one go and a CPU for likely nodes together and for the others step by step."""
    speculative = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    for number, prompt in enumerate(prompts(4, seed=60)):
        outs = []
        for lazy, likely in ((True, 2.0), (True, 1e-4), (True, 0.0), (False, 0.0)):
            monkeypatch.setattr(step.EagerStep, "_lazy", lazy)
            monkeypatch.setattr(step, "LIKELY", likely)
            outs.append(speculative.generate(prompt, 40, seed=number, **settings).tokens)
        assert outs == outs[:1] * 4


@pytest.mark.parametrize(("psi", "calls"), [(1.0, [1, 5]), (0.0, [1, 4, 1])])
def test_logits_of_likely_nodes_are_computed_together(base, monkeypatch, psi, calls):
    prompt = prompts(1, seed=61)[0]
    truth = Decoder(base).generate(prompt, 6, eos=[]).tokens
    decoder = oracle_decoder(base, truth, nodes=4)
    decoder.graphs = False
    monkeypatch.setattr(step.EagerStep, "_lazy", True)
    right = replace(chain_of(truth[1:5]), psi=np.full(4, psi, np.float32))
    monkeypatch.setattr(decoder, "_propose", lambda *_: right)
    asked, logits = [], Base.logits
    monkeypatch.setattr(Base, "logits", lambda self, hidden: asked.append(len(hidden)) or logits(self, hidden))
    out = decoder.generate(prompt, 6, eos=[])
    assert (out.tokens, out.accepted) == (truth, [4])
    assert asked == calls  # the prompt's last; the root and four nodes, of unlikely ones three


@pytest.mark.parametrize("lazy", [True, False])
def test_logits_behind_drawn_nodes_are_computed_once(base, monkeypatch, lazy):
    drawn = DraftConfig("ranked", proposal="sampled", prompt_lookup=0)
    decoder, asked, logits = Decoder(base, random_head(HEADS[1], base), drawn), [], Base.logits
    monkeypatch.setattr(step.EagerStep, "_lazy", lazy)
    monkeypatch.setattr(Base, "logits", lambda self, hidden: asked.append(len(hidden)) or logits(self, hidden))
    out = decoder.generate(prompts(1, seed=61)[0], 30, temperature=1.0, eos=[])
    assert sum(asked) == 1 + len(out.nodes) + sum(out.accepted)
    assert sum(out.accepted) > 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_a_batch_yields_what_each_prompt_yields_alone(base, settings):
    asked = prompts(7, seed=33)
    speculative = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    seeds = list(range(7))
    alone = [Decoder(base).generate(p, 30, seed=s, **settings) for p, s in zip(asked, seeds, strict=True)]
    for decoder in (Decoder(base), speculative):
        for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 4, 0, 5, 1, 3]):
            outs = decoder.generate([asked[i] for i in order], 30, seed=[seeds[i] for i in order], **settings)
            assert [out.tokens for out in outs] == [alone[i].tokens for i in order]


@pytest.mark.parametrize("config", [HEADS[0], HEADS[6]], ids=lambda config: config.kind)
def test_a_common_beginning_is_read_once_where_the_head_need_not_see_it(base, config, monkeypatch):
    system = prompts(1, seed=44)[0][:9] * 4
    asked = [[*system, 5 + i] for i in range(4)]
    alone = [Decoder(base).generate(p, 30).tokens for p in asked]
    read, hidden = [], Base.hidden

    def reading(self, ids_BL, mask=None, **named):
        read.append(ids_BL.shape[1])
        return hidden(self, ids_BL, mask, **named)

    monkeypatch.setattr(Base, "hidden", reading)
    decoder = Decoder(base, random_head(config, base), DraftConfig("tree", 9, budget="fixed"))
    read.clear()
    assert [out.tokens for out in decoder.generate(asked, 30)] == alone
    whole = len(asked[0])
    assert read[:4] == ([whole] * 4 if config.kind == "eagle" else [whole, 1, 1, 1])


def test_little_in_common_is_read_again_where_much_is_behind_it(base, monkeypatch):
    """A forward of many rows behind cached ones needs a mask of them all."""
    monkeypatch.setattr(step, "LONG_REST", 8)
    read, masks, hidden = [], [], Base.hidden

    def seen(base, ids, mask=None, **given):
        read.append(ids.shape[1])
        masks.append(mask is not None and mask.allowed_BLS is not None)
        return hidden(base, ids, mask, **given)

    asked = [[*range(5, 9), *range(20, 20 + more)] for more in (10, 8)] + [[*range(5, 9), *range(40, 40 + 12)]]
    wanted = [Decoder(base).generate(prompt, 3, eos=[]).tokens for prompt in asked]
    monkeypatch.setattr(Base, "hidden", seen)
    found = Decoder(base).generate(asked, 3, eos=[])
    assert [out.tokens for out in found] == wanted
    assert read[:3] == [14, 1, 16]
    assert masks[:3] == [False, False, False]


def test_a_head_alone_drafts_as_the_product_does(base):
    decoder = Decoder(base, random_head(HEADS[1], base))
    assert decoder.draft == DraftConfig()
    assert sum(decoder.generate([5, 6, 7], 12, eos=[]).nodes) > 0
    assert Decoder(base).generate([5, 6, 7], 12, eos=[]).nodes == [0] * 11


def test_requests_of_a_batch_end_when_they_end(base):
    asked = prompts(5, seed=40)
    long = [Decoder(base).generate(p, 40).tokens for p in asked]
    ends = [tokens[3 + 4 * i] for i, tokens in enumerate(long)]
    outs = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed")).generate(
        asked, 40, eos=ends
    )
    for tokens, out in zip(long, outs, strict=True):
        first = min((tokens.index(e) for e in ends if e in tokens), default=len(tokens) - 1)
        assert out.tokens == tokens[: first + 1]
        assert out.finish == ("eos" if tokens[first] in ends else "length")
    assert len({len(out.tokens) for out in outs}) > 1


def test_every_cache_entry_of_a_batch_is_that_of_a_fresh_prefill(base):
    asked = prompts(4, seed=50)
    truth = {tuple(p): Decoder(base).generate(p, 24).tokens for p in asked}
    speculative = Decoder(base, random_head(HEADS[0], base), DraftConfig("tree", 9, budget="fixed"))
    advance, seen = speculative.advance, []

    def checked(step):
        advance(step)
        for number, request in enumerate(step.active):
            tokens = request.prompt + truth[tuple(request.prompt)]
            seen.append(assert_entries_of_a_fresh_prefill(base, step.cache, tokens, number))

    speculative.advance = checked
    for prompt, out in zip(asked, speculative.generate(asked, 24), strict=True):
        assert out.tokens == truth[tuple(prompt)]
    assert len(seen) > 40


@pytest.mark.parametrize("at", [12, 17, 20])
def test_a_stop_string_ends_text_tokens_and_counts_wherever_spans_end(base, at):
    prompt = prompts(1, seed=5)[0]
    plain = Decoder(base).generate(prompt, 60)
    stop = plain.text[at : at + 4]
    want = Decoder(base).generate(prompt, 60, stop=[stop, "never there"])
    assert want.finish == "stop"
    assert want.text == plain.text[: plain.text.index(stop)]
    assert plain.tokens[: len(want.tokens)] == want.tokens
    oracle = oracle_decoder(base, plain.tokens + [5] * 10)
    got = oracle.generate(prompt, 60, stop=[stop, "never there"], keep_trees=True)
    assert (got.tokens, got.text, got.finish) == (want.tokens, want.text, want.finish)
    assert sum(got.drafted) == sum(got.accepted) == sum(len(path) for _, path in got.trees)
    assert got.accepted_from == {"head": sum(got.accepted)}


def test_an_end_that_completes_a_stop_string_is_a_stop_as_its_text_is_cut(base):
    prompt = prompts(1, seed=5)[0]
    plain = Decoder(base).generate(prompt, 60)
    stops = (plain.text[at : at + 4] for at in range(40))
    cuts = ((stop, Decoder(base).generate(prompt, 60, stop=[stop])) for stop in stops)
    stop, cut = next((stop, cut) for stop, cut in cuts if cut.tokens.count(cut.tokens[-1]) == 1 < len(cut.tokens))
    last = cut.tokens[-1]
    for decoder in (Decoder(base), oracle_decoder(base, plain.tokens)):
        both = decoder.generate(prompt, 60, stop=[stop], eos=[last])
        assert (both.tokens, both.text, both.finish) == (cut.tokens, cut.text, "stop")


def test_a_prompt_of_numpy_numbers_is_one_prompt(base):
    want = Decoder(base).generate([5, 6, 7], 8)
    numbers = np.array([5, 6, 7])
    for prompt in (numbers, list(numbers), tuple(numbers), torch.tensor(numbers)):
        assert Decoder(base).generate(prompt, 8).tokens == want.tokens
    assert Decoder(base).generate([numbers, [8, 9]], 8)[0].tokens == want.tokens
    seeded = Decoder(base).generate([5, 6, 7], 8, temperature=1.0, seed=3)
    assert Decoder(base).generate(numbers, 8, temperature=1.0, seed=np.int64(3)).tokens == seeded.tokens
    for prompt in ([5.0, 6.5], [[5, 6.5], [7]], [None]):
        with pytest.raises(ValueError, match="a prompt is a text, or a sequence of whole numbers"):
            Decoder(base).generate(prompt, 8)


@pytest.mark.parametrize("stop", [[], ["e"], ["zzzz"]])
def test_a_stream_adds_up_to_the_generation(base, stop):
    prompt = prompts(1, seed=5)[0]
    plain = Decoder(base).generate(prompt, 60, stop=stop)
    *spans, last = oracle_decoder(base, Decoder(base).generate(prompt, 60).tokens + [5] * 10).stream(
        prompt, 60, stop=stop
    )
    assert isinstance(last, Generation)
    assert last.tokens == plain.tokens == [token for span in spans for token in span.tokens]
    assert last.text == plain.text == "".join(span.text for span in spans)
    assert 0 < sum(last.drafted) <= sum(last.accepted)
    tinted = "".join(text for span in spans for text, drafted in span.pieces if drafted)
    if not stop:  # one byte a token, but characters of several bytes take the flag of their last
        assert 0 < len(tinted) <= sum(last.drafted)


def test_a_last_token_that_is_a_word_is_text_through_every_door(base):
    prompt = prompts(1, seed=5)[0]
    tokens = Decoder(base).generate(prompt, 40, eos=[]).tokens
    end = next(token for n, token in enumerate(tokens) if n > 8 and token not in tokens[:n])
    whole, *others = (
        Decoder(base).generate(prompt, 40, eos=[end]),
        Decoder(base).generate(prompt, 40, eos=[end], stop=["never there"]),
        [*Decoder(base).stream(prompt, 40, eos=[end])][-1],
    )
    assert whole.tokens[-1] == end
    for other in others:
        assert (other.tokens, other.text, other.finish) == (whole.tokens, whole.text, "eos")


def test_ends_may_be_any_numbers_of_tokens(base):
    prompt = prompts(1, seed=8)[0]
    whole = Decoder(base).generate(prompt, 20, eos=[]).tokens
    last = whole[5]
    for eos in ([last, 259], np.array([last, 259]), torch.tensor([last, 259]), iter([last, 259])):
        out = Decoder(base).generate(prompt, 20, eos=eos)
        assert (out.tokens, out.finish) == (whole[: whole.index(last) + 1], "eos")


def test_what_cannot_be_asked_for_is_refused(base):
    decoder = Decoder(base)
    for settings, message in (
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, r"top_k=2\.5 must be 0"),
        ({"top_k": None}, "top_k=None must be 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"stop": "text"}, "list of non-empty strings"),
        ({"stop": [""]}, "list of non-empty strings"),
        ({"eos": 5}, "eos=5: give a list of tokens"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"seed": [1.5]}, r"seed=\[1.5\]: give a whole number"),
        ({"seed": "5"}, "seed='5': give a whole number"),
        ({"seed": None}, "seed=None: give a whole number"),
        ({"stop": None}, "stop=None: give a list of non-empty strings"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.generate([5, 6], 4, **settings)
    with pytest.raises(ValueError, match="the prompt cannot be read: token 1000000"):
        decoder.generate([5, 10**6], 4)
    with pytest.raises(ValueError, match=r"max_new_tokens=4\.0 must be a whole number"):
        decoder.generate([5, 6], 4.0)


@pytest.mark.parametrize("seed", [np.int64(3), np.array(3), torch.tensor(3), torch.tensor([3]), iter([3])])
def test_a_seed_may_be_a_whole_number_of_any_library(base, seed):
    prompt = prompts(1, seed=8)[0]
    want = Decoder(base).generate(prompt, 8, temperature=1.0, seed=3).tokens
    assert Decoder(base).generate(prompt, 8, temperature=1.0, seed=seed).tokens == want


def test_top_k_may_be_numpys(base):
    settings = {"temperature": 1.0, "seed": 3}
    want = Decoder(base).generate([5, 6], 8, top_k=4, **settings).tokens
    assert Decoder(base).generate([5, 6], 8, top_k=np.int64(4), **settings).tokens == want


def test_a_genuine_repeat_survives(base):
    """A base that says the same token twice: the lattice needs a blank between, the decoder nothing."""
    prompt = prompts(1, seed=5)[0]
    plain = Decoder(base).generate(prompt, 40).tokens
    doubled = [i for i in range(1, len(plain)) if plain[i] == plain[i - 1]]
    if not doubled:
        pytest.skip("this random base never repeats itself")
    assert oracle_decoder(base, plain + [5] * 10).generate(prompt, 40).tokens == plain


def test_a_budget_chosen_per_step_changes_no_token(base):
    head = random_head(HEADS[0], base)
    assert Decoder(base, head, DraftConfig()).measures == (base.device.type == "cpu")
    assert not Decoder(base, head, DraftConfig(budget="fixed")).measures
    assert not Decoder(base).measures
    auto = Decoder(base, head, DraftConfig("tree", 24, budget="measured"))
    for number, prompt in enumerate(prompts(5, seed=70)):
        for settings in ({}, {"temperature": 0.8}):
            plain = Decoder(base).generate(prompt, 40, seed=number, **settings)
            assert auto.generate(prompt, 40, seed=number, **settings).tokens == plain.tokens
    assert len(auto.budget) == 25
    assert (auto.budget > 0).all()
    measured = auto.budget
    alone = [Decoder(base).generate(prompt, 30).tokens for prompt in prompts(4, seed=71)]
    assert [out.tokens for out in auto.generate(prompts(4, seed=71), 30)] == alone
    assert auto.budget is measured


def test_a_context_that_holds_no_whole_draft_is_decoded_all_the_same(tmp_path):
    """Of a base with learned positions, which has none for the chains whose time a budget would go by."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 33}
    base = load_base(str(write_base(tmp_path / "b", "gpt2", context=33, **sizes)), dtype="fp64")
    head = random_head(HEADS[4], base)
    for nodes, measures in ((31, True), (32, False)):
        decoder = Decoder(base, head, DraftConfig(nodes=nodes, budget="measured"))
        assert decoder.measures == measures
        assert decoder.generate([5, 6, 7], 40).tokens == Decoder(base).generate([5, 6, 7], 40).tokens


def test_nodes_that_cost_nothing_are_all_drafted_and_dear_ones_are_not(base):
    head, prompt = random_head(HEADS[0], base), prompts(1, seed=72)[0]
    decoder = Decoder(base, head, DraftConfig("tree", 24))
    decoder.budget = np.ones(25)
    out = decoder.generate(prompt, 30)
    assert len(out.nodes) == out.steps
    assert max(out.nodes) == 24
    decoder.budget = 1 + 10.0 * np.arange(25)
    assert decoder.generate(prompt, 30).nodes == [0] * 29
