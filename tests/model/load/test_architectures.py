"""Every architecture decodes as transformers' `generate` does, or is refused for the true reason."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, NOT_ALONE, REFUSED, WINDOW, base_of_architecture, outcome, own_base
from bases import tiny_tokenizer
from drafting import prompts, random_trees

from ctcdraft.model import Decoder
from ctcdraft.model.base.window import Windows
from ctcdraft.model.heads import CtcConfig, head_on
from ctcdraft.model.load.pretrained import base_of

pytestmark = pytest.mark.slow

WINDOWED = ["gemma2", "gpt_oss", "llama4_text", "mistral"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_base_decodes_as_generate_or_is_refused_for_its_reason(name):
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^base\.path={name}: \w+ {REFUSED[name]}[^\n]*$"):
            base_of_architecture(name)
    else:
        assert outcome(name) == (True, "")


@pytest.mark.parametrize("name", ["bloom", "mpt", "lfm2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reason_does_not_depend_on_the_precision(name, dtype):
    with pytest.raises(ValueError, match=REFUSED[name]):
        base_of_architecture(name, dtype)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_tree_mask_without_the_window_would_change_tokens(name, monkeypatch):
    base = own_base(name)
    prompt = prompts(1, seed=8, longest=60)[0]
    assert len(prompt) > WINDOW
    truth = Decoder(base).generate(prompt, 28, eos=[]).tokens
    monkeypatch.setattr(Windows, "masks", lambda self, mask, positions, cached: mask)
    assert random_trees(base, truth, 0).generate(prompt, 28, eos=[]).tokens != truth


@pytest.mark.parametrize("name", WINDOWED)
def test_a_node_behind_the_window_of_places_still_sees_by_positions(name):
    """More siblings than the window is wide lie between a node and its parent."""
    base = own_base(name)
    Q, past = 2 * WINDOW, 3 * WINDOW + 1
    sees = torch.eye(Q, dtype=torch.bool)
    sees[:, 0] = sees[-1, 1] = True
    mask = torch.zeros(1, 1, Q, past + Q, dtype=torch.float64)
    mask[..., past:].masked_fill_(~sees, torch.finfo(torch.float64).min)
    positions = past + torch.tensor([[0, *[1] * (Q - 2), 2]])
    given = base.windows.masks(mask, positions, cached=True)
    (narrow,) = [m for kind, m in given.items() if kind != "full_attention"] if isinstance(given, dict) else [given]
    at = torch.tensor([*range(past), *positions[0].tolist()])
    for row in range(Q):
        own = int(positions[0, row])
        inside = at // WINDOW == own // WINDOW if name == "llama4_text" else own - at < WINDOW
        assert torch.equal(narrow[0, 0, row] == 0, inside & (mask[0, 0, row] == 0))


def test_a_window_that_a_mask_cannot_give_caps_the_context(monkeypatch):
    model = own_base("mistral").model
    monkeypatch.setattr(Windows, "masks", lambda self, mask, positions, cached: mask)
    with pytest.warns(UserWarning, match=f"a context of {WINDOW} tokens, its window"):
        assert base_of(copy.deepcopy(model), tiny_tokenizer(), "b").context_length == WINDOW


def test_a_base_that_scales_queries_by_places_is_used_as_far_as_these_are_scaled_alike():
    """Otherwise a row that is decoded beside a longer one would be scaled as that one is."""
    base = base_of_architecture("llama4_text", no_rope_layers=[1, 0], floor_scale=64, attn_scale=2.0)
    asked = prompts(1, seed=7, longest=9) + prompts(1, seed=8, longest=50)
    alone = [Decoder(base).generate(prompt, 100, eos=[]).tokens for prompt in asked]
    assert [out.tokens for out in Decoder(base).generate(asked, 100, eos=[])] == alone
    for number, (prompt, truth) in enumerate(zip(asked, alone, strict=True)):
        assert random_trees(base, truth, number).generate(prompt, 100, eos=[]).tokens == truth
    assert base.context_length == 56


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(REFUSED)))
def test_a_head_copies_layers_where_these_run_alone(name):
    head = head_on(own_base(name), CtcConfig(layers=2))
    assert (head.attended is None) == (head.body is None) == (name in NOT_ALONE)
