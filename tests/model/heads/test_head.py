"""Heads: what their slots see, in training and with a cache, and which are refused."""

from itertools import product

import pytest
import torch
from bases import write_base
from drafting import difference_from_the_base
from transformers import DynamicCache

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.heads import (
    HEADS,
    CtcConfig,
    ParallelConfig,
    head_config,
    head_on,
    parameters_of,
)

PLAIN = 0  # layers of the base in a body: none of them, blocks among slots


def head_of(base, kind="ctc", layers=2, slots=5, **options):
    """Of random weights, none of which is what it was copied from or began as."""
    torch.manual_seed(0)
    config = head_config({"kind": kind, "slots": slots, "layers": layers or 2, "draft_vocab_size": None, **options})
    head = HEADS[type(config)](config, base) if layers == PLAIN else head_on(base, config)
    for p in head.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return head.to(base.dtype).eval()


@pytest.mark.parametrize(
    ("kind", "layers", "steps"),
    [
        (kind, layers, steps)
        for kind, layers in [("medusa", PLAIN), *product(("ctc", "parallel", "diffusion"), (PLAIN, 1, 2))]
        for steps in ([(7,), (1,), (3,), (1,), (12,)], [(7, 3), (1, 4), (3, 3), (1, 1), (6, 9)])
    ],
)
def test_inference_with_a_cache_equals_the_training_forward(base, kind, layers, steps):
    """Of one sequence, and of two that grow by unequal counts."""
    head = head_of(base, kind, layers)
    B, L = len(steps[0]), max(map(sum, zip(*steps, strict=True)))
    ids = torch.randint(2, 260, (B, L))
    root, rows = base.embed(ids.roll(-1, 1)), torch.arange(B).repeat_interleave(L)
    want = head(base.hidden(ids, attended=head.attended), root, Anchors.of(rows, torch.arange(L).repeat(B), B))
    read, starts = TreeCache(2, B, L + 16), torch.zeros(B, dtype=torch.long)
    for counts in steps:
        most = max(counts)
        at = (starts.unsqueeze(1) + torch.arange(most)).clamp(max=L - 1)  # what is behind counts[b] is padding
        hidden = base.hidden(ids.gather(1, at), read.causal_mask(most, ids.device), cache=read, attended=head.attended)
        read.commit([range(count) for count in counts])
        anchors = read.newest(counts, most, hidden.device)
        got = head.fill(hidden, root[torch.arange(B).unsqueeze(1), at], anchors, read)
        starts += torch.tensor(counts)
        last = torch.arange(B) * L + starts - 1
        assert torch.allclose(got.states_NTD, want.states_NTD[last], atol=1e-10)
        if kind == "ctc":
            assert torch.allclose(got.blank_NT, want.blank_NT[last], atol=1e-10)
        else:
            assert got.blank_NT is None


@pytest.mark.parametrize("layers", [PLAIN, 1, 2])
def test_later_positions_and_padding_do_not_leak_into_an_anchor(base, layers):
    head = head_of(base, layers=layers)
    ids = torch.randint(2, 260, (1, 12))
    hidden, root = base.hidden(ids, attended=head.attended), base.embed(ids)
    anchor = Anchors.of(torch.zeros(1, dtype=torch.long), torch.tensor([5]), 1)
    before = head(hidden, root, anchor).states_NTD
    hidden[:, 6:], root = 99.0, root.clone()
    root[:, 6:] = -99.0
    assert torch.equal(before, head(hidden, root, anchor).states_NTD)


@pytest.mark.parametrize("layers", [PLAIN, 1, 2])
def test_other_anchors_do_not_leak_into_an_anchor(base, layers):
    head = head_of(base, layers=layers)
    ids = torch.randint(2, 260, (2, 12))
    hidden, root = base.hidden(ids, attended=head.attended), base.embed(ids.roll(-1, 1))
    rows, positions = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([7, 4, 2, 7, 10])
    together = head(hidden, root, Anchors.of(rows, positions, 2)).states_NTD
    for n, (row, position) in enumerate(zip(rows, positions, strict=True)):
        alone = head(hidden, root, Anchors.of(row.view(1), position.view(1), 2)).states_NTD[0]
        assert torch.allclose(together[n], alone, atol=1e-10)


