"""Time as far as this process was there to notice it."""

from __future__ import annotations

import time

LONGEST_GAP_S = 1.0
"""Who looks at the clock more often than this and finds more gone was stopped itself meanwhile."""


class WatchedClock:
    """Seconds that only pass while somebody looks: a front that was stopped (a suspended machine, SIGSTOP, a
    busy one) must not take everyone for dead when it wakes, before it has read what they said."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._missed = 0.0

    def now(self) -> float:
        """The time. To be asked for at least every `LONGEST_GAP_S`, or deadlines come later."""
        seen = time.monotonic()
        gap = seen - self._seen
        if gap > LONGEST_GAP_S:
            self._missed += gap - LONGEST_GAP_S
        self._seen = seen
        return seen - self._missed
