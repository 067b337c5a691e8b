"""Copied layers see the window that the layers see of which they are copies: on bases with windows of 16 positions, in
sequences of 40."""

import numpy as np
import pytest
import torch
from architectures import WINDOW, base_of_architecture
from drafting import difference_from_the_base, prompts, random_head, slots_behind

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.base.window import Windows
from ctcdraft.model.heads import CtcConfig, GlideConfig

LENGTH = 40
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # Gemma counts norms in float32


@pytest.fixture(
    scope="module",
    params=[  # all layers, the first of two, the second of two alone, chunks instead of windows
        ("mistral", {}),
        ("gemma2", {}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("llama4_text", {}),
    ],
    ids=lambda param: param[0],
)
def windowed(request):
    name, overrides = request.param
    return base_of_architecture(name, **overrides)


def head_of(base):
    return random_head(CtcConfig(slots=4, rank=8), base)


def full(config):
    return Windows(config, {}, False)


def test_a_fresh_body_is_the_base_beyond_its_window(windowed, monkeypatch):
    for layers in (1, 2):
        assert difference_from_the_base(windowed, layers, LENGTH) < 1e-6
    assert windowed.windows.width == WINDOW < LENGTH
    monkeypatch.setattr("ctcdraft.model.heads.last_layers.windows_of", full)
    assert difference_from_the_base(windowed, 2, LENGTH) > 1e-2


def test_slots_see_the_same_in_whole_rows_in_packed_ones_and_behind_a_cache(windowed):
    head, ids = head_of(windowed), torch.randint(2, 260, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    want = slots_behind(ids, head, windowed).states_NTD

    def states(ids, mask=None):
        hidden, root = windowed.hidden(ids, mask, attended=head.attended), windowed.embed(ids.roll(-1, 1))
        anchor = Anchors.of(torch.zeros(1, dtype=torch.long), torch.tensor([ids.shape[1] - 2]), 1, mask)
        with torch.no_grad():
            return head(hidden, root, anchor).states_NTD

    assert torch.allclose(states(ids), want, **CLOSE)
    packed, before = torch.cat([ids[:, 3:12], ids], dim=1), 9
    document = torch.tensor([[0] * before + [1] * LENGTH])
    places = torch.tensor([[*range(before), *range(LENGTH)]])
    mask = AttentionMask(places, (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1))
    assert torch.allclose(states(packed, mask), want, **CLOSE)
    head.body.windows = full(None)
    assert not torch.allclose(states(ids), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cross", [True, False])
def test_passes_of_glide_see_the_window_in_training_alone_and_packed_and_while_drafting(windowed, cross):
    head = random_head(GlideConfig(slots=3, beam=2, cross=cross), windowed)
    ids = torch.randint(2, 260, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    vocabulary, zero, before = head.vocabulary(windowed, 8), torch.zeros(1, dtype=torch.long), 9
    document = torch.tensor([[0] * before + [1] * LENGTH])
    places = torch.tensor([[*range(before), *range(LENGTH)]])
    mask = AttentionMask(places, (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1))
    rows = {"alone": (ids, None), "packed": (torch.cat([ids[:, 3:12], ids], dim=1), mask)}
    found = []
    for read, seen in rows.values():
        hidden, at = windowed.hidden(read[:, :-1], seen, attended=head.attended), torch.tensor([read.shape[1] - 2])
        anchors = Anchors.of(zero, at, 1, seen)
        (tree,) = head.drafts(hidden, read[:, 1:], anchors, vocabulary)
        path = [int(np.flatnonzero(tree.depths == 3)[0])]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        labels = torch.from_numpy(tree.tokens[path]).unsqueeze(0)
        states_TD = head(hidden, windowed.embed(read[:, 1:]), anchors, windowed.embed(labels)).states_NTD[0]
        log_p_T = vocabulary.tokens.logits(states_TD).log_softmax(dim=1).gather(1, labels.T)[:, 0]
        assert log_p_T.cumsum(dim=0).exp().tolist() == pytest.approx(tree.psi[path].tolist(), rel=1e-3)
        found.append(states_TD.detach())
    assert torch.allclose(*found, **CLOSE)


def test_fixed_shapes_draft_within_the_window_too(windowed):
    eager, fixed = (Decoder(windowed, head_of(windowed), DraftConfig(nodes=8, budget="fixed")) for _ in range(2))
    fixed.graphs = True
    prompt = prompts(1, seed=8, longest=60)[0]
    assert len(prompt) > 2 * WINDOW
    want, got = eager.generate(prompt, 30, eos=[]), fixed.generate(prompt, 30, eos=[])
    assert (got.tokens, got.nodes, got.accepted) == (want.tokens, want.nodes, want.accepted)
    assert np.allclose(got.expected, want.expected, rtol=1e-4)