@pytest.mark.parametrize("layers", [PLAIN, 1, 2])
def test_other_documents_of_a_row_do_not_leak_into_an_anchor(base, layers):
    head = head_of(base, layers=layers)
    ids, parts = torch.randint(2, 260, (1, 20)), (slice(8), slice(8, 20))
    document = torch.tensor([[0] * 8 + [1] * 12])
    places = torch.tensor([[*range(8), *range(12)]])
    mask = AttentionMask(places, (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1))
    hidden = base.hidden(ids, mask, attended=head.attended)
    root, row = base.embed(ids), torch.zeros(1, dtype=torch.long)
    for own, other, position in ((*parts, 5), (*parts[::-1], 15)):
        anchor = Anchors.of(row, torch.tensor([position]), 1, mask)
        got = head(hidden, root, anchor).states_NTD
        hidden_of_own = base.hidden(ids[:, own], attended=head.attended)
        want = head(hidden_of_own, root[:, own], Anchors.of(row, places[:, position], 1)).states_NTD
        assert torch.allclose(got, want, atol=1e-10)
        elsewhere = hidden.clone()
        elsewhere[:, other] = 99.0
        assert torch.equal(got, head(elsewhere, root, anchor).states_NTD)


@pytest.mark.parametrize("layers", [1, 2])
def test_slots_go_through_the_layers_as_new_positions_of_the_base_would(base, layers):
    """An oracle: transformers' own layers, one anchor at a time, on a cache of what the base read up to there."""
    head = head_of(base, layers=layers, slots=3)
    assert head.attended.layers == ((0, 1) if layers == 2 else (1,))
    ids = torch.randint(2, 260, (2, 9))
    root = base.embed(ids.roll(-1, 1))
    rows, positions = torch.tensor([1, 0, 1]), torch.tensor([7, 4, 2])
    got = head(base.hidden(ids, attended=head.attended), root, Anchors.of(rows, positions, 2))
    for n, (b, p) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        cache = DynamicCache()
        read = base.model.model(ids[b : b + 1, : p + 1], past_key_values=cache, output_hidden_states=True)
        hidden, entering = read.last_hidden_state[0, -1], read.hidden_states[head.attended.layers[0]][0, -1]
        norms = [part / part.square().mean().sqrt() for part in (root[b, p], hidden)]
        told = head.scale * (head.enter.weight @ torch.cat(norms) + head.slot)
        x = (head.state_gain * entering + head.root_gain * root[b, p] + told).unsqueeze(0)
        at = torch.arange(p + 1, p + 4).unsqueeze(0)
        seen = torch.zeros(1, 1, 3, p + 4, dtype=x.dtype)  # all of the prefix, and the slots each other
        turned = base.model.model.rotary_emb(x, at)
        for layer in head.body.decoder.layers:
            x = layer(x, attention_mask=seen, position_ids=at, past_key_values=cache, position_embeddings=turned)
        x = head.body.decoder.norm(x)
        assert torch.allclose(got.states_NTD[n], x[0], atol=1e-7)  # of norms that add 1e-6 to a square
        assert torch.allclose(got.blank_NT[n], head.blank(x[0]).squeeze(-1), atol=1e-7)


def test_a_fresh_body_takes_the_bases_own_state_to_the_bases_hidden_state(base):
    for layers in (1, 2):
        assert difference_from_the_base(base, layers) < 1e-12


def test_training_moves_copies_and_leaves_the_base_as_it_is(base_folder):
    base = load_base(str(base_folder))
    head = head_on(base, CtcConfig(slots=3))
    of_base = {p.data_ptr() for p in base.model.parameters()}
    assert not any(p.data_ptr() in of_base for p in head.parameters())
    assert all(p.requires_grad for p in head.parameters())
    before = base.weights
    ids = torch.randint(2, 260, (1, 8))
    anchors = Anchors.of(torch.tensor([0]), torch.tensor([5]), 1)
    slots = head(base.hidden(ids, attended=head.attended), base.embed(ids), anchors)
    (slots.states_NTD.sum() + slots.blank_NT.sum()).backward()
    copies = [*head.body.parameters()]
    assert len(copies) == len([*base.model.model.layers.parameters(), *base.model.model.norm.parameters()])
    assert all(p.grad is not None and p.grad.any() for p in copies)
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    assert base.weights == before
    assert not any(p.requires_grad or p.grad is not None for p in base.model.parameters())


