"""GliDe: what its cross-attention computes, whose keys it sees and what they are worth, on which bases it can be."""

import pytest
import torch
from bases import write_base
from drafting import random_head
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ctcdraft.model import load_base
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.heads import GlideConfig, head_on

CONFIG = GlideConfig(slots=4, width=32, beam=3, draft_vocab_size=None)


def along(head, base, ids, position, states=None):
    """Its states behind one anchor of each sequence; states: of the base, where not those of the ids."""
    states = base.hidden(ids, attended=head.attended) if states is None else states
    labels, rows = ids[:, position + 2 : position + 6], torch.arange(len(ids))
    at = Anchors.of(rows, torch.full_like(rows, position), len(ids))
    return head(states, base.embed(ids.roll(-1, 1)), at, base.embed(labels)).states_NTD


def test_its_attention_is_that_of_queries_turned_by_the_bases_own_class(base):
    """An oracle: head by head, on keys that are turned here."""
    cross = random_head(CONFIG, base).blocks[0].cross
    ids, rows = torch.randint(2, 260, (1, 6)), torch.randn(1, 2, 32).double()
    layer, positions = base.decoder.layers[-1].self_attn, torch.tensor([[3, 4]])
    entered = base.model.model(ids, output_hidden_states=True).hidden_states[1]
    made = base.decoder.layers[-1].input_layernorm(entered)
    keys, values = (part(made).view(1, 6, 2, 8).transpose(1, 2) for part in (layer.k_proj, layer.v_proj))
    query = cross.query(cross.norm(rows)).view(1, 2, 4, 8).transpose(1, 2)
    cos, sin = base.decoder.rotary_emb(keys, torch.arange(6).unsqueeze(0))
    keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
    cos, sin = base.decoder.rotary_emb(query, positions + 1)
    query, _ = apply_rotary_pos_emb(query, query, cos, sin)
    want = []
    for row, seen in enumerate((4, 5)):
        scores = [query[0, h, row] @ keys[0, h // 2, :seen].T / 8**0.5 for h in range(4)]
        want.append(torch.cat([scores[h].softmax(0) @ values[0, h // 2, :seen] for h in range(4)]))
    attended = base.attended(1)
    ((read_keys, read_values),) = attended.keys_and_values(base.hidden(ids, attended=attended)).values()
    allowed = (torch.arange(6) <= positions.unsqueeze(2)).unsqueeze(1)
    got = cross(rows, AttentionMask(positions, allowed), read_keys, read_values)
    assert torch.allclose(got[0], cross.merge(torch.stack(want)), atol=1e-6)  # of angles in float32


def test_keys_beyond_the_anchor_have_no_influence(base):
    head, ids = random_head(CONFIG, base), torch.randint(2, 260, (1, 12))
    states = base.hidden(ids, attended=head.attended)
    want = along(head, base, ids, 5, states)
    beyond, before, elsewhere = states.clone(), states.clone(), states.clone()
    beyond[:, 6:] = torch.randn_like(beyond[:, 6:])
    assert torch.equal(along(head, base, ids, 5, beyond), want)
    before[:, 5, 2 * base.hidden_size :] += 1.0
    assert not torch.allclose(along(head, base, ids, 5, before), want, atol=1e-4)
    elsewhere[..., : 2 * base.hidden_size] = torch.randn_like(elsewhere[..., : 2 * base.hidden_size])
    assert torch.equal(along(head, base, ids, 5, elsewhere), want), "keys and values are all that it takes of the base"


def test_its_layers_look_at_the_bases_last_ones_each_at_its_own(base):
    deep = random_head(GlideConfig(slots=4, width=32, layers=2, draft_vocab_size=None), base)
    assert deep.attended.layers == (0, 1)
    assert random_head(CONFIG, base).attended.layers == (1,)
    seen, states = [], base.hidden(torch.randint(2, 260, (1, 12)), attended=deep.attended)
    for block in deep.blocks:
        block.cross.register_forward_pre_hook(lambda module, given: seen.append(given[2]))
    along(deep, base, torch.randint(2, 260, (1, 12)), 5, states)
    pairs = deep.attended.keys_and_values(states)
    assert all(torch.equal(seen[i], pairs[i % 2][0]) for i in range(len(seen)))
    assert len(seen) == 2 * 4


def test_another_sequences_keys_lose_acceptance(base):
    """A head that learnt to read the base's keys; the words that it reads itself stay right."""
    torch.manual_seed(0)
    head, ids = head_on(base, CONFIG).double(), torch.randint(2, 260, (8, 12))
    ids[:, :6] = ids[:1, :6]  # all begin alike: which one it is, the last tokens say
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    states = base.hidden(ids, attended=head.attended)

    def log_p(states):
        logits = along(head, base, ids, 6, states) @ base.lm_weight.T
        return logits.log_softmax(-1).gather(2, ids[:, 8:12].unsqueeze(2)).mean(dim=(1, 2))

    for _ in range(60):
        optimizer.zero_grad()
        loss = -log_p(states).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        own, other = (log_p(states.roll(shift, 0)).exp().mean() for shift in (0, 3))
    assert own > 0.8
    assert other < 0.7 * own


def test_a_base_whose_keys_are_turned_otherwise_is_refused_and_without_keys_it_is_not(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    inside = load_base(str(write_base(tmp_path / "inside", "gptj", rotary_dim=4, **sizes)))
    learnt = load_base(str(write_base(tmp_path / "learnt", "gpt2", **sizes)))
    for base in (inside, learnt):
        with pytest.raises(ValueError, match=r"turns its keys in a way that the head cannot: take head.cross=false"):
            head_on(base, CONFIG)
        assert head_on(base, GlideConfig(slots=3, width=32, cross=False)).attended is None
