from itertools import product

import pytest
import torch
from bases import write_base
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ctcdraft.model import Decoder, DraftConfig, HeadConfig, build_head, load_base
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.head import flops_per_draft, head_on, parameters_of
from ctcdraft.model.layers import Anchors, Sight


@pytest.mark.parametrize(
    ("kind", "base_layers", "together"), [("medusa", 0, 1), *product(("ctc", "parallel"), (0, 1, 2), (1, 2))]
)
def test_inference_with_a_cache_equals_the_training_forward(base, kind, base_layers, together):
    torch.manual_seed(0)
    sizes = {"slots": 5, "slots_per_query": together, "width": 32, "mixer_width": 16, "layers": 2, "mixer_layers": 2}
    head = head_on(base, HeadConfig(kind=kind, base_layers=base_layers, **sizes)).double().eval()
    layers = head.attended_layers
    ids = torch.randint(2, 260, (1, 24))
    root = base.embed(ids.roll(-1, 1))
    positions = torch.arange(24)
    want = head(base.hidden(ids, layers=layers), root, torch.zeros(24, dtype=torch.long), positions)
    read, start = TreeCache(2, 1, 24), 0
    cache = head.new_cache(1, 24, read)
    for count in (7, 1, 3, 1, 12):
        end = start + count
        sight = read.sight(count, ids.device)
        mask, at = sight.additive(base.dtype), sight.positions_BL
        hidden = base.hidden(ids[:, start:end], attention_mask=mask, position_ids=at, cache=read)
        read.keep([range(count)])
        got = head.step(hidden, root[:, start:end], [count], cache)
        assert torch.allclose(got.states_NTD[0], want.states_NTD[end - 1], atol=1e-10)
        if kind == "ctc":
            assert torch.allclose(got.blank_NT[0], want.blank_NT[end - 1], atol=1e-10)
        else:
            assert got.blank_NT is None
        start = end


@pytest.mark.parametrize("base_layers", [0, 2])
def test_later_positions_and_padding_do_not_leak_into_an_anchor(base, base_layers):
    config = HeadConfig(slots=3, width=32, mixer_width=16, base_layers=base_layers)
    head = head_on(base, config).double()
    ids = torch.randint(2, 260, (1, 12))
    hidden, root = base.hidden(ids, layers=(0, 1) if base_layers else ()), base.embed(ids)
    anchor = (torch.zeros(1, dtype=torch.long), torch.tensor([5]))
    before = head(hidden, root, *anchor).states_NTD
    hidden[:, 6:], root = 99.0, root.clone()
    root[:, 6:] = -99.0
    assert torch.equal(before, head(hidden, root, *anchor).states_NTD)


@pytest.mark.parametrize(("together", "asking"), [(1, (0, 1, 2)), (2, (1, 1, 2)), (3, (1, 1, 1)), (7, (2, 2, 2))])
def test_slots_look_at_the_keys_and_values_of_the_base_as_its_own_queries_would(base, together, asking):
    """An oracle: each slot's queries are put to each layer's keys by transformers' own rotation, one pair at a time."""
    torch.manual_seed(0)
    sizes = {"slots": 3, "width": 32, "mixer_width": 16, "slots_per_query": together}
    head = head_on(base, HeadConfig(**sizes, base_layers=2)).double()
    of_base, attended = head.of_base, head.attended
    assert (attended.layers, attended.heads, attended.width) == ((0, 1), 2, 8)
    ids, x_NTW = torch.randint(2, 260, (2, 9)), torch.randn(3, 3, 16, dtype=torch.float64)
    batch, position = torch.tensor([1, 0, 1]), torch.tensor([7, 4, 2])
    hidden = base.hidden(ids, layers=attended.layers)
    plain, memory = attended.apart(hidden, base.hidden_size)
    assert torch.equal(plain, base.hidden(ids))
    got = of_base(x_NTW, memory, Anchors.of(batch, position), Sight.one_document(hidden))
    cache = DynamicCache()
    base.hidden(ids, cache=cache)
    for n, t in product(range(3), range(3)):
        b, p = int(batch[n]), int(position[n])
        q = of_base.query(of_base.norm(x_NTW[n, asking[t]])).view(2, 2, 1, 8)  # layer, head
        cos, sin = base.model.model.rotary_emb(q, torch.tensor([[p + asking[t] + 1]]))
        q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        seen = []
        for number, layer in enumerate(cache.layers):
            keys, values = layer.keys[b, :, : p + 1], layer.values[b, :, : p + 1]
            share = (q[number] @ keys.transpose(1, 2) / 8**0.5).softmax(dim=-1)
            seen.append((share @ values).flatten())
        want = of_base.out(of_base.seen_norm(torch.cat(seen)))
        assert torch.allclose(got[n, t], want, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "options", "count", "message"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, 1, "does not turn the keys"),
        ("cohere", {"pad_token_id": 0}, 1, "does not turn the keys"),  # by pairs of neighbours
        ("gemma3_text", {"pad_token_id": 0}, 2, "does not turn the keys"),  # layers of two kinds by different angles
        ("llama", {}, 3, "head.base_layers=3: b has 2"),
    ],
)
def test_layers_that_a_head_cannot_attend_to_are_refused(tmp_path, family, options, count, message):
    base = load_base(str(write_base(tmp_path / "b", family, **options)))
    with pytest.raises(ValueError, match=message):
        head_on(base, HeadConfig(base_layers=count))


