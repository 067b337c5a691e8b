"""The ways to compute one CTC loss over a large vocabulary that `fused_ctc.py` sets side by side.

All give the gradient of the slot states and of the blank vector, and of the weight where it is trained; all but the
bare GEMMs give the same loss. `forward` paths run under no_grad.
"""

import contextlib
import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measure import DEVICE
from torch.utils.checkpoint import checkpoint

from ctcdraft.model import fused_ctc_loss
from ctcdraft.model.loss.kernels import prefix_lattice
from ctcdraft.model.loss.reference import Emissions

MODES = ("forward", "frozen", "trained")  # forward only; with gradient, LM head frozen; LM head trained too
CHUNK = 64 if DEVICE == "cpu" else 512  # anchors of the chunked rivals


@dataclass(frozen=True)
class Shape:
    N: int = 512
    T: int = 8
    U: int = 4
    D: int = 256
    V: int = 32000
    dtype: str = "float32"

    def logits_bytes(self):
        return self.N * self.T * self.V * getattr(torch, self.dtype).itemsize


class Problem:
    """Random slot states, LM head, blank and labels; logits have a standard deviation of about 1."""

    def __init__(self, shape, trained=False):
        g = torch.Generator(DEVICE).manual_seed(0)
        dtype = getattr(torch, shape.dtype)

        def draw(*size, scale=1.0):
            return (torch.randn(size, generator=g, device=DEVICE) * scale).to(dtype)

        self.shape = shape
        self.hidden = draw(shape.N, shape.T, shape.D).requires_grad_()
        self.weight = draw(shape.V, shape.D, scale=shape.D**-0.5).requires_grad_(trained)
        self.blank = draw(shape.D, scale=shape.D**-0.5).requires_grad_()
        self.labels = torch.randint(0, shape.V, (shape.N, shape.U), generator=g, device=DEVICE)
        self.lengths = torch.full((shape.N,), shape.U, device=DEVICE)
        self.slots = torch.full((shape.N,), shape.T, device=DEVICE)

    def leaves(self):
        return [t for t in (self.hidden, self.weight, self.blank) if t.requires_grad]


def ours(p, implementation="auto"):
    return fused_ctc_loss(
        p.hidden, p.weight, p.blank, p.labels, p.lengths, reduction="sum", implementation=implementation
    )


def ours_torch_passes(p):
    return ours(p, "chunked")


def compact_alphabet(p):
    """All logits, but a recursion over the labels and the blank only: this project's reference."""
    return ours(p, "reference")


def whole_logits(p):
    """matmul, log_softmax, ctc_loss, as most people write it; the blank's logit is one more column."""
    return _torch_ctc(p.hidden, p.weight, p.blank, p.labels, p.lengths, p.slots)


def whole_logits_frozen_blank(p):
    """The same with a blank that is not trained, a row of the weight: torch at its best, for a lesser result."""
    weight = torch.cat([p.weight, p.blank.detach().unsqueeze(0)])
    log_probs = (p.hidden @ weight.T).log_softmax(2, dtype=_wide(p)).transpose(0, 1)
    blank = len(p.weight)
    return F.ctc_loss(log_probs, p.labels, p.slots, p.lengths, blank=blank, reduction="sum", zero_infinity=True)


def checkpointed_chunks(p):
    """Chunks of anchors whose logits are made once more in the backward."""
    total = 0.0
    for n in range(0, p.shape.N, CHUNK):
        part = slice(n, n + CHUNK)
        arguments = (p.hidden[part], p.weight, p.blank, p.labels[part], p.lengths[part], p.slots[part])
        total = total + checkpoint(_torch_ctc, *arguments, use_reentrant=False)
    return total


def compiled(p):
    return _compiled_ctc()(p.hidden, p.weight, p.blank, p.labels, p.lengths, p.slots)


def liger_style(p):
    """Chunks of anchors with torch's CTC and the gradient taken in the forward (Liger-Kernel's scheme)."""
    if not torch.is_grad_enabled():
        return sum(_torch_ctc(p.hidden[a], p.weight, p.blank, p.labels[a], p.lengths[a], p.slots[a]) for a in _parts(p))
    return _LigerStyle.apply(p.hidden, p.weight, p.blank, p)


