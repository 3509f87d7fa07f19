"""What a client does that a server turns away: it waits as long as it is told to, and asks again.

A refusal is 429 or 503 with ``retry-after`` in the place of an answer: nothing was sent, so nothing is lost.
It is counted, so that a server that refuses much is not taken for one that serves.
"""

from __future__ import annotations

PATIENCE_S = 300.0
"""A client that was refused for so long in all gives up: then its request was not served."""


class Refusals:
    """Those of one request. Raises nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._waited_s = 0.0

    def wait_s(self, status: int, after: str | None) -> float | None:
        """How long to wait before the request is sent again; None: this answer is no refusal, or patience is
        at its end. ``after``: the header ``retry-after``."""
        if status not in (429, 503) or after is None or self._waited_s + float(after) > PATIENCE_S:
            return None
        self.count += 1
        self._waited_s += float(after)
        return float(after)
