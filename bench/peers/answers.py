"""Rows of a file with the base's answers: `input_ids` and `loss_mask`, as `prepare` reads them."""

import numpy as np

from ctcdraft.data.records import tokens_of
from ctcdraft.data.sources import RowError, read_rows
from ctcdraft.model.replay import Transcript


def span(text):
    """FIRST:END of a command line; either may be left out."""
    first, _, end = text.partition(":")
    return int(first or 0), int(end) if end else float("inf")


def answers_of(path, spans, longest):
    """The rows of these spans, in the file's order, cut to so many tokens. Raises ValueError where there are none, or
    one holds no answer in tokens."""
    rows = []
    for number, row in enumerate(read_rows(str(path))):
        if not any(first <= number < end for first, end in spans):
            continue
        try:
            found = tokens_of(row, number)
        except RowError as error:
            raise ValueError(f"{path}: row {number}: {error}: give tokenised answers") from error
        rows.append(Transcript(np.array(found.ids[:longest], np.int64), np.array(found.mask[:longest], bool)))
    if not rows:
        raise ValueError(f"{path}: no row lies in --rows")
    return rows
