"""What the controller remembers: of a drafter, of a namespace, of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tenfold.speculate.acceptance import Blend, Calibration, Odds
from tenfold.speculate.base import Drafter

CONTEXTS = 3
"""What the drafters before found, when one is asked: nothing that pays, something, or something good."""
_GOOD = 0.5

_SEQUENCE_MEMORY = 20.0
_SEQUENCE_PRIOR = 2.5
_NAMESPACE_MEMORY = 64.0
_NAMESPACE_PRIOR = 4.0
# Of `Blend`: trials, share, weight.
_BLEND = (400.0, 0.7, 1.0)
# Gain (in tokens) that a drafter is thought to bring before it was asked, and for how many asks that counts.
_FIRST_GAIN = 0.4
_FIRST_GAIN_WEIGHT = 4.0
_GAIN_MEMORY = 128.0
_COST_MEMORY = 0.95
_PROFILE_MEMORY = 32.0
# In one call of so many, a position more than seems to pay is asked for.
_LOOK_EVERY = 8
# A call that takes less than this part of a step is not worth shortening.
_CHEAP = 0.01


def context_of(value: float) -> int:
    """Which of the contexts a sequence is in, by the net gain of the best draft so far."""
    if value <= 0.0:
        return 0
    return 1 if value < _GOOD else 2


class Source:
    """A drafter, how far its claims hold, what asking it costs, and how long its drafts should be."""

    def __init__(self, index: int, drafter: Drafter, max_draft: int, credit_ms: float) -> None:
        self.index = index
        self.drafter = drafter
        self.calibration = Calibration(max(1, drafter.qualities))
        self.credit_ms = credit_ms
        """Time that asking it may take although it does not seem to pay."""
        self.paid_step = 0
        """The step in which it last brought something."""
        self.calls = 0
        self.drafts = self.drafted = self.accepted = self.asks = 0
        self.asking_ms = 0.0
        self._max_draft = max_draft
        self._length = max_draft
        # What each position adds to the net gain of a draft.
        self._profile = [_FIRST_GAIN * 0.7**j for j in range(max_draft)]
        self._asks, self._drafts = 0, _FIRST_GAIN_WEIGHT
        # Time of a call by position, as a line over the number of sequences, and the sums it comes from.
        self._call_ms = self._each_ms = 0.0
        self._weight = self._n = self._nn = self._ms = self._nms = 0.0

    @property
    def call_ms(self) -> float:
        """Expected time of a call, whatever the sequences."""
        return self._call_ms * self._length

    @property
    def each_ms(self) -> float:
        """Of a sequence more in the call."""
        return self._each_ms * self._length

    def cost_ms(self, sequences: int) -> float:
        """Expected time of a call for so many."""
        return (self._call_ms + self._each_ms * sequences) * self._length if sequences else 0.0

    def length(self, tokens_per_ms: float, step_ms: float, sequences: int) -> int:
        """Tokens to ask for. A drafter that takes no time to speak of gives all that it has; of another, as
        many positions as bring more than their share of its time, and one more now and then to see."""
        position_ms = self._call_ms + self._each_ms * sequences
        if position_ms * self._max_draft < _CHEAP * step_ms:
            self._length = self._max_draft
            return self._length
        share = tokens_per_ms * position_ms / sequences
        best = surplus = 0.0
        self._length = 1
        for j, gain in enumerate(self._profile):
            surplus += gain - share
            if surplus > best:
                best, self._length = surplus, j + 1
        look = best > 0.0 and self._asks % _LOOK_EVERY == 0 and self._length < self._max_draft
        return self._length + look

    def took(self, sequences: int, length: int, ms: float) -> None:
        """A call for so many sequences and tokens took so long. The time is thought to grow with the length,
        as that of a recurrent head does. Decayed least squares; an outlier is cut."""
        self.calls += 1
        self.asks += sequences
        self.asking_ms += ms
        ms /= length
        expected = self._call_ms + self._each_ms * sequences
        if self._weight >= 2.0:
            ms = min(ms, 4.0 * expected + 1e-3)
        elif self._weight and ms < 0.5 * expected:
            # The first call warmed something up.
            self._weight = self._n = self._nn = self._ms = self._nms = 0.0
        keep = _COST_MEMORY
        self._weight = self._weight * keep + 1.0
        self._n = self._n * keep + sequences
        self._nn = self._nn * keep + sequences * sequences
        self._ms = self._ms * keep + ms
        self._nms = self._nms * keep + sequences * ms
        n, mean = self._n / self._weight, self._ms / self._weight
        variance = self._nn / self._weight - n * n
        if variance > 0.05 * n * n:
            self._each_ms = min(max((self._nms / self._weight - n * mean) / variance, 0.0), mean / n)
        else:
            self._each_ms = 0.5 * mean / n
        self._call_ms = mean - self._each_ms * n

    def learn_profile(self, gains: Sequence[float], drafts: int) -> None:
        """Net gains of each position that was asked for, summed over the drafts of a call."""
        self._asks += 1
        rate = drafts / (self._drafts + drafts)
        self._drafts = min(self._drafts + drafts, _PROFILE_MEMORY)
        profile = self._profile
        for j, gain in enumerate(gains):
            profile[j] += (gain / drafts - profile[j]) * rate


class Namespace:
    """How drafts fare in a namespace, by source, and what asking brings there, by source and context."""

    def __init__(self, sources: int) -> None:
        self.odds = [Odds(_NAMESPACE_MEMORY, _NAMESPACE_PRIOR) for _ in range(sources)]
        self.blends = [Blend(*_BLEND) for _ in range(sources)]
        """By source: how much a sequence's own odds count."""
        self.gains = [[_FIRST_GAIN] * CONTEXTS for _ in range(sources)]
        self._asks = [[_FIRST_GAIN_WEIGHT] * CONTEXTS for _ in range(sources)]

    def learn_gain(self, source: int, context: int, gain: float) -> None:
        """Asking brought so many tokens beyond their cost in rows."""
        asks = min(self._asks[source][context] + 1.0, _GAIN_MEMORY)
        self._asks[source][context] = asks
        gains = self.gains[source]
        gains[context] += (gain - gains[context]) / asks


class Shadow(NamedTuple):
    """A draft whose tokens are known to the controller, verified or not, and held against the text."""

    source: int
    tokens: Sequence[int]
    cells: list[int]
    """Of the calibration, for the positions that are held against the text."""
    position: int
    """The next position to compare ..."""
    at: int
    """... and where in the sequence its token is."""


class Run:
    """A sequence under way."""

    __slots__ = ("asked", "chosen", "fresh", "gains", "length", "namespace", "odds", "older")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.odds = [Odds(_SEQUENCE_MEMORY, _SEQUENCE_PRIOR) for _ in namespace.odds]
        self.gains = [list(gains) for gains in namespace.gains]
        self.asked = [0] * len(namespace.odds)
        """The step in which each source was asked last."""
        self.fresh: list[Shadow] = []
        """Drafts of this step."""
        self.older: list[Shadow | None] = [None] * len(namespace.odds)
        """By source, an earlier draft that has come true so far."""
        self.chosen = -1
        """The source whose draft is being verified."""
        self.length = 0
        """Its tokens before the step."""