def cut_cross_entropy(p):
    """Cut Cross-Entropy's lse (its loss plus the target's logit), then the recursion over labels and blank."""
    from cut_cross_entropy import linear_cross_entropy

    N, T, U = p.shape.N, p.shape.T, p.shape.U
    rows = p.hidden.flatten(0, 1)
    index = p.labels.unsqueeze(1).expand(N, T, U).reshape(N * T, U)
    logits = torch.stack([(rows * p.weight[index[:, u]]).sum(1, dtype=torch.float32) for u in range(U)], 1)
    lse = linear_cross_entropy(rows, p.weight, index[:, 0], reduction="none").float() + logits[:, 0]
    blank = (p.hidden @ p.blank).float()
    total = torch.logaddexp(lse.view(N, T), blank)
    emit = logits.view(N, T, U) - total.unsqueeze(2)
    log_blank = (blank - total).unsqueeze(2).expand(N, T, U + 1)
    repeat = torch.zeros_like(p.labels, dtype=torch.bool)
    repeat[:, 1:] = p.labels[:, 1:] == p.labels[:, :-1]
    _, log_end = prefix_lattice(Emissions(emit, emit, log_blank, repeat, p.slots))
    return -log_end[:, U].sum()


def bare_gemms(p, mode):
    """The floor: the logits, times the weight, and for a trained weight times the hidden states."""
    with torch.no_grad():
        rows = p.hidden.flatten(0, 1)
        logits = rows @ p.weight.T
        if mode != "forward":
            logits @ p.weight
        if mode == "trained":
            logits.T @ rows


PATHS = {
    "ctcdraft": ours,
    "torch": whole_logits,
    "torch, frozen blank": whole_logits_frozen_blank,
    "torch.compile": compiled,
    "torch, checkpointed chunks": checkpointed_chunks,
    "Liger-style chunks": liger_style,
    "compact alphabet": compact_alphabet,
}
if DEVICE == "cuda":
    PATHS["ctcdraft, no Triton"] = ours_torch_passes
    if importlib.util.find_spec("cut_cross_entropy"):
        PATHS["Cut Cross-Entropy lse"] = cut_cross_entropy
FLOOR = "bare GEMMs"


def call(name, problem, mode):
    """A function of nothing that runs one path once."""
    if name == FLOOR:
        return lambda: bare_gemms(problem, mode)
    path = PATHS[name]

    def run():
        with torch.no_grad() if mode == "forward" else contextlib.nullcontext():
            loss = path(problem)
        if mode != "forward":
            return torch.autograd.grad(loss, problem.leaves(), allow_unused=True)
        return None

    return run


def made(name, shape, mode):
    """`call` with a problem of its own, for a process of its own."""
    return call(name, Problem(shape, trained=mode == "trained"), mode)


def gradient(name, shape):
    """The gradient of the slot states."""
    return call(name, Problem(shape), "frozen")()[0]


def _wide(p):
    return torch.promote_types(p.hidden.dtype, torch.float32)


def _torch_ctc(hidden, weight, blank, labels, lengths, slots):
    logits = torch.cat([hidden @ weight.T, (hidden @ blank).unsqueeze(2)], dim=2)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = logits.log_softmax(2, dtype=wide).transpose(0, 1)
    # Infeasible labels occur; without zero_infinity their loss is infinite and their gradient NaN. Ours counts them 0.
    return F.ctc_loss(log_probs, labels, slots, lengths, blank=len(weight), reduction="sum", zero_infinity=True)


_COMPILED = []


def _compiled_ctc():
    if not _COMPILED:
        _COMPILED.append(torch.compile(_torch_ctc, dynamic=False))
    return _COMPILED[0]


def _parts(p):
    return [slice(n, n + CHUNK) for n in range(0, p.shape.N, CHUNK)]


class _LigerStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, blank, p):
        trained = ctx.needs_input_grad[1]
        leaves = [blank.detach().requires_grad_()] + ([weight.detach().requires_grad_()] if trained else [])
        sums = [torch.zeros_like(leaf) for leaf in leaves]
        grad_hidden = torch.empty_like(hidden)
        total = 0.0
        for a in _parts(p):
            rows = hidden[a].detach().requires_grad_()
            with torch.enable_grad():
                used = leaves[1] if trained else weight
                loss = _torch_ctc(rows, used, leaves[0], p.labels[a], p.lengths[a], p.slots[a])
                grad_hidden[a], *grads = torch.autograd.grad(loss, [rows, *leaves])
            for grad_sum, grad in zip(sums, grads, strict=True):
                grad_sum += grad
            total = total + loss.detach()
        ctx.save_for_backward(grad_hidden, *sums)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_blank, *rest = (part * grad for part in ctx.saved_tensors)
        return grad_hidden, rest[0] if rest else None, grad_blank, None
