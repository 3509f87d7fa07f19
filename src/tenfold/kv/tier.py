"""The disk tier as an engine uses it: what is written, what is restored, and whether that pays.

Every ready page is written soon after it became ready, in the order of its chain: a page evicted later, and a
process that ends without a word, then lose nothing. Writing takes no page from anyone, copies none, and waits
its turn behind whoever computes; what is evicted before its turn is dropped and counted.

A request whose next pages are on disk waits at the head of the queue until they are read
(`tenfold.kv.arrivals`), if reading them is expected to be faster than computing them by what was measured
(`tenfold.kv.pace`), and no longer than computing would have taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from tenfold.backends.base import PAGE_ROWS, PageViews
from tenfold.kv.arrivals import Arrival, Arrivals
from tenfold.kv.cache import KVCache, PageTable, pages_for
from tenfold.kv.disk import DiskTier, Place
from tenfold.kv.pace import Pace
from tenfold.kv.prefix import Node
from tenfold.kv.segment import MOST_PAGES, token_bytes
from tenfold.kv.writer import Writer, Writing
from tenfold.protocol import TierCounts

log = logging.getLogger(__name__)

RIPE_PAGES = 8
"""A shorter run waits for more pages while its sequence still runs: each run says its whole chain."""
TRIES = 4
"""Runs looked at in a step for one that is ripe."""
READ_PAGES = 16
"""Most pages of one read."""
UNMEASURED_ROW_S = 0.001
"""To compute a row, as far as a restore's deadline goes while that is not measured."""
LEAST_DEADLINE_S = 0.05
"""A restore is not called off sooner, whatever was expected: a busy machine alone can take so long."""
BACK_OFF_S = 5.0
"""After an error of the disk nothing is written for so long."""
HUNG_S = 1.0
"""A write that takes longer is nothing to wait for."""
JOIN_S = 1.0


class _Pages:
    """A parcel: consecutive pages of one run on disk."""

    def __init__(self, tier: Tier, places: Sequence[Place], namespace: bytes, tokens: bytes) -> None:
        self.pages = len(places)
        self._tier = tier
        self._places = places
        self._namespace = namespace
        self._tokens = tokens

    def read(self, views: Sequence[memoryview]) -> int:
        disk, good = self._tier.disk, 0
        try:
            good = disk.read(self._places, self._namespace, self._tokens, views)
        except OSError as error:
            self._tier.fault("read", error)
        finally:
            if good < self.pages:
                disk.forget(self._places[good:])
        return good


