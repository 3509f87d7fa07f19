"""Who owns each KV page. Numbers only: the rows themselves are the program's.

A page is in one of three states::

             take()                    publish()
      free ----------> writing ---------------------> ready, owned <----------+
       ^               1 owner: the                   n owners: sequences     |
       |               sequence that                  that read it            | share()
       |               writes it                              |               |
       +--------------------+                                 | release() of  |
       |     release()                                        v the last      |
       +------------------------------------------------- ready, no owner ----+
             take(), when no page is free: the oldest      (evictable cache)

- *free*: holds nothing. In ``_free``.
- *writing*: one sequence owns it and writes it. It is not in the prefix index, so nobody else finds it.
- *ready*: all its rows are written, nobody writes it ever again, and the prefix index holds it. With owners
  it stays; without it waits in ``_evictable``, oldest first, and is given up when no page is free.

A sequence gives its pages back last page first. Whoever owns a page owns the pages before it in the chain
too, so a page is always older in ``_evictable`` than the page before it, and a chain is evicted from its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum


class PageState(Enum):
    """See the picture above."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"


class IntegrityError(RuntimeError):
    """The books do not balance: a fault of Tenfold itself, never of a request."""


class PagePool:
    """The books of ``pages`` pages. ``forget(page)`` is called for a ready page that is evicted, before it is
    reused.

    Owners are counted, not named. Not thread-safe: it belongs to the engine's thread.
    """

    def __init__(self, pages: int, forget: Callable[[int], None]) -> None:
        if pages < 1:
            raise ValueError(f"a page pool needs at least one page, not {pages}")
        self.total = pages
        self._forget = forget
        self._state = [PageState.FREE] * pages
        self._owners = [0] * pages
        # A stack; low numbers are handed out first, so a small load stays in a small stretch of memory.
        self._free = list(range(pages - 1, -1, -1))
        self._evictable: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Pages that ``take`` can give: free ones and ready ones without an owner."""
        return len(self._free) + len(self._evictable)

    @property
    def free(self) -> int:
        """Pages that ``take`` can give without evicting one."""
        return len(self._free)

    def state(self, page: int) -> PageState:
        """The page's state."""
        return self._state[page]

    def owners(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._owners[page]

    def take(self) -> int | None:
        """A page to write, owned once: a free one, else the evictable one unused for longest, else None."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page = next(iter(self._evictable))
            del self._evictable[page]
            self._forget(page)
        else:
            return None
        self._state[page] = PageState.WRITING
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more owner for a ready page; from now on it cannot be evicted. Raises IntegrityError
        otherwise."""
        if self._state[page] is not PageState.READY:
            raise IntegrityError(f"page {page} is {self._state[page].value}; only a ready page can be shared")
        if self._owners[page] == 0:
            del self._evictable[page]
        self._owners[page] += 1

    def publish(self, page: int) -> None:
        """Writing becomes ready: all rows are written and the prefix index holds the page."""
        if self._state[page] is not PageState.WRITING:
            raise IntegrityError(
                f"page {page} is {self._state[page].value}; only a writing page becomes ready"
            )
        self._state[page] = PageState.READY

    def release(self, page: int) -> None:
        """One owner less. Without an owner a ready page becomes evictable (the youngest), a writing page
        free."""
        if self._owners[page] < 1:
            raise IntegrityError(f"page {page} is released, but nobody owns it")
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if self._state[page] is PageState.READY:
            self._evictable[page] = None
        else:
            self._state[page] = PageState.FREE
            self._free.append(page)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises IntegrityError unless every page is in exactly one place and owned as often as the tables of
        all sequences together name it."""
        named = Counter(page for table in tables for page in table)
        free = Counter(self._free)
        for page in range(self.total):
            state, owners = self._state[page], self._owners[page]
            places = free[page] + (page in self._evictable) + (owners > 0)
            if places != 1:
                raise IntegrityError(
                    f"page {page} ({state.value}, {owners} owners) is in {places} places, not 1"
                )
            if owners != named[page]:
                raise IntegrityError(
                    f"page {page} counts {owners} owners, but the tables name it {named[page]} times"
                )
            if (state is PageState.FREE) != bool(free[page]):
                raise IntegrityError(
                    f"page {page} is {state.value}, which does not fit the list of free pages"
                )
            if page in self._evictable and state is not PageState.READY:
                raise IntegrityError(f"page {page} is {state.value}, but in the list of evictable pages")
            if state is PageState.WRITING and owners != 1:
                raise IntegrityError(f"page {page} is being written, but has {owners} owners")
        if unknown := [page for page in [*named, *free, *self._evictable] if not 0 <= page < self.total]:
            raise IntegrityError(f"there are no pages {unknown}; the pool has {self.total}")

    def evictable(self) -> list[int]:
        """Ready pages without an owner, the next to be evicted first."""
        return list(self._evictable)

    def ready(self) -> set[int]:
        """All ready pages."""
        return {page for page, state in enumerate(self._state) if state is PageState.READY}
