"""The base's choice: transformers' own warpers as the oracle, and the exactness of what is drawn."""

import itertools

import numpy as np
import pytest
import torch
from bases import write_base
from lattices import lattice_from_logits
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base import sampling
from ctcdraft.model.base.sampling import Sampling, gumbel, gumbel_of
from ctcdraft.model.draft import growth
from ctcdraft.model.draft.tree import search
from ctcdraft.model.heads import CtcConfig, head_on

CPU = torch.device("cpu")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = Sampling(temperature, top_k, top_p).probabilities(logits)
    assert torch.allclose(got, want.softmax(-1), atol=1e-12)


@pytest.mark.parametrize("top_p", [0.99, 0.9, 0.5, 0.1, 1e-6])
@pytest.mark.parametrize("top_k", [0, 7])
def test_what_is_chosen_within_top_p_without_sorting_is_the_best_of_what_sorting_leaves(top_p, top_k):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 300, generator=generator, dtype=torch.float64) * 3
    noise = torch.stack([gumbel(1, position, 300, CPU) for position in range(200)])
    sampling = Sampling(0.9, top_k, top_p)
    want = (sampling.warped(logits) + noise).argmax(dim=-1)
    assert torch.equal(sampling.choose(logits, None, noise), want)
    whole = (Sampling(0.9).warped(logits) + noise).argmax(dim=-1)
    assert not torch.equal(want, whole)  # of some rows the best of all is not among them


def test_top_p_keeps_the_fewest_likeliest_tokens_that_have_its_mass_and_top_k_as_many_as_it_says():
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 50, dtype=torch.float64)
    for row, order in zip(logits.softmax(dim=1), logits.argsort(dim=1, descending=True), strict=True):
        for top_p in (0.1, 0.5, 0.9):
            fewest = int((row[order].cumsum(dim=0) < top_p).sum()) + 1
            kept = Sampling(1.0, top_p=top_p).probabilities(row.log().unsqueeze(0))[0].nonzero().flatten()
            assert set(kept.tolist()) == set(order[:fewest].tolist())
        kept = Sampling(1.0, top_k=7).probabilities(row.log().unsqueeze(0))[0].nonzero().flatten()
        assert set(kept.tolist()) == set(order[:7].tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_the_smallest_temperatures_choose_what_none_does(dtype, temperature, options):
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)
    logits[torch.arange(20), torch.arange(20)] = 200.0  # no ties in low precision
    noise = torch.stack([gumbel(0, position, 300, CPU) for position in range(20)])
    assert torch.equal(Sampling(temperature, **options).choose(logits, None, noise), logits.argmax(dim=-1))
    small = logits - 500.0
    assert torch.equal(Sampling(temperature, **options).choose(small, None, noise), logits.argmax(dim=-1))


def test_the_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[1, 2, 2], [5, 6, 7], [29, 0, 1], [8, 8, 8]])
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids, True)
    want = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits).argmax(-1)
    assert torch.equal(Sampling(repetition_penalty=1.7).choose(logits, seen, None), want)


def test_noise_is_a_function_of_seed_and_position():
    first = gumbel(3, 17, 1000, CPU)
    assert torch.equal(first, gumbel(3, 17, 1000, CPU))
    for other in (gumbel(4, 17, 1000, CPU), gumbel(3, 18, 1000, CPU), gumbel(31, 7, 1000, CPU)):
        assert not torch.isclose(first, other).any()


@pytest.mark.parametrize("stream", [sampling.CHOICE, sampling.RESIDUAL])
def test_an_accelerator_computes_the_noise_of_the_host(stream):
    there = sampling._gumbel_on(CPU, sampling.noise_key(3, 17, stream), 1000)
    assert torch.allclose(there, gumbel(3, 17, 1000, CPU, stream), rtol=1e-13, atol=1e-13)
    few = np.array([999, 0, 512])
    assert np.array_equal(gumbel_of(few, 3, 17, stream), gumbel(3, 17, 1000, CPU, stream).numpy()[few])


def test_what_is_drawn_has_the_distribution_asked_for():
    """Chi-square over 20,000 positions, and a control that must fail: the noise of a neighbouring temperature."""
    sampling = Sampling(temperature=0.8, top_p=0.95)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1.5
    p = sampling.probabilities(logits)[0].numpy()
    noise = torch.stack([gumbel(0, position, 12, CPU) for position in range(20000)])
    counts = np.bincount(sampling.choose(logits.expand(20000, -1), None, noise), minlength=12)
    assert not counts[p == 0].any()
    assert _chi_square(counts, p) > 1e-3
    assert _chi_square(counts, Sampling(temperature=0.9, top_p=0.95).probabilities(logits)[0].numpy()) < 1e-9