class Tier:
    """The disk tier of one engine. It owns ``disk`` and two threads; its methods are for the engine's
    thread."""

    def __init__(self, cache: KVCache, memory: PageViews, disk: DiskTier) -> None:
        self.disk = disk
        self.pace = Pace(PAGE_ROWS)
        self._cache = cache
        self._memory = memory
        self._news = threading.Event()
        self._errors: Counter[str] = Counter()
        self._said: set[tuple[str, int | None]] = set()
        self._refresh()
        self._arrivals = Arrivals(cache, "kv-reader", self._news, self._refresh)
        self._writer = Writer(disk, self._news)
        self._writing: Writing | None = None
        self._pending: dict[Node, None] = {}
        """Ready pages to be written, those of a chain in its order."""
        self._restores: dict[str, Arrival] = {}
        self._settled: set[str] = set()
        """Requests that wait and whose restore is over."""
        self._quiet_until = 0.0
        self._stored = self._dropped = self._restored = 0
        self._outcomes: Counter[str] = Counter()
        cache.keeper = self

    def page_ready(self, node: Node) -> None:
        """See `tenfold.kv.cache.Keeper`."""
        if self.disk.find(node.key) is None:
            self._pending[node] = None

    def page_gone(self, node: Node) -> None:
        """See `tenfold.kv.cache.Keeper`."""
        if self._writing is not None and node in self._writing.nodes:
            self._writing.lost = True
        if node in self._pending:
            del self._pending[node]
            self._dropped += 1

    def ready(self, id: str, tokens: Sequence[int], namespace: str, reserve: int) -> bool:
        """Whether a request at the head of the queue may be admitted. If not, pages of its prompt are being
        read."""
        if id in self._settled:
            return True
        if (arrival := self._restores.get(id)) is not None:
            return arrival.called_off
        arrival = self._found(tokens, namespace, reserve)
        if arrival is None:
            return True
        self._restores[id] = arrival
        self._arrivals.start(arrival)
        return False

    def forget(self, id: str) -> None:
        """A request was admitted, or is gone."""
        self._settled.discard(id)
        if (arrival := self._restores.pop(id, None)) is not None:
            self._arrivals.cancel(arrival)

    def tick(self) -> bool:
        """Once a step: takes in what the threads did and gives them more. True if pages were given back."""
        self._news.clear()
        ended = self._arrivals.tick()
        for arrival in ended:
            self._end(arrival)
        self._rewrite()
        self._write()
        return bool(ended)

    @property
    def busy(self) -> bool:
        """Whether `tick` will have something to do soon."""
        if self._arrivals.under_way and not self._arrivals.stuck:
            return True
        now = time.monotonic()
        if self._writing is not None:
            return now < self._writing.began + HUNG_S
        return bool(self._pending) and now >= self._quiet_until

    def wait(self, seconds: float) -> None:
        """Waits until a thread has news."""
        self._news.wait(seconds)

    def tables(self) -> list[PageTable]:
        """Tables of what is on its way."""
        return [arrival.table for arrival in self._arrivals.under_way]

    def counts(self) -> TierCounts:
        """What happened so far."""
        return TierCounts(
            pages=self.disk.pages,
            page_bytes=self.disk.page_bytes,
            size_bytes=self.disk.size_bytes,
            stored_pages=self._stored,
            dropped_pages=self._dropped,
            restored_pages=self._restored,
            restores=dict(self._outcomes),
            corrupt=self.disk.corrupt,
            errors=dict(self._errors),
        )

    def fault(self, what: str, error: OSError) -> None:
        """Counts a fault of the disk, and says it once for each kind. Any thread."""
        self._errors[what] += 1
        if (what, error.errno) not in self._said:
            self._said.add((what, error.errno))
            log.warning("the disk tier cannot %s: %s; pages are computed instead", what, error)

    def close(self, flush_s: float) -> None:
        """Writes what is ready and not on disk yet, for at most ``flush_s`` seconds, and ends the threads.
        The cache must not be used afterwards."""
        for arrival in list(self._restores.values()):
            self._arrivals.cancel(arrival)
        deadline = time.monotonic() + flush_s
        if flush_s:
            self._pending = dict.fromkeys(n for n in self._cache.index.nodes() if not self.disk.find(n.key))
        while time.monotonic() < deadline and self.busy:
            self.tick()
            self.wait(0.002)
        self._dropped += len(self._pending)
        self._cache.keeper = None
        ended = [self._writer.close(JOIN_S), self._arrivals.close(JOIN_S)]
        if all(ended):
            self.disk.close()

    def _refresh(self) -> None:
        try:
            self.disk.refresh()
        except OSError as error:
            self.fault("read", error)

    def _found(self, tokens: Sequence[int], namespace: str, reserve: int) -> Arrival | None:
        """An arrival of the pages that follow those in memory, if there are any and it pays."""
        cache = self._cache
        table = cache.match(tokens, namespace)
        first = table.size
        tail = namespace if table.tail is None else table.tail
        places: list[Place] = []
        for key in cache.index.keys_after(tail, tokens[first * PAGE_ROWS : len(tokens) - 1]):
            place = self.disk.find(key)
            if place is None:
                break
            places.append(place)
        count = 0
        missing = pages_for(len(tokens)) - first
        if places and cache.pool.available >= missing + reserve and not self._arrivals.stuck:
            count = self.pace.worth(len(places), self._arrivals.queued_pages)
            if not count:
                self._outcomes["declined"] += 1
        if not count or not cache.extend(table, (first + count) * PAGE_ROWS):
            cache.close(table)
            return None
        named, said = namespace.encode(), token_bytes(tokens[: (first + count) * PAGE_ROWS])
        views = [self._memory.view_page(page) for page in table.pages[first:].tolist()]
        parcels = [_Pages(self, group, named, said) for group in _groups(places[:count])]
        expected_s = self.pace.compute_s(count)
        if expected_s is None:
            expected_s = count * PAGE_ROWS * UNMEASURED_ROW_S
        deadline = time.monotonic() + max(LEAST_DEADLINE_S, expected_s)
        return Arrival(table, tuple(tokens[: (first + count) * PAGE_ROWS]), parcels, views, deadline)

    def _end(self, arrival: Arrival) -> None:
        id = next((id for id, each in self._restores.items() if each is arrival), None)
        if id is not None:
            del self._restores[id]
            self._settled.add(id)
        pages = len(arrival.views)
        self.pace.restored(arrival.landed, arrival.seconds)
        self._restored += arrival.landed
        outcome = "restored" if arrival.landed == pages else "partly" if arrival.landed else "failed"
        self._outcomes[outcome] += 1
        if arrival.error is not None:
            log.warning("restoring pages failed: %s", arrival.error)

    def _rewrite(self) -> None:
        """Pages in memory whose copy on disk was deleted are written again: others may follow them there."""
        for key in self.disk.take_dropped():
            node = self._cache.index.by_key(key)
            if node is not None and self.disk.find(key) is None:
                self._pending[node] = None

    def _write(self) -> None:
        writing, now = self._writing, time.monotonic()
        if writing is not None:
            if not writing.over:
                return
            self._writing = None
            self._settle(writing)
        if now < self._quiet_until:
            return
        for _ in range(TRIES):
            run = self._run()
            if run is not None:
                views = [self._memory.view_page(node.page) for node in run]
                self._writing = Writing(run, views)
                self._writer.start(self._writing)
                return

    def _settle(self, writing: Writing) -> None:
        if writing.stored:
            self._stored += len(writing.nodes)
        elif writing.error is not None:
            self._quiet_until = time.monotonic() + BACK_OFF_S
            self.fault("write", writing.error)
            self._dropped += sum(node in self._pending for node in writing.nodes)
        else:  # a page was evicted meanwhile: the others have another try
            return
        for node in writing.nodes:
            self._pending.pop(node, None)

    def _run(self) -> list[Node] | None:
        """The next pages to write; None if the first of those that wait had better wait on."""
        first = next(iter(self._pending), None)
        if first is None:
            return None
        run = [first]
        while len(run) < MOST_PAGES:
            children = self._cache.index.children(run[-1])
            node = next((child for child in children if child in self._pending), None)
            if node is None:
                break
            run.append(node)
        if len(run) < RIPE_PAGES and self._cache.pool.owners(first.page):
            for node in run:
                del self._pending[node]
                self._pending[node] = None
            return None
        depth = 0
        parent = first.parent
        while isinstance(parent, Node):
            depth, parent = depth + 1, parent.parent
        return run[: max(1, self.disk.run_pages((depth + len(run)) * PAGE_ROWS))]


def _groups(places: Sequence[Place]) -> list[list[Place]]:
    """Places that lie side by side in one run, up to `READ_PAGES`."""
    groups: list[list[Place]] = []
    for place in places:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and len(groups[-1]) < READ_PAGES
            and place == Place(last.segment, last.offset, last.place + 1)
        ):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
