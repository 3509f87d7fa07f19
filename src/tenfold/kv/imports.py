"""Handoffs that an engine was given: their pages enter its cache before the requests are admitted."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tenfold.backends.base import PAGE_ROWS, PageViews
from tenfold.kv.arena import Arena
from tenfold.kv.arrivals import Arrival, Arrivals, Parcel
from tenfold.kv.cache import KVCache, PageTable, pages_for
from tenfold.kv.region import Contents, Fallback, TransferError
from tenfold.kv.segment import token_bytes
from tenfold.kv.transfer import LONGEST_S, READ_PAGES, Exports, Handoff, MemorySource, Opener, Source
from tenfold.protocol import Request, TransferCounts

log = logging.getLogger(__name__)

READERS = 4
"""So many handoffs are read at once; those behind them wait."""
CLOSE_PAGES = 64
"""Reading so many is a matter of milliseconds."""
RETRY_S = 0.05
"""A fetch for which there was no room is tried again after this long."""
LATE_S = 5.0
"""Once its request waits for it, all pages are there or somebody has died: a fetch may take no longer."""
_FETCHED = 1024
"""Fetches remembered, the latest."""

Check = Callable[[Contents], None]
"""Raises TransferError for pages that are not those that are wanted."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs in order to export and import pages."""

    identity: str
    """Pages of others are taken if they have the same; see `tenfold.kv.identity`."""
    exports: Exports
    open: Opener
    """Opens the importer's end of a transfer."""
    near: Callable[[Handoff], bool]
    """Whether what is opened is this machine's memory, which is a matter of microseconds."""

    @staticmethod
    def on_this_machine(identity: str, page_bytes: int, most_bytes: int) -> Transfer:
        """Through memory alone; ``most_bytes`` of it for pages that wait for their importers."""
        exports = Exports(identity, page_bytes, Arena(most_bytes))
        return Transfer(identity=identity, exports=exports, open=MemorySource, near=lambda _: True)


