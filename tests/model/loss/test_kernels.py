"""The primitive and the lattice: every implementation against the oracle, in all awkward shapes."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ctcdraft.model.loss import linear_lse, reference
from ctcdraft.model.loss.kernels import linear_lse_gather, prefix_lattice
from ctcdraft.model.loss.reference import Emissions

pytest.importorskip("triton", reason="triton is not installed")
FAST = ["chunked", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # with no GPU the kernels run in Triton's interpreter


def problem(M=7, V=31, D=13, K=3, dtype=torch.float64, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(M, D, generator=g, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    index = torch.randint(0, V, (M, K), generator=g)
    return hidden.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_(), index.to(DEVICE)


def everything(hidden, weight, index, implementation):
    """All outputs, and the gradients of a sum in which every output has a weight of its own."""
    lse, logits = linear_lse_gather(hidden, weight, index, implementation)
    total = sum(
        (part * torch.linspace(-1, 2, part.numel(), device=DEVICE).view(part.shape)).sum() for part in (lse, logits)
    )
    return lse, logits, *torch.autograd.grad(total, [hidden, weight])


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("M", "V", "D", "K"), [(1, 1, 1, 1), (7, 31, 13, 3), (3, 5, 2, 0), (31, 67, 3, 1), (5, 5000, 7, 2)]
)
def test_outputs_and_gradients_equal_the_oracle(M, V, D, K, implementation):
    arguments = problem(M, V, D, K)
    want = everything(*arguments, "reference")
    got = everything(*arguments, implementation)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("tile", [5, 7, 1, 3])
def test_the_tile_has_no_effect(monkeypatch, tile):
    arguments = problem()
    want = everything(*arguments, "reference")
    monkeypatch.setattr(linear_lse, "tile_rows", lambda *_: tile)
    for a, b in zip(everything(*arguments, "chunked"), want, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_tile_keeps_to_its_budget():
    for device, budget in linear_lse.TILE_BYTES.items():
        for rows in (1, 100, 2048, 65536):
            for vocab in (100, 32000, 151936):
                height = linear_lse.tile_rows(rows, vocab, 4, device)
                assert height <= rows
                assert height * vocab * 4 <= max(budget, linear_lse.FEWEST * vocab * 4)


@pytest.mark.parametrize("implementation", FAST)
def test_no_gradient_no_slope_same_values(implementation):
    hidden, weight, index = problem(M=150, V=300, D=70)
    want = linear_lse_gather(hidden, weight, index, "reference")
    with torch.no_grad():
        got = linear_lse_gather(hidden, weight, index, implementation)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_either_side_may_be_frozen(implementation, trained):
    hidden, weight, index = problem()
    frozen = weight if trained == "hidden" else hidden
    frozen.requires_grad_(False)
    grads = []
    for name in (implementation, "reference"):
        lse, logits = linear_lse_gather(hidden, weight, index, name)
        grads.append(torch.autograd.grad(lse.sum() - logits.sum(), weight if trained == "weight" else hidden)[0])
    assert torch.allclose(*grads, atol=1e-12)


@pytest.mark.parametrize("implementation", FAST)
def test_gradcheck_with_a_column_twice(implementation):
    hidden, weight, _ = problem(M=4, V=5, D=3)
    index = torch.tensor([[0, 0], [1, 2], [4, 4], [3, 0]], device=DEVICE)
    assert torch.autograd.gradcheck(lambda h, w: linear_lse_gather(h, w, index, implementation), [hidden, weight])


@pytest.mark.parametrize("implementation", FAST)
def test_rows_do_not_know_each_other_and_a_shift_of_the_logits_shifts_lse(implementation):
    hidden, weight, index = problem(M=11)
    lse, logits = linear_lse_gather(hidden, weight, index, implementation)
    order = torch.arange(10, -1, -1, device=DEVICE)
    turned = linear_lse_gather(hidden[order], weight, index[order], implementation)
    assert torch.allclose(turned[0], lse[order], atol=1e-12)
    assert torch.allclose(turned[1], logits[order], atol=1e-12)
    shift = torch.randn(1, hidden.shape[1], dtype=torch.float64, device=DEVICE)  # adds <h, shift> to a whole row
    moved = linear_lse_gather(hidden, weight + shift, index, implementation)[0]
    assert torch.allclose(moved, lse + hidden @ shift[0], atol=1e-10)


@pytest.mark.parametrize("implementation", FAST)
def test_extreme_logits_stay_exact(implementation):
    hidden, weight, index = problem(M=5, V=40, D=1)
    with torch.no_grad():
        weight.copy_(torch.linspace(-1e4, 1e4, 40, device=DEVICE).unsqueeze(1))
        hidden.copy_(torch.tensor([[1.0], [-1.0], [1e-9], [0.5], [1e-4]], device=DEVICE))  # 0 would tie the largest
    for a, b in zip(
        everything(hidden, weight, index, implementation),
        everything(hidden, weight, index, "reference"),
        strict=True,
    ):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("first", ["small", "large"])
def test_large_logits_anywhere_stay_exact(monkeypatch, first):
    hidden, weight, index = problem(M=9, V=40, D=5)
    with torch.no_grad():
        weight[20:] *= 300
        weight.copy_(weight.flip(0) if first == "large" else weight)
    want = everything(hidden, weight, index, "reference")
    monkeypatch.setattr(linear_lse, "tile_rows", lambda *_: 4)
    for a, b in zip(everything(hidden, weight, index, "chunked"), want, strict=True):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", FAST)
def test_strided_input(implementation):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(13, 7, generator=g, dtype=torch.float64).to(DEVICE).T.requires_grad_()
    weight = torch.randn(31, 26, generator=g, dtype=torch.float64).to(DEVICE)[:, ::2].requires_grad_()
    index = torch.randint(0, 31, (3, 7), generator=g).to(DEVICE).T
    for a, b in zip(
        everything(hidden, weight, index, implementation),
        everything(hidden, weight, index, "reference"),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)
    with torch.no_grad():
        got = linear_lse_gather(hidden, weight, index, implementation)
        want = linear_lse_gather(hidden, weight, index, "reference")
    assert torch.allclose(got[0], want[0])
    assert torch.allclose(got[1], want[1])


@pytest.mark.parametrize("implementation", FAST)
def test_no_rows(implementation):
    hidden, weight, index = problem(M=0)
    lse, logits, grad_hidden, grad_weight = everything(hidden, weight, index, implementation)
    assert lse.shape == (0,)
    assert logits.shape == (0, 3)
    assert grad_hidden.shape == hidden.shape
    assert not grad_weight.any()


@pytest.mark.parametrize("implementation", FAST)
def test_two_runs_are_bitwise_equal(implementation):
    arguments = problem(M=67, V=301, dtype=torch.float32)
    first, second = (everything(*arguments, implementation) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", FAST)
def test_a_second_derivative_is_refused_in_words(implementation):
    hidden, weight, index = problem()
    lse, _ = linear_lse_gather(hidden, weight, index, implementation)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(lse.sum(), hidden, create_graph=True)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("implementation", FAST)
def test_float32_is_within_1e_5_of_float64(implementation):
    arguments = problem(M=64, V=1500, D=64, dtype=torch.float32, scale=0.5)
    got = everything(*arguments, implementation)
    want = everything(*(_wide(part) for part in arguments), "reference")
    for a, b in zip(got, want, strict=True):
        assert relative(a, b.double()) < 1e-5


@pytest.mark.parametrize("implementation", FAST)
def test_bfloat16_gradients_are_no_worse_than_torchs(implementation):
    """Against float64 on the same rounded inputs. Triton's interpreter truncates to bfloat16 where a GPU rounds to
    nearest: there only the bounds are checked."""
    arguments = problem(M=64, V=1500, D=64, K=4, dtype=torch.bfloat16, scale=0.125)
    want = gradients(*(_wide(part) for part in arguments), "reference")
    got = gradients(*arguments, implementation)
    torch_own = gradients(*arguments, "torch")
    for a, b, c in zip(got, want, torch_own, strict=True):
        assert relative(a, b) < 1e-2
        assert torch.cosine_similarity(a.double().flatten(), b.flatten(), dim=0) > 0.9999
        if implementation == "chunked" or DEVICE == "cuda":
            assert relative(a, b) <= relative(c, b) * 1.02


def gradients(hidden, weight, index, implementation):
    """Of a cross-entropy, which needs lse and gathered logits."""
    if implementation == "torch":
        log_probs = (hidden @ weight.T).log_softmax(1)
        loss = -log_probs.gather(1, index).float().sum()
    else:
        lse, logits = linear_lse_gather(hidden, weight, index, implementation)
        loss = (lse.unsqueeze(1) - logits).sum()
    return torch.autograd.grad(loss, [hidden, weight])


def _wide(tensor):
    return tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor


def lattice_problem(N, T, U, seed=0):
    g = torch.Generator().manual_seed(seed)
    emit, stay, blank = (torch.randn(N, T, width, generator=g, dtype=torch.float64) - 1 for width in (U, U, U + 1))
    repeat = torch.rand(N, U, generator=g) < 0.4
    repeat[:, :1] = False
    slots = torch.randint(0, T + 1, (N,), generator=g)
    emit, stay, blank = (part.to(DEVICE).requires_grad_() for part in (emit, stay, blank))
    return Emissions(emit, stay, blank, repeat.to(DEVICE), slots.to(DEVICE))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("N", "T", "U"), [(70, 5, 3), (1, 1, 1), (3, 4, 0), (65, 3, 3), (0, 4, 2)])
def test_the_recursion_equals_the_oracle(implementation, N, T, U):
    emissions = lattice_problem(N, T, U)
    parts, outcomes = emissions[:3], []
    for name in ("reference", implementation):
        psi, end = prefix_lattice(emissions, name)
        values = [part.clamp(min=-1e20) for part in (psi, end)]  # what is impossible is only "very small"
        weighted = [
            (v * (v > -1e20) * torch.linspace(1, 2, v.numel(), device=DEVICE).view(v.shape)).sum() for v in values
        ]
        grads = torch.autograd.grad(sum(weighted), parts, allow_unused=True)
        outcomes.append(
            [*values, *(torch.zeros_like(p) if g is None else g for g, p in zip(grads, parts, strict=True))]
        )
    for a, b in zip(*outcomes, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)


def test_kernels_are_launched_on_the_device_of_what_they_read(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: devices.append(tensor.device) or nullcontext())
    emissions = lattice_problem(3, 4, 2)
    everything(*problem(), "triton")
    prefix_lattice(emissions, "triton")
    assert devices == [emissions.emit_NTU.device] * 2


def test_the_lanes_refuse_a_second_derivative():
    emissions = lattice_problem(2, 3, 1)
    psi, _ = prefix_lattice(emissions, "triton")
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(psi.sum(), emissions.emit_NTU, create_graph=True)


def test_offsets_past_two_to_the_31_are_computed_in_64_bit():
    """By arithmetic: a row of a stride so long that the tensor could not be allocated."""
    import triton
    import triton.language as tl

    @triton.jit
    def offset_kernel(out_ptr, first, stride):
        row = first + tl.program_id(0).to(tl.int64)  # the form all kernels use
        tl.store(out_ptr + tl.program_id(0), row * stride)

    out = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    offset_kernel[(3,)](out, 2**20, 152064)
    assert out.tolist() == [(2**20 + i) * 152064 for i in range(3)]


@pytest.fixture(scope="module")
def sm90():
    """What Triton makes of the kernels for sm_90, compiled with no GPU in a process of its own."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parents[2] / "helpers" / "sm90.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_all_kernels_compile_for_sm_90_within_its_shared_memory(sm90, dtype):
    assert set(sm90[dtype]) == {"exponentials", "lattice_forward", "lattice_backward"}
    for name, facts in sm90[dtype].items():
        assert facts["cubin_bytes"] > 0
        assert facts["shared_bytes"] <= 227 * 1024, name
        assert facts["atomics"] == 0, name
        assert facts["wide_offsets"] > 0, name