@pytest.mark.parametrize(("family", "count"), [("llama", 1), ("cohere", 0)])
def test_a_head_attends_to_one_layer_where_the_base_allows_it(tmp_path, family, count):
    base = load_base(str(write_base(tmp_path / "b", family, pad_token_id=0)))
    head = head_on(base, HeadConfig(base_layers=None))
    assert (head.config.base_layers, len(head.attended_layers)) == (count, count)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "stablelm", "mistral", "gpt_neox"])
def test_other_families_turn_their_keys_alike(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family, pad_token_id=0)), dtype="fp64")
    head = head_on(base, HeadConfig(slots=3, width=32, mixer_width=16, base_layers=2)).double().eval()
    prompt = list(range(5, 25))
    draft = DraftConfig("tree", 8, budget="fixed")
    assert Decoder(base, head, draft).generate(prompt, 30).tokens == Decoder(base).generate(prompt, 30).tokens


def test_ctc_and_parallel_are_one_body(base):
    sizes = {kind: parameters_of(build_head(HeadConfig(kind=kind), base.hidden_size)) for kind in ("ctc", "parallel")}
    assert sizes["ctc"] - sizes["parallel"] == 128 + 1  # the blank's vector and bias


def test_cost_counts_the_lm_head_once_per_slot(base):
    head = build_head(HeadConfig(kind="medusa", slots=4), base.hidden_size)
    assert flops_per_draft(head, base) == (4 * 32 * 32, 4 * 260 * 32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kind": "hydra"}, "unknown"),
        ({"merge": "yes"}, "must be true or false"),
        ({"kind": "eagle", "base_layers": 1}, "head.base_layers at 0"),
        ({"base_layers": -1}, "head.base_layers=-1 must be at least 0"),
        ({"draft_vocab_size": 0}, "head.draft_vocab_size=0 must be at least 1"),
        ({"beam": True}, "head.beam must be a whole number, not bool"),
        ({"rank": 8.0}, "must be a whole number"),
        ({"mixer_layers": 2**63}, "head.mixer_layers must be at most 256"),
        ({"slots": 0}, "head.slots=0 must be at least 1"),
        ({"merge": 0}, "head.merge must be true or false, not int"),
        ({"merge": False, "band": -1}, "head.band=-1 must be at least 0"),
        ({"band": 1}, "head.merge=true takes any number of blanks: use head.band=null, not 1"),
        ({"kind": "parallel", "merge": False}, "head=parallel has no blank"),
        ({"layers": -1}, "head.layers=-1"),
        ({"width": 30}, "even multiple"),
        ({"mixer_heads": 0}, "at least 1"),
    ],
)
def test_impossible_heads_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**sizes)