class _Incoming:
    """The source of an import. It is opened, read and told that all was taken by a reading thread: a host
    that does not answer holds up no engine."""

    def __init__(self, handoff: Handoff, transfer: Transfer, check: Check, news: threading.Event) -> None:
        self._handoff = handoff
        self._transfer = transfer
        self._check = check
        self._news = news
        self._source: Source | None = None
        self._lock = threading.Lock()
        self._ended = False

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `Source.read`."""
        return self._opened().read(first, views)

    def take(self) -> None:
        """See `Source.take`."""
        self._opened().take()

    @property
    def seconds(self) -> float:
        """See `Source`."""
        return 0.0 if self._source is None else self._source.seconds

    @property
    def complete_at(self) -> float:
        """See `Source`."""
        return 0.0 if self._source is None else self._source.complete_at

    @property
    def token(self) -> int | None:
        """See `Source`."""
        return None if self._source is None else self._source.token

    @property
    def ended(self) -> bool:
        """See `Source.ended`; of what is being opened, whether that will be known at once. For the engine's
        thread."""
        with self._lock:
            if self._source is None:
                return self._transfer.near(self._handoff)
            return not self._ended and self._source.ended

    def cancel(self) -> None:
        """See `Source.cancel`."""
        with self._lock:
            if self._source is not None and not self._ended:
                self._source.cancel()

    def close(self) -> None:
        """See `Source.close`; what is being opened is closed when it is."""
        with self._lock:
            if self._source is not None and not self._ended:
                self._source.close()
            self._ended = True

    def _opened(self) -> Source:
        if self._source is None:
            source = self._transfer.open(self._handoff)
            with self._lock:
                self._source = source
                if self._ended:
                    source.close()
            self._news.set()  # whoever waits for `ended` knows now
            self._check(source.contents)
        return self._source


class _Shipped:
    """A parcel: consecutive pages of a source."""

    def __init__(self, incoming: _Incoming, first: int, pages: int) -> None:
        self.pages = pages
        self._incoming = incoming
        self._first = first

    def read(self, views: Sequence[memoryview]) -> int:
        return self._incoming.read(self._first, views)


class _Taken:
    """The last parcel, without pages: tells the exporter that it need not keep them."""

    pages = 0

    def __init__(self, incoming: _Incoming) -> None:
        self._incoming = incoming

    def read(self, views: Sequence[memoryview]) -> int:
        # Otherwise the lease ends by itself.
        with contextlib.suppress(TransferError, OSError):
            self._incoming.take()
        return 0


class Imports:
    """Imports of one engine. For the engine's thread; one thread of its own reads."""

    def __init__(self, cache: KVCache, memory: PageViews, transfer: Transfer, page_bytes: int) -> None:
        self._cache = cache
        self._memory = memory
        self._transfer = transfer
        self._page_bytes = page_bytes
        self._news = threading.Event()
        self._arrivals = Arrivals(cache, "kv-import", self._news, lambda: None, READERS)
        self._given: dict[str, Handoff] = {}
        """Of requests that wait and whose import has not begun."""
        self._wanted: dict[str, Request] = {}
        """Of these, the ones that begin as soon as there is room."""
        self._retry_at = 0.0
        self._fetched: dict[str, float | None] = {}
        """Fetches that are over and whose request has not been admitted: when their last page was ready, 0 if
        that is not known; None: not all came."""
        self._told: dict[str, int] = {}
        """Tokens that came with the pages of fetches, until they are taken."""
        self._coming: dict[str, tuple[Arrival, _Incoming]] = {}
        self._left: list[tuple[Arrival, _Incoming]] = []
        """Of requests that are gone or do not wait any more."""
        self.imported_pages = 0
        self.seconds = 0.0
        self.starts = 0
        self.start_s = self.start_max_s = 0.0
        self.outcomes: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def expect(self, id: str, handoff: dict[str, Any]) -> None:
        """A request came with a handoff; nothing is done if its pages were fetched already."""
        self._wanted.pop(id, None)
        if id in self._coming or id in self._fetched:
            return
        try:
            self._given[id] = msgspec.convert(handoff, Handoff)
        except msgspec.ValidationError as error:
            self._failed(f"the handoff is none: {error}", "broken")

    def fetch(self, request: Request, reserve: int) -> None:
        """Begins to import for a request that comes later, or does so when there is room."""
        self.expect(request.id, request.handoff or {})
        if request.id in self._given:
            self._wanted[request.id] = request
            self._fetch(request, reserve)

    def _fetch(self, request: Request, reserve: int) -> None:
        # Behind the prompt there will be a token: none of its rows need be left to compute.
        self._begin(request.id, (*request.prompt, *request.output), request.namespace, reserve, left=0)

    def told(self) -> dict[str, int]:
        """Of fetches of which everything has come since the last call: the tokens to go on behind."""
        told, self._told = self._told, {}
        return told

    def coming(self, id: str) -> bool:
        """Whether a request's pages are being fetched; from now on it waits for them, but not for ever."""
        coming = self._coming.get(id)
        if coming is None or coming[0].called_off:
            return False
        coming[0].deadline = min(coming[0].deadline, time.monotonic() + LATE_S)
        return True

    def whole(self, id: str) -> bool:
        """Whether all pages of a handoff have come for a request that was not admitted yet."""
        return self._fetched.get(id) is not None

    def waits(self, id: str) -> bool:
        """Whether a request's pages are still being fetched."""
        return id in self._coming and not self._coming[id][0].called_off

    def closes(self, id: str) -> bool:
        """Whether the last pages of a request are there to be read, and somebody reads them."""
        arrival, incoming = self._coming.get(id, (None, None))
        if arrival is None or incoming is None or arrival.over:
            return False
        if len(self._arrivals.under_way) > READERS or arrival.limit - arrival.landed > CLOSE_PAGES:
            return False
        try:
            return incoming.ended
        except (TransferError, OSError):
            return False

    def reads(self, id: str) -> bool:
        """Whether some of a request's pages have still to be read."""
        coming = self._coming.get(id)
        return coming is not None and not coming[0].over and not coming[0].called_off

    def ready(self, id: str, tokens: Sequence[int], namespace: str, reserve: int) -> bool:
        """Whether the request at the head of the queue need not wait (any longer) for pages."""
        if (coming := self._coming.get(id)) is not None:
            return coming[0].called_off
        return self._begin(id, tokens, namespace, reserve)

    def _begin(self, id: str, tokens: Sequence[int], namespace: str, reserve: int, left: int = 1) -> bool:
        """Begins the import of a handoff that was given, if it has any use and there is room. So many of the
        last tokens are computed here in any case. False: it has begun."""
        if (handoff := self._given.get(id)) is None:
            return True
        cache = self._cache
        table = cache.match(tokens, namespace)
        if cache.pool.available < pages_for(len(tokens)) - table.size + reserve:
            cache.close(table)  # it cannot be admitted now either
            return True
        del self._given[id]
        self._wanted.pop(id, None)
        if time.time() > handoff.expires:
            cache.close(table)
            self._failed("the handoff came too late", "late")
            return True
        check = self._check(handoff, namespace, tokens)
        incoming = _Incoming(handoff, self._transfer, check, self._news)
        first = table.size
        last = min(handoff.pages, (len(tokens) - left) // PAGE_ROWS)
        if last <= first or not cache.extend(table, last * PAGE_ROWS):
            # The request waits for nothing, but the exporter is told.
            cache.close(table)
            arrival = self._arrival(cache.match((), namespace), incoming, 0, 0, (), handoff)
            self._left.append((arrival, incoming))
            self._arrivals.start(arrival)
            return True
        arrival = self._arrival(table, incoming, first, last, tokens, handoff)
        self._coming[id] = arrival, incoming
        self._arrivals.start(arrival)
        return False

    def forget(self, id: str) -> None:
        """A request was admitted."""
        complete_at = self._fetched.get(id)
        self.abandon(id)
        if complete_at:
            seconds = time.monotonic() - complete_at
            self.starts += 1
            self.start_s += seconds
            self.start_max_s = max(self.start_max_s, seconds)

    def abandon(self, id: str) -> None:
        """A request, or one that was to come, is gone."""
        self._given.pop(id, None)
        self._wanted.pop(id, None)
        self._fetched.pop(id, None)
        self._told.pop(id, None)
        if (coming := self._coming.pop(id, None)) is not None:
            self._left.append(coming)
            self._arrivals.cancel(coming[0])

    def tick(self, reserve: int = 0) -> bool:
        """Once a step: takes in what has come, and begins fetches for which there is room now. True if pages
        were given back."""
        self._news.clear()
        if self._wanted and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_S
            for request in list(self._wanted.values()):
                self._fetch(request, reserve)
        ended = self._arrivals.tick()
        for arrival in ended:
            self._end(arrival)
        for arrival, source in (*self._coming.values(), *self._left):
            if arrival.called_off:
                source.cancel()
        return bool(ended)

    @property
    def busy(self) -> bool:
        """Whether pages are coming."""
        return bool(self._arrivals.under_way) and not self._arrivals.stuck

    def wait(self, seconds: float) -> None:
        """Waits until a thread has news that were not waited for before."""
        self._news.wait(seconds)
        self._news.clear()

    def counts(self) -> TransferCounts:
        """What was exported and imported so far."""
        exports = self._transfer.exports
        return TransferCounts(
            exported_pages=exports.exported_pages,
            declined=exports.declined,
            imported_pages=self.imported_pages,
            imports=dict(self.outcomes),
            page_bytes=self._page_bytes,
            export_s=exports.seconds,
            import_s=self.seconds,
            fallbacks=dict(self.fallbacks),
            starts=self.starts,
            start_s=self.start_s,
            start_max_s=self.start_max_s,
        )

    def tables(self) -> list[PageTable]:
        """Tables of what is on its way."""
        return [arrival.table for arrival in self._arrivals.under_way]

    def close(self) -> None:
        """Ends the thread. The cache must not be used afterwards."""
        for _, source in (*self._coming.values(), *self._left):
            source.cancel()
        if self._arrivals.close(1.0):
            for _, source in (*self._coming.values(), *self._left):
                source.close()

    def _check(self, handoff: Handoff, namespace: str, tokens: Sequence[int]) -> Check:
        """For a reading thread."""
        identity, page_bytes = self._transfer.identity, self._page_bytes
        expected = token_bytes(tokens[: handoff.pages * PAGE_ROWS])

        def check(contents: Contents) -> None:
            fits = (
                contents.identity == identity
                and contents.page_bytes == page_bytes
                and contents.namespace == namespace.encode()
                and contents.pages == handoff.pages
                and len(contents.tokens) == 4 * PAGE_ROWS * contents.pages
                and contents.tokens == expected
            )
            if not fits:
                raise TransferError("the pages are of another model, configuration or prompt", "foreign")

        return check

    def _arrival(
        self,
        table: PageTable,
        incoming: _Incoming,
        first: int,
        last: int,
        tokens: Sequence[int],
        handoff: Handoff,
    ) -> Arrival:
        parcels: list[Parcel] = [
            _Shipped(incoming, at, min(READ_PAGES, last - at)) for at in range(first, last, READ_PAGES)
        ]
        parcels.append(_Taken(incoming))
        views = [self._memory.view_page(page) for page in table.pages[first:].tolist()]
        left_s = min(LONGEST_S, handoff.expires - time.time())
        return Arrival(table, tuple(tokens[: last * PAGE_ROWS]), parcels, views, time.monotonic() + left_s)

    def _end(self, arrival: Arrival) -> None:
        whole = arrival.landed == len(arrival.views)
        for id, coming in list(self._coming.items()):
            if coming[0] is arrival:
                self._left.append(self._coming.pop(id))
                self._fetched[id] = coming[1].complete_at if whole else None
                if whole and (token := coming[1].token) is not None:
                    self._told[id] = token
                while len(self._fetched) > _FETCHED:
                    del self._fetched[next(iter(self._fetched))]
        for coming in list(self._left):
            if coming[0] is arrival:
                self._left.remove(coming)
                self.seconds += coming[1].seconds
                coming[1].close()
        self.imported_pages += arrival.landed
        if whole:
            self.outcomes["imported" if arrival.views else "there already"] += 1
            return
        outcome = "partly" if arrival.landed else "failed"
        if arrival.late:
            self._failed("they were late", "late", outcome)
        elif arrival.called_off:
            self.outcomes["abandoned"] += 1
        elif arrival.error is None:
            self._failed("a checksum is wrong", "checksum", outcome)
        else:
            self._failed(f"{arrival.error}", _reason(arrival.error), outcome)

    def _failed(self, why: str, reason: Fallback, outcome: str = "failed") -> None:
        self.outcomes[outcome] += 1
        self.fallbacks[reason] += 1
        log.warning("pages of another worker did not come, and are computed: %s", why)


def _reason(error: Exception) -> Fallback:
    return error.reason if isinstance(error, TransferError) else "broken"