@pytest.mark.slow
def test_the_lanes_do_not_wait_for_each_other(sm90):
    for name in ("lattice_forward", "lattice_backward"):
        facts = sm90["bf16"][name]
        assert (facts["barriers"], facts["shuffles"], facts["shared_bytes"]) == (0, 0, 0), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 4)}, r"hidden \[M, D\]"),
        ({"index": torch.zeros(3, 1, dtype=torch.long)}, r"hidden \[M, D\]"),
        ({"weight": torch.zeros(5, 3, dtype=torch.float64)}, "convert one of them"),
        ({"implementation": "cuda"}, "is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "index": torch.zeros(2, 1, dtype=torch.long),
        "implementation": "auto",
    }
    with pytest.raises(ValueError, match=message):
        linear_lse_gather(*{**arguments, **change}.values())


def test_triton_without_gpu_or_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs the triton package"):
        linear_lse_gather(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, 1, dtype=torch.long), "triton")


def test_a_wrong_recursion_would_be_noticed(monkeypatch):
    """Negative control: a lattice that forgets the blank between equal labels differs from the oracle."""
    emissions = lattice_problem(20, 5, 3)
    right, _ = prefix_lattice(emissions, "triton")
    wrong, _ = reference.prefix_lattice(emissions._replace(repeat_NU=torch.zeros_like(emissions.repeat_NU)))
    assert not torch.allclose(right, wrong)
