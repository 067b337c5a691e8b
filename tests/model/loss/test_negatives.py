"""Sampled softmax: what it samples, and that the normaliser it estimates is right on average."""

import pytest
import torch

from ctcdraft.model.lattice.topology import Topology
from ctcdraft.model.loss.negatives import Negatives
from ctcdraft.model.loss.objective import anchor_losses

V, D = 400, 8


def counts():
    return (1000 / torch.arange(1, V + 1)).long()


def test_as_many_are_drawn_as_are_asked_for_and_frequent_ones_more_often():
    negatives = Negatives(counts(), 60)
    assert abs(float(negatives.probability_X.sum()) - 60) < 1e-3
    assert bool((negatives.probability_X.diff() <= 0).all())
    labels, length = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    often = torch.zeros(V)
    for seed in range(300):
        tokens, _, _ = negatives.draw(torch.tensor([[seed % V, seed // V]]), torch.tensor([2]))
        often[tokens] += 1 / 300
    off = (often - negatives.probability_X).abs()
    assert float(off.max()) < 0.15
    assert torch.equal(*(negatives.draw(labels, length)[0] for _ in range(2)))


def test_every_label_is_there_with_no_bias_and_its_place():
    negatives = Negatives(counts(), 20)
    labels, lengths = torch.tensor([[399, 3, 398], [7, 0, 0]]), torch.tensor([3, 1])
    tokens, bias, places = negatives.draw(labels, lengths)
    assert torch.equal(tokens[places[0]], labels[0])
    assert int(tokens[places[1, 0]]) == 7
    assert not bias[places[0]].any()
    assert bool((tokens.diff() > 0).all())
    others = ~torch.isin(tokens, torch.tensor([399, 3, 398, 7]))
    assert torch.allclose(bias[others], -negatives.probability_X[tokens[others]].log())


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["prefix_ctc", "cross_entropy"])
def test_the_mean_of_the_estimated_normaliser_is_the_whole_vocabularys(objective, monkeypatch):
    """Of 1/psi, which is linear in the sum over the vocabulary where one token is looked at."""
    torch.manual_seed(0)
    negatives = Negatives(counts(), 60)
    states, weight = torch.randn(1, 1, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64) / 2
    labels, length = torch.tensor([[300]]), torch.tensor([1])
    blank = None if objective == "cross_entropy" else torch.full((1, 1), -1e9, dtype=torch.float64)
    options = {"objective": objective, "topology": Topology(False, 0)}
    whole = anchor_losses(states, weight, blank, labels, length, **options).log_psi_NU[0, 0].neg().exp()
    found, biased = [], []
    for seed in range(2000):
        monkeypatch.setattr("zlib.crc32", lambda _, seed=seed: seed)
        tokens, bias, places = negatives.draw(labels, length)
        given = states, weight[tokens], blank, places, length
        found.append(float(anchor_losses(*given, bias_V=bias, **options).log_psi_NU[0, 0].neg().exp()))
        biased.append(float(anchor_losses(*given, **options).log_psi_NU[0, 0].neg().exp()))
    error = float(torch.tensor(found).std()) / len(found) ** 0.5
    assert abs(sum(found) / len(found) - float(whole)) < 4 * error
    assert abs(sum(biased) / len(biased) - float(whole)) > 40 * error, "the control: without the bias"


@pytest.mark.parametrize("size", [0, V])
def test_a_size_that_is_no_sample_is_refused(size):
    with pytest.raises(ValueError, match=f"{size} negatives of {V} draft tokens"):
        Negatives(counts(), size)
