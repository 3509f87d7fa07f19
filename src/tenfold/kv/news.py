"""What became of the pages of a cache, told under the names that routers know pages by.

The cache tells of each page that enters or leaves its prefix index; `take` hands out what happened since the
last time as one numbered batch, `snapshot` all pages that are there. A page's name is made of its tokens and
of the name of the page before it (`tenfold.router.names`), which is there as long as the page itself is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.protocol import KVEvent, KVEvents, KVSnapshot, PagesRemoved, PagesStored
from tenfold.router.names import chain, namespace_parent, page_hashes


class PageNews:
    """Names of the pages in one prefix index, and what is still to be told of them. Pages are numbers."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}
        self._events: list[tuple[bool, int | None, list[int]]] = []
        """Stored or removed, the name before the first, names."""
        self.sequence = 0
        """Number of the newest batch that was handed out."""

    def stored(self, page: int, tokens: Sequence[int], before: int | str) -> None:
        """A page entered the index, after the page ``before`` or as the first of that namespace."""
        parent = namespace_parent(before) if isinstance(before, str) else self._names[before]
        (name,) = chain(page_hashes(tokens, len(tokens)), parent)
        self._names[page] = name
        if self._events:
            stored, _, names = self._events[-1]
            if stored and names[-1] == parent:
                names.append(name)
                return
        self._events.append((True, parent, [name]))

    def removed(self, page: int) -> None:
        """A page is about to leave the index."""
        name = self._names.pop(page)
        if self._events and not self._events[-1][0]:
            self._events[-1][2].append(name)
        else:
            self._events.append((False, None, [name]))

    def take(self) -> KVEvents | None:
        """What happened since the last call; None if nothing did."""
        if not self._events:
            return None
        events: list[KVEvent] = [
            PagesStored(tuple(names), parent) if stored else PagesRemoved(tuple(names))
            for stored, parent, names in self._events
        ]
        self._events.clear()
        self.sequence += 1
        return KVEvents(sequence=self.sequence, events=tuple(events))

    def snapshot(self) -> KVSnapshot:
        """All pages that are there. What `take` has not handed out yet comes after it all the same, and tells
        of some of them again; so `take` first."""
        return KVSnapshot(sequence=self.sequence, names=tuple(self._names.values()))

    def close(self) -> None:
        """Nothing more will be told."""

    def pages(self) -> frozenset[int]:
        """The pages that have a name; for checks."""
        return frozenset(self._names)
