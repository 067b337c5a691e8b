"""Brute force over every alignment, in float64: the truth that everything in model/ is held against."""

import itertools
from collections import defaultdict

import torch


def collapse(alignment, blank):
    merged = [symbol for symbol, _ in itertools.groupby(alignment)]
    return tuple(symbol for symbol in merged if symbol != blank)


def outputs(log_probs_TV1):
    """{collapsed tokens: log P} for one anchor; the last column is the blank."""
    T, width = log_probs_TV1.shape
    paths = defaultdict(list)
    for alignment in itertools.product(range(width), repeat=T):
        log_p = sum(log_probs_TV1[t, symbol] for t, symbol in enumerate(alignment))
        paths[collapse(alignment, width - 1)].append(log_p)
    return {output: torch.logsumexp(torch.stack(terms), 0) for output, terms in paths.items()}


def log_psi(table, prefix):
    """log of the total probability of outputs that start with the prefix; None where there is none."""
    terms = [log_p for output, log_p in table.items() if output[: len(prefix)] == tuple(prefix)]
    return torch.logsumexp(torch.stack(terms), 0) if terms else None


def log_probs(states_TD, weight_VD, blank_T):
    logits = torch.cat([states_TD @ weight_VD.T, blank_T.unsqueeze(1)], dim=1)
    return logits.log_softmax(dim=1)
