"""A sequence's pages, from its first prefix match to the moment it gives them back.

Here the books (`pages.PagePool`), the index (`prefix.PrefixIndex`) and the program's page memory meet. The
rule that keeps them together: what the index finds is owned before any page is taken, since taking a page may
evict one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from tenfold.backends.base import PAGE_ROWS, Int32s, Program
from tenfold.kv.news import PageNews
from tenfold.kv.pages import IntegrityError, PagePool
from tenfold.kv.prefix import HashPage, Node, Parent, PrefixIndex, hash_page


def pages_for(rows: int) -> int:
    """Pages that ``rows`` rows fill, the last perhaps in part."""
    return -(-rows // PAGE_ROWS)


class PageTable:
    """The pages of one sequence, in order; each owned once by it.

    The first ``indexed`` pages are ready and may be shared; the others are the sequence's own. ``tail`` is
    the last indexed page (or the namespace), and None once a page could not be indexed: then none after it
    can be.
    """

    __slots__ = ("_pages", "indexed", "size", "tail")

    def __init__(self, tail: Parent, capacity: int) -> None:
        self._pages: Int32s = np.empty(capacity, np.int32)
        self.size = 0
        self.indexed = 0
        self.tail: Parent | None = tail

    @property
    def pages(self) -> Int32s:
        """[size] page numbers; a view."""
        return self._pages[: self.size]

    def append(self, page: int) -> None:
        """One page more."""
        if self.size == len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(self.size + 8, np.int32)])
        self._pages[self.size] = page
        self.size += 1


class Keeper(Protocol):
    """Who keeps pages beyond the cache."""

    def page_ready(self, node: Node) -> None:
        """A page is ready: it does not change until `page_gone`."""
        ...

    def page_gone(self, node: Node) -> None:
        """A page is evicted, and used again when this returns."""
        ...


class KVCache:
    """The KV pages of one program. Not thread-safe: it belongs to the engine's thread. ``news`` is told of
    pages that enter and leave the index."""

    def __init__(
        self, program: Program, hash_page: HashPage = hash_page, news: PageNews | None = None
    ) -> None:
        self._program = program
        self._index = PrefixIndex(hash_page)
        self.pool = PagePool(program.info.kv_pages, self._evicted)
        self._news = news
        self.keeper: Keeper | None = None

    @property
    def index(self) -> PrefixIndex:
        """Which page holds what; not to be changed but by the cache."""
        return self._index

    def match(self, tokens: Sequence[int], namespace: str = "") -> PageTable:
        """A table of the ready pages that hold the first of ``tokens``, all but the last; nothing is
        taken."""
        table = PageTable(namespace, pages_for(len(tokens)) + 1)
        self._share_matching(table, tokens, len(tokens) - 1, namespace)
        return table

    def open(
        self, tokens: Sequence[int], reserve: int, namespace: str = "", most: int | None = None
    ) -> tuple[PageTable, int] | None:
        """A table with room for all ``tokens``, and how many first rows of it are there already (at most
        ``most``, and all but one: the last token is always computed, since its logits are needed).

        None, and nothing is changed, unless ``reserve`` pages would still be available afterwards. Rows of a
        page that is shared in part only are copied; an exception from that is passed on, with all pages given
        back.
        """
        table = PageTable(namespace, pages_for(len(tokens)) + 1)
        reusable = len(tokens) - 1 if most is None else min(len(tokens) - 1, most)
        tail = self._share_matching(table, tokens, reusable, namespace)
        missing = pages_for(len(tokens)) - table.size
        if self.pool.available < missing + reserve:
            self.close(table)
            return None
        rows = table.size * PAGE_ROWS
        partial = self._index.nearest(tail, tuple(tokens[rows : min(rows + PAGE_ROWS, reusable)]))
        if partial is not None:
            source, shared = partial
            self.pool.share(source.page)
            if self.pool.available >= missing:
                self._take(table, missing)
                try:
                    self._program.copy_rows(source.page, int(table.pages[table.indexed]), shared)
                except BaseException:
                    self.pool.release(source.page)
                    self.close(table)
                    raise
                self.pool.release(source.page)
                return table, rows + shared
            # The source is one of the very pages that this sequence needs: there is nothing to copy it to.
            self.pool.release(source.page)
        self._take(table, missing)
        return table, rows

    def can_never_hold(self, rows: int) -> bool:
        """Whether ``rows`` rows are more than all pages have."""
        return pages_for(rows) > self.pool.total

    def extend(self, table: PageTable, rows: int) -> bool:
        """Sees to it that the table has room for ``rows`` rows. False, and nothing is changed, if pages run
        out."""
        missing = pages_for(rows) - table.size
        if missing > 0:
            if self.pool.available < missing:
                return False
            self._take(table, missing)
        return True

    def stretch(self, table: PageTable, rows: int) -> int:
        """Sees to it that the table has room for ``rows`` rows as far as free pages go: no cached page is
        evicted for it. Returns for how many of ``rows`` there is room; `trim` undoes it."""
        missing = min(pages_for(rows) - table.size, self.pool.free)
        if missing > 0:
            self._take(table, missing)
        return min(rows, table.size * PAGE_ROWS)

    def trim(self, table: PageTable, rows: int) -> None:
        """Gives back, the last first, the pages that the table's first ``rows`` rows do not need."""
        keep = pages_for(rows)
        for page in reversed(table.pages[keep:].tolist()):
            self.pool.release(page)
        table.size = min(table.size, keep)

    def commit(self, table: PageTable, tokens: Sequence[int], rows: int) -> None:
        """Tells that a finished step has written the first ``rows`` rows of the table, those of ``tokens``.
        Full pages enter the index; one whose contents are there already is given up for the one that is
        there."""
        while table.tail is not None and (table.indexed + 1) * PAGE_ROWS <= rows:
            at = table.indexed
            page = int(table.pages[at])
            held = tuple(tokens[at * PAGE_ROWS : (at + 1) * PAGE_ROWS])
            if (twin := self._index.find(table.tail, held)) is not None:
                self.pool.share(twin.page)
                self.pool.release(page)
                table.pages[at] = twin.page
                table.tail = twin
            else:
                before, table.tail = table.tail, self._index.insert(table.tail, held, page)
                if table.tail is None:
                    return
                self.pool.publish(page)
                if self._news is not None:
                    self._news.stored(page, held, before if isinstance(before, str) else before.page)
                if self.keeper is not None:
                    self.keeper.page_ready(table.tail)
            table.indexed += 1

    def close(self, table: PageTable) -> None:
        """Gives all pages back, the last first; ready ones stay in the cache until their room is needed."""
        for page in reversed(table.pages.tolist()):
            self.pool.release(page)
        table.size = table.indexed = 0

    def check(self, tables: Iterable[PageTable]) -> None:
        """Raises IntegrityError unless books, index and the tables of all sequences agree."""
        tables = list(tables)
        self.pool.check([table.pages.tolist() for table in tables])
        ready = self.pool.ready()
        self._index.check(ready, self.pool.evictable())
        if self._news is not None and self._news.pages() != ready:
            raise IntegrityError(f"news and index differ in pages {sorted(self._news.pages() ^ ready)}")
        for table in tables:
            pages = table.pages.tolist()
            if not (ready.issuperset(pages[: table.indexed]) and ready.isdisjoint(pages[table.indexed :])):
                raise IntegrityError(
                    f"of pages {pages} the first {table.indexed} should be ready, and no other"
                )

    def _share_matching(self, table: PageTable, tokens: Sequence[int], reusable: int, tail: Parent) -> Parent:
        """Puts the ready pages that hold the first of ``tokens`` into the empty table; returns the last."""
        while (table.size + 1) * PAGE_ROWS <= reusable:
            first = table.size * PAGE_ROWS
            node = self._index.find(tail, tuple(tokens[first : first + PAGE_ROWS]))
            if node is None:
                break
            self.pool.share(node.page)
            table.append(node.page)
            tail = node
        table.tail, table.indexed = tail, table.size
        return tail

    def _evicted(self, page: int) -> None:
        if self._news is not None:
            self._news.removed(page)
        node = self._index.remove(page)
        if self.keeper is not None:
            self.keeper.page_gone(node)

    def _take(self, table: PageTable, pages: int) -> None:
        for _ in range(pages):
            page = self.pool.take()
            if page is None:
                raise IntegrityError("the page pool gave fewer pages than it said were available")
            table.append(page)
