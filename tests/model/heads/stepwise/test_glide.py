"""GliDe: what its passes compute, whose keys they see and what these are worth."""

import torch
from drafting import random_head

from ctcdraft.model.base.context import Anchors
from ctcdraft.model.heads import GlideConfig, head_on

CONFIG = GlideConfig(slots=4, beam=3, draft_vocab_size=None)


def along(head, base, ids, position, states=None):
    """Its states behind one anchor of each sequence; states: of the base, where not those of the ids."""
    states = base.hidden(ids, attended=head.attended) if states is None else states
    labels, rows = ids[:, position + 2 : position + 6], torch.arange(len(ids))
    at = Anchors.of(rows, torch.full_like(rows, position), len(ids))
    return head(states, base.embed(ids.roll(-1, 1)), at, base.embed(labels)).states_NTD


def test_its_passes_are_those_layers_of_the_base_behind_the_bases_own_keys(base):
    """An oracle: each pass is the newest row of the base's own layers over the whole sequence, where what it enters
    with is the embedded token and, up to the anchor, what entered them in the base."""
    head, ids, at = head_on(base, CONFIG).double(), torch.randint(2, 260, (1, 12)), 5
    states, D = base.hidden(ids, attended=head.attended), base.hidden_size
    got = along(head, base, ids, at, states)
    read = base.embed(ids[:, at + 1 : at + 5])  # the root and three labels
    entering = torch.cat([states[:, : at + 1, D : 2 * D], read], dim=1)
    decoder = base.decoder
    angles = decoder.rotary_emb(entering, torch.arange(entering.shape[1]).unsqueeze(0))
    causal = torch.full((10, 10), float("-inf")).triu(1)[None, None].double()
    for number in head.attended.layers:
        entering = decoder.layers[number](entering, attention_mask=causal, position_embeddings=angles)
    assert torch.allclose(got, decoder.norm(entering)[:, at + 1 :], atol=1e-6)  # of angles in float32


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


def test_without_the_bases_keys_it_takes_nothing_of_the_bases_work(base):
    head, ids = (
        random_head(GlideConfig(slots=4, cross=False, draft_vocab_size=None), base),
        torch.randint(2, 260, (1, 12)),
    )
    states = base.hidden(ids)
    assert head.attended is None
    assert torch.equal(along(head, base, ids, 5, torch.randn_like(states)), along(head, base, ids, 5, states))


def test_another_sequences_keys_lose_acceptance(base):
    """With the first token, of a head that learnt to read them; what follows, the words that it reads say."""
    torch.manual_seed(0)
    head, ids = head_on(base, CONFIG).double(), torch.randint(2, 260, (8, 12))
    ids[:, :6], ids[:, 7] = ids[:1, :6], ids[0, 7]  # all are alike to the root, but for the token before it
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    states = base.hidden(ids, attended=head.attended)

    def log_p(states):
        logits = along(head, base, ids, 6, states) @ base.lm_weight.T
        return logits.log_softmax(-1)[:, 0].gather(1, ids[:, 8:9]).squeeze(1)

    for _ in range(60):
        optimizer.zero_grad()
        loss = -log_p(states).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        own, other = (log_p(states.roll(shift, 0)).exp().mean() for shift in (0, 3))
    assert own > 0.8
    assert other < 0.5 * own
