"""Muon's update has singular values near one, and it finds the minimum of a simple problem."""

import pytest
import torch

from ctcdraft.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_orthogonal_brings_singular_values_near_one(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    # The quintic trades exactness for speed: most values land in 0.7 to 1.2, the smallest ones below.
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_muon_fits_a_linear_map():
    generator = torch.Generator().manual_seed(0)
    target, inputs = (torch.randn(*shape, generator=generator) for shape in ((8, 8), (64, 8)))
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.05, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (inputs @ (weight - target)).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
