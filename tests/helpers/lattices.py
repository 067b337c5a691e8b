"""Lattices of single anchors, from their logits."""

import oracle
import torch
from hypothesis import strategies as st

from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import CTC, ONE_TO_ONE, Topology

TOPOLOGIES = st.sampled_from([CTC, *(Topology(False, band) for band in (None, 0, 1, 2))])


def lattice_from_logits(logits_TV, blank_T, top_k, topology=CTC):
    topology = ONE_TO_ONE if blank_T is None else topology
    blank_1T = None if blank_T is None else (blank_T - logits_TV.logsumexp(1))[None]  # of a logit beside the tokens'
    return candidates_of(logits_TV[None], blank_1T, top_k, topology).lattices()[0]


def random_lattice(T, V, seed, with_blank=True, sharpness=1.5, topology=CTC):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, V, generator=g) * sharpness
    blank = torch.randn(T, generator=g) if with_blank else None
    return lattice_from_logits(logits, blank, V, topology), logits.double(), None if blank is None else blank.double()


def prefixes(tree):
    paths = []
    for i in range(len(tree)):
        parent = tree.parents[i]
        paths.append((() if parent < 0 else paths[parent]) + (int(tree.tokens[i]),))
    return paths


def brute_psi(logits, blank, max_length):
    table = oracle.outputs(torch.cat([logits, blank.unsqueeze(1)], 1).log_softmax(1))
    psi = {}
    for output, log_p in table.items():
        for k in range(1, min(len(output), max_length) + 1):
            psi[output[:k]] = psi.get(output[:k], 0.0) + log_p.exp().item()
    return psi