def _chi_square(counts, p):
    expected = p * counts.sum()
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    halves = torch.tensor([(used.sum() - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()  # the survival function of chi-square


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A base with six tokens, so that outputs can be enumerated; none ends a sequence."""
    folder = write_base(tmp_path_factory.mktemp("six") / "b", vocab_size=6, bos_token_id=0, eos_token_id=None)
    base = load_base(str(folder), dtype="fp64")
    object.__setattr__(base, "eos_ids", ())
    return base


@pytest.fixture(scope="module")
def head(six):
    """It is random, and its drafts are often right."""
    torch.manual_seed(0)
    return head_on(six, CtcConfig(slots=4)).double().eval()


PROMPT = [1, 2, 3]


def _drawn(decoder, seeds=3000, length=3):
    """Counts of what so many seeds begin with, the tokens, and how many of them were accepted drafts."""
    counts, tokens, accepted = np.zeros((6, 6, 6)), [], 0
    for start in range(0, seeds, 100):
        batch = [*range(start, start + 100)]
        for out in decoder.generate([PROMPT] * 100, length, temperature=0.9, seed=batch):
            counts[tuple(out.tokens[:3])] += 1
            tokens.append(out.tokens)
            accepted += sum(out.accepted)
    return counts, tokens, accepted


@pytest.mark.slow
def test_speculative_samples_have_the_bases_joint_distribution(six, head):
    """Three tokens, 6^3 outcomes by enumeration, 3000 seeds."""
    counts, _, accepted = _drawn(Decoder(six, head, DraftConfig("tree", 20, top_k=6, budget="fixed")))
    p, wrong = _joint(six, 0.9), _joint(six, 0.9 * 1.3)
    assert accepted > 1000
    assert 0.5 * np.abs(counts / 3000 - p).sum() < 0.12
    assert _chi_square(_pooled(counts, p), _pooled(p, p)) > 1e-3
    assert _chi_square(_pooled(counts, wrong), _pooled(wrong, wrong)) < 1e-6


@pytest.mark.slow
def test_candidates_that_are_drawn_keep_the_joint_distribution(six, head):
    draft = DraftConfig("ranked", k=[3, 2], top_k=6, proposal="sampled", prompt_lookup=0)
    counts, _, accepted = _drawn(Decoder(six, head, draft))
    p = _joint(six, 0.9)
    assert accepted > 1000
    assert _chi_square(_pooled(counts, p), _pooled(p, p)) > 1e-3


@pytest.mark.slow
def test_shared_noise_accepts_more_than_that_of_another_position_and_changes_no_token(six, head, monkeypatch):
    draft = DraftConfig("chain", 3, top_k=6, proposal="shared", prompt_lookup=0, budget="fixed")
    _, want, _ = _drawn(Decoder(six), 300, 80)
    _, tokens, accepted = _drawn(Decoder(six, head, draft), 300, 80)
    monkeypatch.setattr(growth, "gumbel_of", lambda tokens, seed, at: gumbel_of(tokens, seed, at + 1))
    _, others, by_chance = _drawn(Decoder(six, head, draft), 300, 80)
    assert tokens == others == want
    assert accepted > 1.25 * by_chance > 1000


def _joint(base, temperature):
    tokens = torch.tensor([*itertools.product(range(6), repeat=3)])
    logits = base.logits(base.hidden(torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], dim=1)))
    log_p = (logits[:, len(PROMPT) - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(2, tokens.unsqueeze(2)).sum(dim=(1, 2)).exp().view(6, 6, 6).numpy()


def _pooled(values, p):
    """Outcomes that are expected less than about five times in 3000 draws count as one."""
    rare = p < 5 / 3000
    return np.append(values[~rare], values[rare].sum())


def test_the_slot_softmax_is_no_proposal_distribution():
    """Negative control of the theory: accept x ~ psi with min(1, p/q), else draw from (p - q)+. With q = psi of the
    first token the outcome is p; with the first slot's softmax as q it is not."""
    g = torch.Generator().manual_seed(5)
    slots, blank = torch.randn(4, 6, generator=g) * 3, torch.tensor([4.0, 0.0, 0.0, 0.0])
    p = torch.randn(6, generator=g).softmax(0).double().numpy()
    tree = search(lattice_from_logits(slots, blank, 6), 6, max_depth=1)
    drawn = np.zeros(6)
    drawn[tree.tokens] = tree.psi
    empty = 1 - drawn.sum()  # nothing drafted: the base draws by itself
    softmax = slots[0].softmax(0).double().numpy()
    for q, lossless in ((drawn / drawn.sum(), True), (softmax, False)):
        accept = np.minimum(1, p / q)
        residual = np.maximum(p - q, 0)
        proposal = drawn / drawn.sum()
        outcome = proposal * accept + (proposal * (1 - accept)).sum() * residual / residual.sum()
        variation = 0.5 * np.abs((1 - empty) * outcome + empty * p - p).sum()
        assert (variation < 1e-6) == lossless
        assert lossless or variation > 0.01


def test_settings_outside_their_range_are_refused():
    for settings in ({"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -2}, {"repetition_penalty": -1.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Sampling(**settings)
