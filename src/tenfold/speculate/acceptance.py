"""Whether drafted tokens will stand: a drafter's own claims, corrected by what became of its drafts.

A claim is the chance of a position given that all before it stand. Three corrections follow one another:
counts by (quality, position, claim) over all traffic, then the odds by which a namespace departs from them,
then those of the sequence. Only counts cross namespaces, never tokens.
"""

from __future__ import annotations

from math import sqrt

_POSITIONS = 4
# Upper ends of the classes of claims.
_CLAIMS = (0.2, 0.4, 0.6, 0.8, 0.95)
_CLASSES = len(_CLAIMS) + 1
_MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.88, 0.98)
# A claim is believed as far as so many trials of a somewhat poorer drafter.
_CLAIM_WEIGHT = 4.0
_CLAIM_DISCOUNT = 0.8
# And a cell starts as so many trials of its class.
_CLASS_WEIGHT = 6.0
_MOST_TRIALS = 128.0
_CAUTION = 0.5
"""Standard deviations that an estimate is lowered by."""


class Calibration:
    """Decayed counts of one drafter in cells of (quality, position, claim), each with its class of claims as
    prior (two levels of Beta means), and a bound that is lower than the mean by its standard deviation."""

    def __init__(self, qualities: int) -> None:
        cells = qualities * _POSITIONS * _CLASSES
        self._hits = [0.0] * cells
        self._trials = [0.0] * cells
        self._class_hits = [0.0] * _CLASSES
        self._class_trials = [0.0] * _CLASSES
        self.mean = [0.0] * cells
        """By cell: the chance that a position stands, given those before it."""
        self.low = [0.0] * cells
        """By cell: the same with caution."""
        self._until_refresh = 1
        self._refreshes = 0
        self._refresh_all()

    def cell(self, quality: int, position: int, claim: float) -> int:
        """The cell of a position claimed to stand with ``claim``."""
        k = 0
        for end in _CLAIMS:
            if claim < end:
                break
            k += 1
        return (quality * _POSITIONS + (position if position < _POSITIONS else _POSITIONS - 1)) * _CLASSES + k

    def add(self, cell: int, stood: bool) -> None:
        """A position of this cell was put to the test."""
        hits, trials = self._hits, self._trials
        hits[cell] += stood
        trials[cell] += 1.0
        if trials[cell] > _MOST_TRIALS:
            decay = _MOST_TRIALS / trials[cell]
            hits[cell] *= decay
            trials[cell] *= decay
        k = cell % _CLASSES
        self._class_hits[k] += stood
        self._class_trials[k] += 1.0
        if self._class_trials[k] > _MOST_TRIALS:
            decay = _MOST_TRIALS / self._class_trials[k]
            self._class_hits[k] *= decay
            self._class_trials[k] *= decay
        self._until_refresh -= 1
        if self._until_refresh:
            self._refresh(cell)
        else:
            # Cells without trials of their own follow their class: soon at first, seldom later.
            self._refreshes += 1
            self._until_refresh = min(4 * self._refreshes, 512)
            self._refresh_all()

    def _refresh_all(self) -> None:
        for cell in range(len(self._hits)):
            self._refresh(cell)

    def _refresh(self, cell: int) -> None:
        k = cell % _CLASSES
        class_trials = self._class_trials[k] + _CLAIM_WEIGHT
        prior = (self._class_hits[k] + _CLAIM_WEIGHT * _CLAIM_DISCOUNT * _MIDDLES[k]) / class_trials
        trials = self._trials[cell] + _CLASS_WEIGHT
        mean = (self._hits[cell] + _CLASS_WEIGHT * prior) / trials
        self.mean[cell] = mean
        self.low[cell] = max(0.0, mean - _CAUTION * sqrt(mean * (1.0 - mean) / trials))


class Odds:
    """How much better or worse than expected drafts fare here (in a namespace, in a sequence): a factor on
    their odds, from decayed sums of what was expected and what came."""

    __slots__ = ("_came", "_decay", "_expected", "_failed", "_failing", "_prior", "factor")

    def __init__(self, memory: float, prior: float) -> None:
        """``memory``: trials it goes back. ``prior``: trials as expected that it starts with."""
        self._decay = 1.0 - 1.0 / memory
        self._prior = prior
        self._came = self._expected = self._failed = self._failing = 0.0
        self.factor = 1.0

    def add(self, chance: float, stood: bool) -> None:
        """A position that was thought to stand with ``chance`` did or did not."""
        d, m = self._decay, self._prior
        self._came = self._came * d + stood
        self._expected = self._expected * d + chance
        self._failed = self._failed * d + (not stood)
        self._failing = self._failing * d + 1.0 - chance
        self.factor = ((self._came + m) * (self._failing + m)) / ((self._expected + m) * (self._failed + m))

    def fade(self, kept: float) -> None:
        """Time went by without trials: keeps this share of what is known."""
        m = self._prior
        self._came *= kept
        self._expected *= kept
        self._failed *= kept
        self._failing *= kept
        self.factor = ((self._came + m) * (self._failing + m)) / ((self._expected + m) * (self._failed + m))


def shifted(chance: float, odds: float) -> float:
    """A chance with its odds multiplied."""
    return chance * odds / (1.0 - chance + chance * odds)


class Blend:
    """How far what is known of a sequence should be believed over what is known of its namespace: the share
    that would have predicted best so far, by decayed least squares. Where sequences are alike, what sets one
    apart is chance, and the share falls to 0; where they differ, it rises to 1."""

    __slots__ = ("_decay", "_gained", "_spread", "share")

    def __init__(self, memory: float, share: float, weight: float) -> None:
        """``memory``: trials it goes back. ``share``: at the start, with ``weight``, a sum of squares."""
        self._decay = 1.0 - 1.0 / memory
        self._gained = share * weight
        self._spread = weight
        self.share = share

    def add(self, common: float, own: float, stood: bool) -> None:
        """A position was thought to stand with chance ``common`` in the namespace and ``own`` in the
        sequence."""
        apart = own - common
        self._gained = self._gained * self._decay + (stood - common) * apart
        self._spread = self._spread * self._decay + apart * apart
        self.share = min(max(self._gained / self._spread, 0.0), 1.0) if self._spread > 1e-9 else 0.0
