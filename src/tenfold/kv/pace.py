"""Whether to read pages or to compute their rows: both as they were measured here, in seconds."""

from __future__ import annotations

MARGIN = 1.25
"""Reading must be expected to be faster by this factor: both figures waver."""
LATENCY_S = 0.003
"""What a restore takes beside its pages: handing over to the reader, and back between two steps."""
MEMORY = 0.2
"""Weight of the newest measurement."""
SMALL_ROWS = 64
"""Steps of fewer rows say little of how fast a prompt is computed."""
PROBE_EVERY = 32
"""So many prompts whose pages were not worth reading, and a few pages are read to see whether that
changed."""
PROBE_PAGES = 4


class Pace:
    """Measures prefilling and restoring, and says what to expect. Whatever was not measured yet is expected
    to take no time when reading, and for ever when computing: the first restores find out."""

    def __init__(self, page_rows: int) -> None:
        self._page_rows = page_rows
        self.row_s: float | None = None
        """To compute a row of a prompt."""
        self.page_s: float | None = None
        """To read a page."""
        self.declined = 0
        """Prompts whose pages were there and were computed all the same."""

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows >= SMALL_ROWS:
            self.row_s = _mean(self.row_s, seconds / rows)

    def restored(self, pages: int, seconds: float) -> None:
        """Reading so many pages took the reader so long."""
        if pages:
            self.page_s = _mean(self.page_s, seconds / pages)

    def worth(self, pages: int, queued: int = 0) -> int:
        """How many of ``pages`` to read: all, none, or a few to measure anew. ``queued`` pages come first."""
        compute_s = self.compute_s(pages)
        if self.page_s is None or compute_s is None:
            return pages
        if MARGIN * (LATENCY_S + (pages + queued) * self.page_s) < compute_s:
            return pages
        self.declined += 1
        return 0 if self.declined % PROBE_EVERY else min(pages, PROBE_PAGES)

    def compute_s(self, pages: int) -> float | None:
        """How long computing so many pages would take; None: not measured yet."""
        return None if self.row_s is None else pages * self._page_rows * self.row_s


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + MEMORY * (new - old)
