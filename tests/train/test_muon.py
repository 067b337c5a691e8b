"""Muon's update has singular values near one, it is torch's own, and it is the same in shares as in one piece."""

import pytest
import torch
import torch.distributed as dist

from ctcdraft.model.head import HeadConfig, build_head, head_on
from ctcdraft.train.muon import Muon, matrices_of, orthogonal, updates_of
from ctcdraft.train.zero import Place, Shard


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_orthogonal_brings_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonal(normal(3, *shape)))
    # The quintic trades exactness for speed: most values land in 0.7 to 1.2, the smallest ones below.
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_updates_of_many_shapes_are_those_of_each_matrix_alone():
    momenta = [normal(8, 4), normal(2, 3, 4, 8), normal(8, 4, seed=1), normal(4, 8, seed=2)]
    found = updates_of(momenta)
    assert [update.shape for update in found] == [momentum.shape for momentum in momenta]
    for momentum, update in zip(momenta, found, strict=True):
        alone = [orthogonal(one.unsqueeze(0))[0] * 0.2 * 8**0.5 for one in momentum.reshape(-1, *momentum.shape[-2:])]
        assert torch.allclose(update, torch.stack(alone).view_as(momentum), atol=1e-6)


def stepped(optimizer, weights, steps=4):
    for step in range(steps):
        for place, weight in enumerate(weights):
            weight.grad = normal(*weight.shape, seed=10 * step + place)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_a_step_is_torchs_own(shape):
    ours, theirs = (torch.nn.Parameter(normal(*shape)) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    moved = stepped(Muon({"w": ours}, [], **options), [ours])[0] - normal(*shape)
    want = stepped(torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options), [theirs])[0] - normal(*shape)
    assert (moved - want).norm() < 0.03 * want.norm()  # theirs is in bfloat16


def test_what_is_no_matrix_is_stepped_by_adamw():
    ours, theirs = (torch.nn.Parameter(normal(7)) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    assert torch.equal(
        stepped(Muon({}, [ours], **options), [ours])[0], stepped(torch.optim.AdamW([theirs], **options), [theirs])[0]
    )


def test_muon_fits_a_linear_map():
    target, inputs = normal(8, 8), normal(64, 8, seed=1)
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon({"weight": weight}, [], lr=0.05, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (inputs @ (weight - target)).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


@pytest.mark.parametrize("kind", ["ctc", "parallel", "medusa", "eagle"])
def test_matrices_are_the_linear_maps_of_a_head(base, kind):
    config = HeadConfig(kind=kind, transition="none" if kind in ("medusa", "eagle") else "full")
    for head in (build_head(config, 16), head_on(base, config)):
        linear = {f"{name}.weight" for name, part in head.named_modules() if isinstance(part, torch.nn.Linear)}
        assert set(matrices_of(head)) == ({"weight"} if kind == "medusa" else linear - {"blank.weight"})
    assert not matrices_of(torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 4), "norm": torch.nn.RMSNorm(4)}))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("by_parameter", [False, True])
def test_what_ranks_hold_of_matrices_is_put_together_and_shared_out_again(monkeypatch, ranks, by_parameter):
    values = [normal(3, 5), normal(2, 3, 2, 2), normal(7, 11), normal(1, 2)]
    places, shares, start = [], [], 0
    if by_parameter:  # a stretch of each, filled up
        for value in values:
            stretch = -(-value.numel() // ranks)
            places.append(Place("", value.shape, start, stretch))
            filled = torch.cat([value.flatten(), torch.zeros(ranks * stretch - value.numel())])
            shares.append(filled.view(ranks, stretch))
            start += stretch
        rows = torch.cat(shares, dim=1)
    else:  # end to end, with a gap of two before each
        for value in values:
            places.append(Place("", value.shape, start + 2, None))
            shares += [torch.zeros(2), value.flatten()]
            start += 2 + value.numel()
        rows = torch.cat([*shares, torch.zeros(-start % ranks)]).view(ranks, -1)
    shard = Shard(0, places, torch.device("cpu"))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda every, mine: every.copy_(rows.flatten()))
    for rank, mine in enumerate(rows):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        whole = shard.whole(mine)
        assert all(torch.equal(a, b) for a, b in zip(whole, values, strict=True))
        assert torch.equal(shard.share(whole, mine), mine)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_that_divide_the_work_get_what_one_gets(monkeypatch, ranks):
    momenta = [normal(8, 4), normal(4, 4), normal(8, 4, seed=1), normal(2, 3, 4, 8)]
    parts = []
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda flat: parts.append(flat.clone()))
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        updates_of(momenta, among_ranks=True)
    assert (torch.stack(parts) != 0).sum(dim=0).max() == 1
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.copy_(sum(parts)))
    for found, want in zip(updates_of(momenta, among_ranks=True), updates_of(momenta), strict=True):
        assert torch.allclose(found, want, atol=1e-6)
