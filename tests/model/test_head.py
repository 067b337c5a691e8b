import pytest
import torch

from ctcdraft.model import HeadConfig, build_head
from ctcdraft.model.head import flops_per_draft, parameters_of


@pytest.mark.parametrize(("kind", "recall"), [("ctc", False), ("ctc", True), ("parallel", False), ("medusa", False)])
def test_inference_with_a_cache_equals_the_training_forward(base, kind, recall):
    torch.manual_seed(0)
    config = HeadConfig(kind=kind, slots=5, width=32, mixer_width=16, layers=2, mixer_layers=2, recall=recall)
    head = build_head(config, base.hidden_size).double().eval()
    ids = torch.randint(2, 260, (1, 24))
    hidden, root = base.hidden(ids), base.embed(ids.roll(-1, 1))
    positions = torch.arange(24)
    want = head(hidden, root, torch.zeros(24, dtype=torch.long), positions)
    cache, start = head.new_cache(1, capacity=24), 0
    for count in (7, 1, 3, 1, 12):
        end = start + count
        got = head.step(hidden[:, start:end], root[:, start:end], [count], cache)
        assert torch.allclose(got.states_NTD[0], want.states_NTD[end - 1], atol=1e-10)
        if kind == "ctc":
            assert torch.allclose(got.blank_NT[0], want.blank_NT[end - 1], atol=1e-10)
        else:
            assert got.blank_NT is None
        start = end


@pytest.mark.parametrize("recall", [False, True])
def test_later_positions_and_padding_do_not_leak_into_an_anchor(base, recall):
    config = HeadConfig(slots=3, width=32, mixer_width=16, recall=recall)
    head = build_head(config, base.hidden_size).double()
    ids = torch.randint(2, 260, (1, 12))
    hidden, root = base.hidden(ids), base.embed(ids)
    anchor = (torch.zeros(1, dtype=torch.long), torch.tensor([5]))
    before = head(hidden, root, *anchor).states_NTD
    hidden[:, 6:], root = 99.0, root.clone()
    root[:, 6:] = -99.0
    assert torch.equal(before, head(hidden, root, *anchor).states_NTD)


def test_slots_that_recall_see_each_of_their_own_positions_and_of_no_other_row(base):
    config = HeadConfig(slots=3, width=32, mixer_width=16, recall=True)
    torch.manual_seed(0)
    head = build_head(config, base.hidden_size).double()
    hidden = torch.randn(2, 9, base.hidden_size, dtype=torch.float64, requires_grad=True)
    root = torch.randn(2, 9, base.hidden_size, dtype=torch.float64)
    torch.nn.init.zeros_(head.to_slot.weight)  # what is left comes by recall
    batch, position = torch.tensor([1, 0, 1]), torch.tensor([7, 4, 2])
    states = head(hidden, root, batch, position).states_NTD
    for n, (b, p) in enumerate(zip(batch, position, strict=True)):
        (grad,) = torch.autograd.grad(states[n].square().sum(), hidden, retain_graph=True)
        touched = grad.abs().sum(dim=2) > 0
        assert touched[b, : p + 1].all()
        assert touched.sum() == p + 1


def test_ctc_and_parallel_are_one_body(base):
    sizes = {kind: parameters_of(build_head(HeadConfig(kind=kind), base.hidden_size)) for kind in ("ctc", "parallel")}
    assert sizes["ctc"] - sizes["parallel"] == 128 + 1  # the blank's vector and bias


def test_cost_counts_the_lm_head_once_per_slot(base):
    head = build_head(HeadConfig(kind="medusa", slots=4), base.hidden_size)
    assert flops_per_draft(head, base) == (4 * 32 * 32, 4 * 260 * 32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kind": "hydra"}, "unknown"),
        ({"kind": "medusa", "recall": True}, "leave head.recall at false"),
        ({"recall": "yes"}, "must be true or false"),
        ({"kind": "eagle", "lookup": True}, "leave head.lookup at false"),
        ({"lookup": 1}, "head.lookup must be true or false, not int"),
        ({"beam": True}, "head.beam must be a whole number, not bool"),
        ({"rank": 8.0}, "must be a whole number"),
        ({"mixer_layers": 2**63}, "head.mixer_layers must be at most 256"),
        ({"slots": 0}, "head.slots=0 must be at least 1"),
        ({"merge": 0}, "head.merge must be true or false, not int"),
        ({"merge": False, "band": -1}, "head.band=-1 must be at least 0"),
        ({"band": 1}, "head.merge=true takes any number of blanks: use head.band=null, not 1"),
        ({"kind": "parallel", "merge": False}, "head=parallel has no blank"),
        ({"layers": -1}, "head.layers=-1"),
        ({"width": 30}, "even multiple"),
        ({"mixer_heads": 0}, "at least 1"),
    ],
)
def test_impossible_heads_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**sizes)