@pytest.mark.parametrize("family", ["llama", "stablelm"])  # norms that count in float32, and norms that do not
def test_on_a_base_in_bf16_copies_train_in_mixed_precision(tmp_path, family):
    """In float32 they learn what they would on the same base in float32, within what bf16 can say: 2^-8 per number."""
    folder = str(write_base(tmp_path / "b", family, pad_token_id=0))
    half, whole = load_base(folder, "bf16"), load_base(folder)
    whole.model.load_state_dict(half.model.state_dict())
    ids, labels = torch.randint(2, 260, (2, 40)), torch.randint(0, 260, (60, 5))
    anchors = Anchors.of(torch.arange(60) // 30, torch.arange(60) % 30, 2)
    found, outside = {}, {}
    for name, base in (("half", half), ("whole", whole)):
        torch.manual_seed(0)
        head = head_on(base, ParallelConfig(slots=5))
        assert {p.dtype for p in head.parameters()} == {torch.float32}
        given = [whole.hidden(ids, attended=head.attended), whole.embed(ids.roll(-1, 1)), anchors]
        logits = head(*given).states_NTD @ whole.lm_weight.T
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        found[name] = torch.cat([p.grad.flatten() for p in head.parameters()])
        with torch.no_grad():
            outside[name] = head(*given).states_NTD
    off = (found["half"] - found["whole"]).norm() / found["whole"].norm()
    assert 0 < off < 0.03
    assert torch.allclose(outside["half"], outside["whole"], rtol=1e-4, atol=1e-4)  # the norm's weights are bf16


def test_a_base_whose_layers_do_not_run_alone_gets_blocks_among_slots(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    base = load_base(str(write_base(tmp_path / "b", "gpt2", **sizes)), dtype="fp64")
    head = head_on(base, CtcConfig(slots=3)).double().eval()
    assert head.attended is head.body is None
    prompt = list(range(5, 25))
    draft = DraftConfig("tree", 8, budget="fixed")
    assert Decoder(base, head, draft).generate(prompt, 30).tokens == Decoder(base).generate(prompt, 30).tokens


def test_more_layers_than_the_base_has_are_refused(tmp_path):
    base = load_base(str(write_base(tmp_path / "b")))
    with pytest.raises(ValueError, match=r"head\.layers=3: b has 2 layers, choose at most as many"):
        head_on(base, CtcConfig(layers=3))


@pytest.mark.parametrize("family", ["qwen3", "phi3", "stablelm", "mistral", "gpt_neox", "cohere", "gemma2"])
def test_layers_of_other_families_run_alone_too(tmp_path, family):
    base = load_base(str(write_base(tmp_path / "b", family, pad_token_id=0)), dtype="fp64")
    for layers in (1, 2):
        assert difference_from_the_base(base, layers) < 1e-6  # Gemma counts norms in float32
    head = head_of(base, slots=3)
    assert len(head.attended.layers) == 2
    prompt = list(range(5, 25))
    draft = DraftConfig("tree", 8, budget="fixed")
    assert Decoder(base, head, draft).generate(prompt, 30).tokens == Decoder(base).generate(prompt, 30).tokens


@pytest.mark.parametrize("layers", [PLAIN, 2])
def test_ctc_and_parallel_are_one_body(base, layers):
    sizes = {kind: parameters_of(head_of(base, kind, layers, transition="none")) for kind in ("ctc", "parallel")}
    assert sizes["ctc"] - sizes["parallel"] == base.hidden_size + 1  # the blank's vector and bias


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("hydra", {}, "'hydra' found using 'kind' does not match any of the expected tags: 'ctc', 'parallel'"),
        ("ctc", {"depth": 3}, "depth\n.*[Uu]nexpected keyword"),
        ("ctc", {"merge": "yes"}, "merge\n.*valid boolean"),
        ("ctc", {"layers": 0}, "layers\n.*greater than or equal to 1"),
        ("ctc", {"draft_vocab_size": 0}, "draft_vocab_size\n.*greater than or equal to 1"),
        ("eagle", {"beam": True}, "beam\n.*valid integer"),
        ("parallel", {"rank": 8.0}, "rank\n.*valid integer"),
        ("medusa", {"layers": 2**63}, "layers\n.*less than or equal to 256"),
        ("ctc", {"slots": 0}, "slots\n.*greater than or equal to 1"),
        ("ctc", {"merge": 0}, "merge\n.*valid boolean"),
        ("ctc", {"band": -1}, "band\n.*greater than or equal to 0"),
        ("ctc", {"merge": True, "band": 1}, "head.merge=true takes any number of blanks: use head.band=null, not 1"),
        ("parallel", {"merge": False}, "merge\n.*[Uu]nexpected keyword"),
        ("medusa", {"transition": "full"}, "transition\n.*[Uu]nexpected keyword"),
        ("ctc", {"layers": -1}, "layers\n.*greater than or equal to 1"),
        ("eagle", {"width": 30}, "head.width=30 is no even multiple of head.heads=4"),
        ("eagle", {"heads": 0}, "heads\n.*greater than or equal to 1"),
    ],
)
def test_impossible_heads_are_refused(kind, sizes, message):
    with pytest.raises(ValueError, match=message):
        head_config({"kind": kind, **sizes})


def test_copies_draw_no_dropout(tmp_path):
    base = load_base(str(write_base(tmp_path / "b", attention_dropout=0.5)))
    head, ids = head_of(base).train(), torch.randint(2, 260, (1, 8))
    anchors = Anchors.of(torch.tensor([0]), torch.tensor([5]), 1)
    given = base.hidden(ids, attended=head.attended), base.embed(ids), anchors
    assert torch.equal(head(*given).states_NTD, head(*given).states_NTD)
