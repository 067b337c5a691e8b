"""The loops that numba compiles: what they do to the process around them, and to its rounding."""

import os
import subprocess
import sys

PRINT_BITS = """
import numpy as np, torch
from ctcdraft.model.kernels import Prefixes, moved_shortlist, prefix_lattice
from ctcdraft.model.kernels.cpu_top import merge_top
from ctcdraft.model.lattice import movable_candidates_of
from ctcdraft.model.topology import CTC, Topology
from ctcdraft.model.transition import Tables
from ctcdraft.model.tree import search

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
N, T, U, K, J, R, V = 6, 8, 8, 16, 16, 64, 300
floats = [torch.randn(*shape, generator=g).requires_grad_() for shape in ((N, T, R), (U + 1, N, R), (V, R), (R,))]
index = torch.rand(N, T, V, generator=g).argsort(dim=2)[:, :, :K]
window = Topology(False, 3).window(T, U)
successor = torch.rand(V, V, generator=g).argsort(dim=1)[:, :J]
of_labels = successor[torch.randint(V, (N, U + 1), generator=g)]
logits = [torch.randn(N, T, *shape, generator=g).requires_grad_() for shape in ((4, J), (K,))]
labels = [torch.randint(V, (N, U + 1), generator=g) for _ in range(2)]
slots = torch.full((N,), T)
found = moved_shortlist(Prefixes(*floats, window, of_labels, index, *logits, *labels, slots))[:5]
bits = [*found, *torch.autograd.grad(sum(part.sin().sum() for part in found), [*floats, *logits])]
of_lattice = [torch.randn(N, T, width, generator=g).requires_grad_() for width in (U, U, U + 1)]
found = prefix_lattice(*of_lattice, torch.rand(N, U, generator=g) < 0.3, slots)
bits += [*found, *torch.autograd.grad(sum(part.sin().sum() for part in found), of_lattice)]

top, where = torch.full((5, 3), -torch.inf), torch.zeros(5, 3, dtype=torch.long)
merge_top(top, where, torch.randn(5, V, generator=g), 0)

context, token, carry = (torch.randn(n, R, generator=g).numpy() / 8 for n in (V, V, R))
tables = Tables(context, token, successor.int().numpy(), carry, floats[3].detach().numpy())
blank_NT, logits_NTV = torch.randn(N, T, generator=g), torch.randn(N, T, V, generator=g)
given = logits_NTV, blank_NT, floats[0].detach(), torch.arange(N), tables, K
drafted = [movable_candidates_of(*given, topology) for topology in (CTC, Topology(merge=False, band=1))]
trees = [search(one, 64) for both in drafted for one in both.lattices()]
bits += [top, where, *(torch.from_numpy(part) for tree in trees for part in (tree.tokens, tree.psi))]
print([int(part.detach().contiguous().view(torch.uint8).to(torch.long).cumsum(-1).sum()) for part in bits])
"""
PRINT_THREADS = """
import torch
from ctcdraft.model.kernels.cpu_top import merge_top

merge_top(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 9), 0)
print(torch.get_num_threads())
"""
DRAFT_BY_THREADS = """
import threading
import torch
from ctcdraft.model.kernels import largest

values = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
want, right = values.topk(16, dim=1).indices, []
threads = [
    threading.Thread(target=lambda: right.append(all(torch.equal(largest(values, 16), want) for _ in range(100))))
    for _ in range(4)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(right)
"""


def printed(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_process_that_compiles_rounds_as_those_that_load_what_it_compiled(tmp_path):
    first, second = (printed(PRINT_BITS, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert any(tmp_path.rglob("*.nbc"))
    assert first == second
    assert len(set(first.split(","))) > 10


def test_a_compiled_loop_leaves_torch_the_threads_it_had(tmp_path):
    assert printed(PRINT_THREADS, OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="2").strip() == "1"


def test_threads_that_draft_at_once_need_no_thread_safe_layer_of_numba():
    """Where there is no OpenMP, numba's own threads end the process when two threads of it come at once."""
    assert printed(DRAFT_BY_THREADS, NUMBA_THREADING_LAYER="workqueue") == "[True, True, True, True]\n"
