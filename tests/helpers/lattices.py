"""Lattices of single anchors, from their logits."""

from ctcdraft.model.lattice.candidates import candidates_of
from ctcdraft.model.lattice.topology import CTC, ONE_TO_ONE


def lattice_from_logits(logits_TV, blank_T, top_k, topology=CTC):
    topology = ONE_TO_ONE if blank_T is None else topology
    blank_1T = None if blank_T is None else (blank_T - logits_TV.logsumexp(1))[None]  # of a logit beside the tokens'
    return candidates_of(logits_TV[None], blank_1T, top_k, topology).lattices()[0]
