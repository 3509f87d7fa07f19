"""Which drafted tokens a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.speculate.controller_asking import Weighed
from tenfold.speculate.cost_curve_live import LiveCurve

# Drafts are timed for the curve's sake only if their tokens stand with such a chance on average.
_WORTH_TIMING = 0.2


def admit(best: Sequence[Weighed | None], added: Sequence[float]) -> tuple[list[int], float]:
    """How many tokens of each draft bring most, all together, beyond what their rows cost, and how much.

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
    return counts, most


def more_to_time(
    best: Sequence[Weighed | None],
    counts: Sequence[int],
    added: Sequence[float],
    curve: LiveCurve,
    allowance: float,
) -> list[int] | None:
    """Beyond the admitted ``counts``: tokens for a step that times the curve where it has not been seen for
    long; None for no such step. Only if the drafts are good enough for the curve to matter, and for an
    ``allowance`` in tokens."""
    admitted, n = sum(counts), len(best)
    if curve.to_look_at(n + admitted, n + len(added) - 1) is None:
        return None
    candidates = _by_chance(best)[: len(added) - 1]
    most = len(candidates)
    while most > admitted and added[most] - added[admitted] > allowance:
        most -= 1
    wanted = curve.to_look_at(n + admitted, n + most)
    if wanted is None:
        return None
    more = candidates[admitted : wanted - n]
    if -sum(negative for negative, _ in more) < _WORTH_TIMING * len(more):
        return None
    extended = list(counts)
    for _, i in more:
        extended[i] += 1
    return extended


def _by_chance(best: Sequence[Weighed | None]) -> list[tuple[float, int]]:
    """(-chance, sequence) of all tokens, the likeliest first; ties go by sequence."""
    candidates = [
        (-chance, i) for i, draft in enumerate(best) if draft is not None for chance in draft.chances
    ]
    if len(best) > 1:
        candidates.sort()
    return candidates
