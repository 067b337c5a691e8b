"""The loops that numba compiles: what they do to the process around them, and to its rounding."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PRINT_BITS = """
import torch
import pytest
from ctcdraft.model.loss.kernels import linear_lse_gather, prefix_lattice
from ctcdraft.model.loss.reference import Emissions
from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import CTC, Topology
from ctcdraft.model.lattice.candidates import Tables
from ctcdraft.model.draft.tree import search

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
N, T, U, K, R, V = 6, 8, 8, 16, 64, 300
emit, stay, blank = (torch.randn(N, T, width, generator=g).requires_grad_() for width in (U, U, U + 1))
found = prefix_lattice(Emissions(emit, stay, blank, torch.rand(N, U, generator=g) < 0.3, torch.full((N,), T)))
bits = [*found, *torch.autograd.grad(sum(part.sin().sum() for part in found), [emit, stay, blank])]
hidden, weight = torch.randn(N, R, generator=g).requires_grad_(), torch.randn(V, R, generator=g).bfloat16()
found = linear_lse_gather(hidden, weight, torch.randint(V, (N, 2), generator=g))
bits += [*found, *torch.autograd.grad(sum(part.sin().sum() for part in found), hidden)]

context, token, blank = (torch.randn(*shape, generator=g).numpy() / 8 for shape in ((V, R), (V, R), (R,)))
blank_NT, logits_NTV = torch.randn(N, T, generator=g), torch.randn(N, T, V, generator=g)
moved = torch.randn(N, T, R, generator=g), torch.arange(N), Tables(context, token, blank)
both = [candidates_of(logits_NTV, blank_NT, K, topology, moved=moved) for topology in (CTC, Topology(False, 1))]
trees = [search(lattice, 64) for one in both for lattice in one.lattices()]
bits += [torch.from_numpy(part) for tree in trees for part in (tree.tokens, tree.psi)]
print([int(part.detach().contiguous().view(torch.uint8).to(torch.long).cumsum(-1).sum()) for part in bits])
"""
DRAFT_BY_THREADS = """
import threading
import torch
from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import CTC
from ctcdraft.model.draft.tree import search

g = torch.Generator().manual_seed(0)
lattice = candidates_of(torch.randn(1, 8, 300, generator=g), torch.randn(1, 8, generator=g), 16, CTC).lattices()[0]
want, right = search(lattice, 64).psi, []
threads = [
    threading.Thread(target=lambda: right.append(all((search(lattice, 64).psi == want).all() for _ in range(100))))
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


def test_threads_that_draft_at_once_need_no_thread_safe_layer_of_numba():
    """Where there is no OpenMP, numba's own threads end the process when two threads of it come at once."""
    assert printed(DRAFT_BY_THREADS, NUMBA_THREADING_LAYER="workqueue") == "[True, True, True, True]\n"
