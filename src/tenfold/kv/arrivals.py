"""Pages that come from elsewhere (the disk, another worker) while the engine goes on.

An arrival is a page table like a sequence's: it owns the ready pages before the new ones, and pages that a
reading thread fills. What has landed is committed to the prefix index a few pages a step, so that the request
finds it there like anything else that is cached. What does not come, comes late or comes wrong is given back,
and the request computes it.

Who touches what: tables and the cache are the engine thread's. A page is the reading thread's from when it is
claimed until it has landed or the arrival is over; an arrival that is called off gives back at once what was
not claimed, and the rest when the reader lets go of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tenfold.backends.base import PAGE_ROWS
from tenfold.kv.cache import KVCache, PageTable

log = logging.getLogger(__name__)

COMMIT_PAGES = 512
"""Most pages of an arrival that a step puts into the index: some 8 us each, and the request waits for all."""
CHORE_S = 1.0
"""How often the reading thread looks after other things."""


class Parcel(Protocol):
    """Consecutive pages that are read at once."""

    pages: int

    def read(self, views: Sequence[memoryview]) -> int:
        """Fills the views; returns how many, from the first on, are right. An exception means none."""
        ...


class Arrival:
    """Pages on their way; see the head of this file."""

    def __init__(
        self,
        table: PageTable,
        tokens: Sequence[int],
        parcels: Sequence[Parcel],
        views: Sequence[memoryview],
        deadline: float,
    ) -> None:
        self.table = table
        self.tokens = tokens
        self.parcels = parcels
        self.views = views
        self.deadline = deadline
        self.first = table.size - len(views)
        """Pages of the table that were there before."""
        self.limit = len(views)
        """No page from here on is claimed. Guarded by the lock, as are the next four."""
        self.claimed = 0
        self.landed = 0
        self.over = False
        self.seconds = 0.0
        """That the reader spent on it."""
        self.committed = 0
        self.error: Exception | None = None
        self.called_off = False
        """Nobody waits for it any more,"""
        self.late = False
        """as it was not over by its deadline."""


class Arrivals:
    """The arrivals of one engine, and the threads that read them. All methods are for the engine's thread.

    ``chore`` is called on a reading thread before the first arrival is read and about once a second;
    ``news`` is set whenever there is something to `tick` for. Each of the ``readers`` reads one arrival at a
    time: with several, one whose pages are slow to come holds up no other.
    """

    def __init__(
        self,
        cache: KVCache,
        name: str,
        news: threading.Event,
        chore: Callable[[], None],
        readers: int = 1,
    ) -> None:
        self._cache = cache
        self._news = news
        self._chore = chore
        self.under_way: list[Arrival] = []
        self._queue: deque[Arrival] = deque()
        self._lock = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(readers)]
        for thread in self._threads:
            thread.start()

    @property
    def queued_pages(self) -> int:
        """Pages that the reader has still to read."""
        return sum(arrival.limit - arrival.landed for arrival in self.under_way)

    @property
    def stuck(self) -> bool:
        """Whether the reader is busy with what was called off: it may never come back."""
        return any(arrival.called_off and not arrival.over for arrival in self.under_way)

    def start(self, arrival: Arrival) -> None:
        """Has an arrival read; its table is ours until it is over."""
        self.under_way.append(arrival)
        with self._lock:
            self._queue.append(arrival)
            self._lock.notify()

    def cancel(self, arrival: Arrival) -> None:
        """Calls an arrival off: what has landed stays."""
        arrival.called_off = True
        with self._lock:
            arrival.limit = min(arrival.limit, arrival.claimed)
            arrival.over = arrival.over or arrival.claimed == arrival.landed
        self._cache.trim(arrival.table, (arrival.first + arrival.limit) * PAGE_ROWS)

    def tick(self) -> list[Arrival]:
        """Commits what has landed, calls off what is late, and returns the arrivals that are over; their
        pages are in the cache."""
        ended = []
        now = time.monotonic()
        for arrival in list(self.under_way):
            with self._lock:
                over, landed = arrival.over, arrival.landed
            if arrival.committed < landed:
                arrival.committed = min(landed, arrival.committed + COMMIT_PAGES)
                rows = (arrival.first + arrival.committed) * PAGE_ROWS
                self._cache.commit(arrival.table, arrival.tokens, rows)
            if not over and now > arrival.deadline and not arrival.called_off:
                arrival.late = True
                self.cancel(arrival)
            if over and arrival.committed == landed:
                self._cache.close(arrival.table)
                self.under_way.remove(arrival)
                ended.append(arrival)
        return ended

    def close(self, wait_s: float) -> bool:
        """Stops the thread; False if it does not come back. The tables are not given back: nothing may be
        done with the cache afterwards."""
        for arrival in self.under_way:
            self.cancel(arrival)
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        chore_due = 0.0
        while True:
            if time.monotonic() >= chore_due:
                self._do_chore()
                chore_due = time.monotonic() + CHORE_S
            with self._lock:
                if not self._queue and not self._stopping:
                    self._lock.wait(CHORE_S)
                if self._stopping:
                    return
                if not self._queue:
                    continue
                arrival = self._queue.popleft()
            began = time.monotonic()
            self._read(arrival)
            with self._lock:
                arrival.seconds = time.monotonic() - began
                arrival.over = True
            self._news.set()

    def _read(self, arrival: Arrival) -> None:
        for parcel in arrival.parcels:
            with self._lock:
                first = arrival.claimed
                last = first + parcel.pages
                if last > arrival.limit:
                    return
                arrival.claimed = last
            good = 0
            try:
                good = parcel.read(arrival.views[first:last])
            except Exception as error:
                arrival.error = error
            with self._lock:
                arrival.landed = first + good
                if good < parcel.pages:
                    arrival.claimed = arrival.landed
                    return
            self._news.set()

    def _do_chore(self) -> None:
        try:
            self._chore()
        except Exception:
            log.exception("looking after pages elsewhere failed")
