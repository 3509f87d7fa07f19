"""What speculation will bring, told from how far drafts come true and what steps cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold._native import SPECULATION_CONTEXTS, speculation_context
from tenfold.speculate.cost_curve import CostCurve


class Situation(msgspec.Struct, frozen=True):
    """A kind of step, as far as drafters are concerned."""

    share: float
    """Of all steps of a sequence in which it decodes. What the shares leave to 1 has no drafts."""
    survival: Mapping[str, Sequence[float]]
    """By drafter, the share of its drafts of which the first 1, 2 ... tokens stand (so it does not rise); no
    entry where it drafts nothing."""
    unasked: tuple[str, ...] = ()
    """Drafters that are not asked then: a controller knew that it would not pay."""


class AskingCost(msgspec.Struct, frozen=True):
    """Time of a call of a drafter."""

    call_ms: float = 0.0
    each_ms: float = 0.0
    """For every sequence in it."""
    by_length: bool = False
    """Whether both are meant for a token of the draft, as for a recurrent head."""


class Forecast(NamedTuple):
    """Of the best use of the drafters that a controller can make."""

    speedup: float
    """Tokens per second, relative to plain decoding at the same batch."""
    tokens_per_step: float
    """Of a sequence, with the one that needs no draft."""
    drafted_per_step: float
    """Of a sequence."""
    asked: dict[str, float]
    """By drafter, in which share of the steps it is asked about a sequence."""


class _Use(NamedTuple):
    """What is decided for all steps: for each drafter, up to which context it is asked (-1: never) and for
    how many tokens, and the least chance of a token that is verified."""

    contexts: tuple[int, ...]
    lengths: tuple[int, ...]
    price: float


def forecast(
    curve: CostCurve,
    situations: Sequence[Situation],
    costs: Mapping[str, AskingCost] | None = None,
    *,
    sequences: int = 1,
    max_draft: int = 8,
    deciding_ms: float = 0.0,
) -> Forecast:
    """Expected speed with ``sequences`` decoding together, each in a situation of its own in every step.

    ``deciding_ms`` is what a step takes beyond the drafters because something speculates at all.

    Tries every use of the drafters: asked always, never, or where those before (by their cost) found nothing
    that pays or nothing good; to every length where length costs time; and every chance as the least that is
    verified. The time of a step is averaged over the distribution of its rows, which is that of one
    sequence convolved. Probes and learning are not in it: about one percent. Raises ValueError for shares or
    survival that cannot be.
    """
    _check(situations)
    costs = costs or {}
    names = sorted({name for situation in situations for name in situation.survival})
    names.sort(key=lambda name: _cost(costs, name).call_ms + _cost(costs, name).each_ms)
    plain_ms = curve.at(sequences)
    rows_ms = np.array([curve.at(sequences + extra) for extra in range(sequences * max_draft + 1)])
    best = Forecast(plain_ms / (plain_ms + deciding_ms), 1.0, 0.0, dict.fromkeys(names, 0.0))
    for use in _uses(names, situations, costs, max_draft):
        tokens, counts, asked = _play(names, situations, use, max_draft)
        step_ms = float(_sum_of(counts, sequences) @ rows_ms) + deciding_ms
        for name, share, length in zip(names, asked, use.lengths, strict=True):
            cost, any_asked = _cost(costs, name), 1.0 - (1.0 - share) ** sequences
            ms = cost.call_ms * any_asked + cost.each_ms * share * sequences
            step_ms += ms * (length if cost.by_length else 1)
        speedup = tokens * plain_ms / step_ms
        if speedup > best.speedup:
            drafted = float(counts @ np.arange(len(counts)))
            best = Forecast(speedup, tokens, drafted, dict(zip(names, asked, strict=True)))
    return best


def _cost(costs: Mapping[str, AskingCost], name: str) -> AskingCost:
    return costs.get(name, AskingCost())


def _check(situations: Sequence[Situation]) -> None:
    total = sum(situation.share for situation in situations)
    if any(situation.share < 0 for situation in situations) or total > 1 + 1e-6:
        raise ValueError(f"shares of situations must be positive and sum to 1 at most, not {total}")
    for situation in situations:
        for name, survival in situation.survival.items():
            falling = [1.0, *survival, 0.0]
            if any(not a >= b for a, b in pairwise(falling)):
                raise ValueError(f"survival of {name!r} must be between 0 and 1 and not rise: {survival}")


def _uses(
    names: Sequence[str],
    situations: Sequence[Situation],
    costs: Mapping[str, AskingCost],
    max_draft: int,
) -> Iterator[_Use]:
    chances = {
        round(chance, 2) for s in situations for survival in s.survival.values() for chance in survival
    }
    prices = sorted({max(0.0, chance - 0.005) for chance in chances})
    contexts = [(-1, 0) if i == 0 else tuple(range(-1, SPECULATION_CONTEXTS)) for i in range(len(names))]
    lengths = [range(1, max_draft + 1) if _cost(costs, name).by_length else (max_draft,) for name in names]
    for use in product(product(*contexts), product(*lengths), prices):
        yield _Use(*use)


def _play(
    names: Sequence[str], situations: Sequence[Situation], use: _Use, max_draft: int
) -> tuple[float, npt.NDArray[np.float64], list[float]]:
    """Tokens a step, the distribution of the number of drafted ones, and how often each drafter is asked."""
    counts = np.zeros(max_draft + 1)
    asked = [0.0] * len(names)
    tokens = 1.0
    rest = Situation(max(0.0, 1.0 - sum(situation.share for situation in situations)), {})
    for situation in (*situations, rest):
        share, survival = situation.share, situation.survival
        value, verified, expected = 0.0, 0, 0.0
        for d, name in enumerate(names):
            if name in situation.unasked or speculation_context(value) > use.contexts[d]:
                continue
            asked[d] += share
            kept = [chance for chance in survival.get(name, ())[: use.lengths[d]] if chance > use.price]
            gain = sum(kept) - use.price * len(kept)
            if gain > value:
                value, verified, expected = gain, len(kept), sum(kept)
        counts[verified] += share
        tokens += share * expected
    return tokens, counts, asked


def _sum_of(counts: npt.NDArray[np.float64], sequences: int) -> npt.NDArray[np.float64]:
    """The distribution of the sum of so many independent numbers with distribution ``counts``."""
    total = np.ones(1)
    for _ in range(sequences):
        total = np.convolve(total, counts)
    return total
