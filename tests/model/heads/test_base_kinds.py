"""Heads that read a base's keys and values, on every kind of base that turns or norms these in its own way."""

import pytest
import torch
import torch.nn.functional as F
from architectures import base_of_architecture
from drafting import prompts, random_head

from ctcdraft.data.batches import Batch
from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.cache import PassingCache, TreeCache
from ctcdraft.model.base.context import AttentionMask
from ctcdraft.model.heads import CtcConfig, GlideConfig, MedusaConfig, head_on
from ctcdraft.model.heads.transition import Slots
from ctcdraft.model.heads.vocabulary import DraftVocabulary
from ctcdraft.train.task import DraftTask, ObjectiveConfig, base_features

pytestmark = pytest.mark.slow

KINDS = {  # and what is changed of their row in architectures.py
    "llama": {},
    "mistral": {},
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen3": {},  # norms queries and keys
    "olmo2": {},  # norms them over all heads
    "gemma2": {},  # caps attention softly, windows
    "gemma3_text": {},  # other angles in layers with a window
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "stablelm": {"partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_pct": 0.25},
    "glm4": {"partial_rotary_factor": 0.5},  # and turns neighbours, not halves
    # scales what enters its first layer, and logits
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "smollm3": {"no_rope_layers": [1, 0]},  # turns nothing in its second layer
}
HEADS = {
    "ctc": (CtcConfig(slots=4, layers=2, rank=8), ObjectiveConfig("prefix_ctc", labels=3, negatives=None)),
    "glide": (
        GlideConfig(slots=4, beam=3),
        ObjectiveConfig("cross_entropy", labels=4, negatives=None),
    ),
}
SETTINGS = [{}, {"temperature": 1.0, "seed": 3}]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    base = base_of_architecture(request.param, **KINDS[request.param])
    if base.lm_bias is not None:  # Phi's, which begins as zeros
        base.lm_bias.normal_()
    return base


@pytest.fixture(scope="module")
def plain(kind):
    """Prompts within the windows of 16 positions and beyond; by settings, how the base goes on."""
    asked = [prompts(1, seed=7, longest=9)[0], prompts(1, seed=8, longest=60)[0]]
    return asked, [(each, Decoder(kind).generate(asked, 16, eos=[], **each)) for each in SETTINGS]


def test_a_token_is_embedded_as_it_enters_the_first_layer(kind):
    ids, D = torch.arange(4, 12).unsqueeze(0), kind.hidden_size
    assert torch.allclose(kind.embed(ids), kind.hidden(ids, attended=kind.attended(kind.depth))[..., D : 2 * D])


def test_a_heads_products_are_the_bases_logits(kind):
    """But for their soft cap."""
    states = kind.hidden(torch.arange(4, 12).unsqueeze(0))
    cap = getattr(kind.model.config.get_text_config(), "final_logit_softcapping", None)
    logits = DraftVocabulary(kind, torch.arange(3, 200, 2)).logits(states)
    want = kind.logits(states)[..., 3:200:2]
    assert torch.allclose(logits if cap is None else cap * torch.tanh(logits / cap), want)


