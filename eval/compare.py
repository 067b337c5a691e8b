"""Several heads on the same questions: their figures side by side, and paired differences from the first."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctcdraft.eval.results import FIGURES, blocks_of, bootstrap, by_temperature, pooled
from ctcdraft.eval.run import Answered

SHOWN = (
    *("tokens_per_step", "tokens_per_step_ci95", "nodes_per_step", "tokens_per_second", "speedup", "seeds"),
    *("accepted_by_depth", "accepted_by_source"),
)


def compared(
    results: Mapping[str, dict[str, Any]], answers: Mapping[str, Sequence[Answered]], seed: int
) -> list[dict[str, Any]]:
    """Per temperature: each head's figures, and its `difference` from the first head, with an interval over the same
    resampled questions for both (all heads answered the same ones)."""
    groups = {label: by_temperature(found) for label, found in answers.items()}
    first = next(iter(results))
    return [
        {
            "temperature": temperature,
            "heads": {
                label: {
                    **{key: blocks_of(found)[place][key] for key in SHOWN},
                    "identical": _counts(blocks_of(found)[place]),
                    "difference": difference(groups[first][temperature], groups[label][temperature], seed)
                    if label != first
                    else None,
                }
                for label, found in results.items()
            },
        }
        for place, temperature in enumerate(groups[first])
    ]


def difference(first: Sequence[Answered], other: Sequence[Answered], seed: int) -> dict[str, Any]:
    """other - first, with a paired bootstrap interval over questions."""
    a, b = ([answer for answer in pooled(side) if answer.turns] for side in (first, other))
    out = {}
    for name, of in FIGURES.items():
        before, after = of(a), of(b)
        every = np.arange(len(a))
        interval = bootstrap(lambda i, f=before, g=after: g(i) - f(i), len(a), seed)  # type: ignore[misc]
        out[name] = {"value": after(every) - before(every), "ci95": interval}
    return out


def _counts(block: dict[str, Any]) -> dict[str, int]:
    same = block["identical"]
    beyond = sum(not d["within_bound"] for d in same["divergences"])
    return {"compared": same["compared"], "identical": same["identical"], "beyond_bound": beyond}
