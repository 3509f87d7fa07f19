"""Whether a head is better than another: on held-out answers before it goes live, on live drafts after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np

from tenfold.speculate.trained_head import Pace

LEAST_CONVERSATIONS = 12
"""From fewer held-out conversations an interval would be too narrow to be believed."""
LEAST_REQUESTS = 10
"""With drafts of a head that were scored, before anything is said of it."""
LOOKS = (20, 40, 80, 160, 320)
"""Requests of a new head after which it is compared with the old one. After the last it stays."""
_DEVIATIONS = 2.88
"""By which it must be worse in one of the looks: 0.2 % each, so 1 % in all, for heads that are as good."""


class Comparison(NamedTuple):
    """Two heads on the same answers, in tokens a step of the target."""

    old: float
    new: float
    low: float
    """95 % interval of ``new - old``."""
    high: float
    conversations: int

    @property
    def better(self) -> bool:
        """Whether the new one is better beyond doubt."""
        return self.low > 0


def compare(
    groups: Sequence[str], old: Pace, new: Pace, *, draws: int = 4000, seed: int = 0
) -> Comparison | None:
    """Bootstrap over conversations (``groups`` of the answers), both heads on the same ones in each draw.
    None from fewer than `LEAST_CONVERSATIONS`."""
    names, group = np.unique(np.array(groups), return_inverse=True)
    count = len(names)
    if count < LEAST_CONVERSATIONS:
        return None
    sums = np.stack(
        [np.bincount(group, part, count) for part in (old.tokens, old.steps, new.tokens, new.steps)], axis=1
    )
    picks = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    drawn = picks @ sums
    # A draw of nothing but answers of one token has no steps.
    drawn = drawn[(drawn[:, 1] > 0) & (drawn[:, 3] > 0)]
    if not len(drawn):
        return None
    differences = drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1]
    low, high = np.quantile(differences, (0.025, 0.975))
    whole = sums.sum(axis=0)
    return Comparison(float(whole[0] / whole[1]), float(whole[2] / whole[3]), float(low), float(high), count)


class Scores(NamedTuple):
    """First tokens of a head's drafts in a request, verified or not."""

    scored: int
    """Those whose place in the text is known by now ..."""
    stood: int
    """... and how many were what came there."""


class Share(NamedTuple):
    """Of the first tokens that stood."""

    mean: float
    error: float
    """Its standard error, with requests as units: drafts of one request are alike."""


def share(requests: Iterable[Scores]) -> Share | None:
    """Over requests (ratio estimator); None from fewer than `LEAST_REQUESTS`."""
    table = np.array([one for one in requests if one.scored], np.float64).reshape(-1, 2)
    count = len(table)
    if count < LEAST_REQUESTS:
        return None
    scored, stood = table.sum(axis=0)
    mean = stood / scored
    residues = table[:, 1] - mean * table[:, 0]
    # Half a request in doubt, so that few requests that are all alike are not taken for certainty.
    spread = (residues**2).sum() * count / (count - 1) + 0.25 * (scored / count) ** 2
    return Share(float(mean), float(sqrt(spread) / scored))


class Watch:
    """A head that has just gone live, against the one before it."""

    def __init__(self, before: Iterable[Scores]) -> None:
        """``before``: the old head's latest requests."""
        self.old = share(before)
        self.new: Share | None = None
        """At the latest look."""
        self._looks = list(LOOKS)

    def look(self, after: Sequence[Scores]) -> Literal["worse", "stays", "open"]:
        """What can be said from the new head's requests so far, all of them; ``stays`` is the last word, and
        comes at once where there is nothing to compare with."""
        if self.old is None:
            return "stays"
        while self._looks and len(after) >= self._looks[0]:
            self.new = share(after[: self._looks.pop(0)])
            if self.new is None:
                continue
            error = sqrt(self.old.error**2 + self.new.error**2)
            if self.old.mean - self.new.mean > _DEVIATIONS * error:
                return "worse"
        return "open" if self._looks else "stays"