@pytest.mark.parametrize("distill", [0.0, 1.0])
def test_a_loss_is_that_of_the_bases_logits(kind, distill):
    """Of slots that hold what the base has where it says the labels; but for soft caps, which slots do not have."""
    ids, at = torch.randint(2, 250, (1, 24)), torch.tensor([3, 9, 18])
    batch = Batch(ids, torch.zeros_like(at), at, ids[0, at.unsqueeze(1) + torch.arange(2, 5)], torch.full((3,), 3))
    objective = ObjectiveConfig("cross_entropy", labels=3, negatives=None, distill=distill, decay=1.0)
    config = MedusaConfig(slots=3, draft_vocab_size=None)
    task = DraftTask(head_on(kind, config), objective, kind)
    states = kind.hidden(ids)
    slots = states[0, at.unsqueeze(1) + torch.arange(1, 4)]
    found = task.losses(Slots(slots), states, batch)
    said = kind.logits(slots)
    cap = getattr(kind.model.config.get_text_config(), "final_logit_softcapping", None)
    log_q = (said if cap is None else cap * torch.atanh(said / cap)).log_softmax(dim=2)
    labels = F.one_hot(batch.labels_NU, kind.vocab_size).to(log_q.dtype)
    want = -(torch.lerp(labels, said.softmax(dim=2), distill) * log_q).sum(dim=(1, 2))
    assert torch.allclose(3 * found.loss_N, want)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_learns_on_it_and_its_drafts_change_no_token(kind, plain, name):
    config, objective = HEADS[name]
    head = random_head(config, kind)  # a copy of a random base's last layers can hardly be better than it is
    assert len(head.attended.layers) == 2
    ids, at = torch.randint(2, 250, (2, 24)), torch.tensor([3, 9, 18])
    positions = at.repeat(2)
    labels = torch.stack([ids[n // 3, p + 2 : p + 2 + objective.labels] for n, p in enumerate(positions.tolist())])
    batch = Batch(ids, torch.tensor([0, 0, 0, 1, 1, 1]), positions, labels, torch.full((6,), objective.labels))
    task = DraftTask(head, objective, kind)
    optimizer, losses = torch.optim.Adam(task.parameters(), 1e-3), []
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = task(*base_features(kind, batch, torch.float64, head), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    decoder = Decoder(kind, head.for_drafting(kind, torch.float64), DraftConfig(nodes=8, budget="fixed"))
    asked, answers = plain
    for settings, wanted in answers:
        for prompt, want in zip(asked, wanted, strict=True):
            out = decoder.generate(prompt, 16, eos=[], **settings)
            assert out.tokens == want.tokens
            assert sum(out.nodes) > 20


def test_copied_layers_make_of_the_bases_own_states_what_the_base_makes(kind):
    """On the keys that the base has committed, at that position; elsewhere it is something else."""
    head, ids = head_on(kind, HEADS["ctc"][0]), prompts(1, seed=1, longest=40)[0][:14]
    assert len(ids) > 10
    D, at = kind.hidden_size, len(ids) - 1
    states = kind.hidden(torch.tensor([ids]), attended=head.attended)
    cache = TreeCache(kind.depth, 1, len(ids))
    kind.hidden(torch.tensor([ids[:-1]]), cache=cache, attended=head.attended)
    cache.commit([range(at)])
    read = {layer: cache.committed(layer) for layer in head.attended.layers}
    body, everything = head.body.double(), torch.ones(1, 1, 1, at + 1, dtype=torch.bool)

    def made(position):
        mask = AttentionMask(torch.full((1, 1), position), everything)
        return body(states[:, -1:, D : 2 * D], mask, PassingCache(read))

    with torch.no_grad():
        assert torch.allclose(made(at), states[:, -1:, :D], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(made(at + 9), states[:, -1:, :D], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["falcon", "deepseek_v3"])
def test_a_base_whose_layers_do_not_run_alone_is_refused_by_glide_and_others_say_so(name):
    base = base_of_architecture(name)
    problem = f"the last layers of {base.name} are quantised or do not run alone"
    with pytest.raises(ValueError, match=f"^head=glide: {problem}: take another"):
        head_on(base, HEADS["glide"][0])
    with pytest.warns(UserWarning, match=f"^{problem}, so head=ctc copies none: its slots see"):
        head_on(base, HEADS["ctc"][0])


def test_quantised_layers_are_not_copied_since_they_cannot_be_trained():
    base = base_of_architecture("llama")
    base.model.hf_quantizer = "as transformers leaves it on a model with packed weights"
    with pytest.warns(UserWarning, match="are quantised or do not run alone"):
        assert head_on(base, HEADS["ctc"][0]).attended is None
