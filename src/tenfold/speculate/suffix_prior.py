"""How likely a suffix match's guess is right before anything was counted.

A logistic function of the circumstances, fitted on replayed traffic (``benchmarks/suffix_fit.py``: greedy
answers of SmolLM2-135M-Instruct to airline agents' turns and to tasks about Python functions, the first half
of each). A namespace's own counts outweigh it after some tens of guesses of a kind.
"""

from __future__ import annotations

import itertools
import math

# Rows: the text itself guesses, finished traffic does.
OTHERS = ((1.0, 1.6, 0.0), (0.3, 1.8, -1.1))
"""By what the other source guesses: nothing, the same, something else."""
LENGTHS = ((-1.9, -1.1, -1.0, 0.1, 0.5, 1.1, 1.9, 2.8), (-1.4, -0.7, -0.7, 0.0, 0.3, 1.0, 1.3, 1.3))
"""By the longest match's tokens: 1, 2, 3, 4-5, 6-8, 9-15, 16-31, 32 and more."""
SHARES = ((0.3, -0.3, 0.1, 1.0, 1.4), (-0.3, -0.5, 0.1, 0.8, 0.9))
"""By the share of the votes: a single match; several, with less than half, less than 4 in 5, less than all,
all."""


def prior() -> list[float]:
    """The chances, in the order of the native core's buckets: source, other, length, share."""
    return [
        1 / (1 + math.exp(-sum(terms)))
        for source in (0, 1)
        for terms in itertools.product(OTHERS[source], LENGTHS[source], SHARES[source])
    ]
