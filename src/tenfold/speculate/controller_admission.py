"""Which drafted tokens a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.speculate.controller_asking import Weighed
from tenfold.speculate.cost_curve_live import LiveCurve

# Drafts are timed for the curve's sake only if their tokens stand with such a chance on average.
_WORTH_TIMING = 0.2


def admit(best: Sequence[Weighed | None], added: Sequence[float]) -> list[int]:
    """How many tokens of each draft bring most, all together, beyond what their rows cost.

    ``added[k]``: what k rows more cost, in tokens; more rows than it tells of are not to be had. The chances
    of a draft fall, so the k likeliest tokens are the best k and never leave one out before another.
    """
    counts = [0] * len(best)
    candidates = _by_chance(best)
    gain = most = 0.0
    chosen = 0
    for k in range(min(len(candidates), len(added) - 1)):
        gain -= candidates[k][0]
        if gain - added[k + 1] > most:
            most = gain - added[k + 1]
            chosen = k + 1
    for k in range(chosen):
        counts[candidates[k][1]] += 1
    return counts


def rows_to_time(
    best: Sequence[Weighed | None], added: Sequence[float], curve: LiveCurve, allowance: float
) -> list[int]:
    """Where nothing pays by the curve: tokens for a step that times it where it has not been seen for long.
    Only if the drafts are good enough for the curve to matter, and for an ``allowance`` in tokens."""
    counts = [0] * len(best)
    candidates = _by_chance(best)[: len(added) - 1]
    while candidates and added[len(candidates)] > allowance:
        candidates.pop()
    wanted = curve.stale_between(len(best), len(best) + len(candidates))
    if wanted is None:
        return counts
    candidates = candidates[: wanted - len(best)]
    if -sum(negative for negative, _ in candidates) >= _WORTH_TIMING * len(candidates):
        for _, i in candidates:
            counts[i] += 1
    return counts


def _by_chance(best: Sequence[Weighed | None]) -> list[tuple[float, int]]:
    """(-chance, sequence) of all tokens, the likeliest first; ties go by sequence."""
    candidates = [
        (-chance, i) for i, draft in enumerate(best) if draft is not None for chance in draft.chances
    ]
    if len(best) > 1:
        candidates.sort()
    return candidates
