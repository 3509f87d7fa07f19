"""A worker's page cache in simulation: the same rules as `tenfold.kv`, over names instead of rows.

A page is private (being written), owned and named, or named without an owner and then evictable. A sequence
gives its pages back last page first, so chains are evicted from their ends. Eviction is LRU, as in
`tenfold.kv.pages`, or ``segmented``: pages that some later request found wait in a list of their own, which
holds up to 3/10 of the cache, and are evicted after those that nobody ever came back for (segmented LRU,
Karedla, Love and Wherry, 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tenfold.protocol import KVEvent, PagesRemoved, PagesStored

Eviction = Literal["lru", "segmented"]

_PROVEN_SHARE = 0.3


class SimulatedCache:
    """Pages by name. What was stored and removed is collected until `events` takes it."""

    def __init__(self, pages: int, eviction: Eviction) -> None:
        self.total = pages
        self.free = pages
        self._owners: dict[int, int] = {}
        self._evictable: dict[int, None] = {}
        self._proven: dict[int, None] = {}
        self._found: set[int] = set()
        self._proven_limit = int(pages * _PROVEN_SHARE) if eviction == "segmented" else 0
        self._events: list[tuple[bool, list[int]]] = []

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self.free + len(self._evictable) + len(self._proven)

    def names(self) -> set[int]:
        """Names of all pages held."""
        return set(self._owners)

    def match(self, names: Sequence[int]) -> int:
        """How many first pages are here."""
        owners = self._owners
        for at, name in enumerate(names):
            if name not in owners:
                return at
        return len(names)

    def share(self, names: Sequence[int]) -> None:
        """One more owner for each; all must be here."""
        owners, evictable, proven = self._owners, self._evictable, self._proven
        for name in names:
            if not owners[name]:
                if name in evictable:
                    del evictable[name]
                else:
                    del proven[name]
            owners[name] += 1
        if self._proven_limit:
            self._found.update(names)

    def take(self, count: int) -> None:
        """``count`` private pages; there must be as many available."""
        evict = count - self.free
        if evict <= 0:
            self.free -= count
            return
        self.free = 0
        removed = self._log(False)
        for _ in range(evict):
            pages = self._evictable or self._proven
            name = next(iter(pages))
            del pages[name], self._owners[name]
            self._found.discard(name)
            removed.append(name)

    def publish(self, names: Sequence[int]) -> None:
        """Private pages get their names, and keep their owner; one whose name is here already is given up for
        the one that is here."""
        owners = self._owners
        stored = self._log(True)
        for name in names:
            if name in owners:
                self.share((name,))
                self.free += 1
            else:
                owners[name] = 1
                stored.append(name)

    def release(self, names: Sequence[int], private: int) -> None:
        """A sequence gives back its named pages (in the order of the chain) and its private ones."""
        self.free += private
        owners, found, evictable = self._owners, self._found, self._evictable
        for name in reversed(names):
            owners[name] -= 1
            if not owners[name]:
                if name in found:
                    self._proven[name] = None
                else:
                    evictable[name] = None
        while len(self._proven) > self._proven_limit:
            name = next(iter(self._proven))
            del self._proven[name]
            found.discard(name)
            evictable[name] = None

    def events(self) -> tuple[KVEvent, ...]:
        """What was stored and removed since the last call, in order."""
        events = tuple(
            PagesStored(tuple(names)) if stored else PagesRemoved(tuple(names))
            for stored, names in self._events
            if names
        )
        self._events = []
        return events

    def _log(self, stored: bool) -> list[int]:
        if not self._events or self._events[-1][0] != stored:
            self._events.append((stored, []))
        return self._events[-1][1]
