"""Following the workers' events: every batch once and in order, and a resync where that fails.

A stream is *in step* or *waiting for a snapshot*. It falls out of step when a number is missing, when the
worker's load speaks of events that did not come, or when events contradict what is known. Until a snapshot
comes, what is known stays in use and later events are applied to it as well as they can be (a wrong page
costs time, never an answer), and they are kept, since a snapshot may be older than they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tenfold.protocol import KVEvents, KVSnapshot, PagesCleared, PagesRemoved, PagesStored
from tenfold.router.base import Resync, RouterCounts
from tenfold.router.index import PageIndex

_KEPT = 4096
"""Batches kept for a snapshot. If more come before it does, it is asked for anew."""


class _Stream:
    __slots__ = ("ahead", "ahead_since", "asked", "broken", "kept", "last", "worker")

    def __init__(self, worker: str, broken: str | None) -> None:
        self.worker = worker
        self.last = 0
        """Number of the newest batch seen."""
        self.broken = broken
        """Why it is out of step; None: in step."""
        self.asked: float | None = None
        self.kept: deque[KVEvents] = deque()
        self.ahead = 0
        """Number of a batch that the worker says it sent and that did not come yet,"""
        self.ahead_since: float | None = None
        """and since when that is known; None: there is none."""


class EventStreams:
    """The streams of all slots, applied to an index."""

    def __init__(self, index: PageIndex, counts: RouterCounts, resync_timeout_s: float, lag_s: float) -> None:
        self._index = index
        self._counts = counts
        self._timeout = resync_timeout_s
        self._lag = lag_s
        self._streams: dict[int, _Stream] = {}

    def open(self, slot: int, worker: str, empty: bool) -> None:
        """Begins to follow a worker; one not known to be empty is asked for a snapshot first."""
        self._streams[slot] = _Stream(worker, None if empty else "its pages are not known yet")

    def close(self, slot: int) -> None:
        """Ends to."""
        del self._streams[slot]

    def in_step(self, slot: int) -> bool:
        """Whether the index can be believed for this slot."""
        return self._streams[slot].broken is None

    def apply(self, slot: int, batch: KVEvents) -> None:
        """The next batch. One seen before is ignored."""
        stream = self._streams[slot]
        self._counts.event_batches += 1
        if batch.sequence <= stream.last:
            return
        if batch.sequence != stream.last + 1:
            missing = f"{stream.last + 1} to {batch.sequence - 1}"
            self._break(stream, f"events {missing} did not come")
        stream.last = batch.sequence
        if stream.last >= stream.ahead:
            stream.ahead_since = None
        if fault := self._change(slot, batch):
            self._break(stream, fault)
        if stream.broken is not None:
            stream.kept.append(batch)
            if len(stream.kept) > _KEPT:
                stream.kept.popleft()

    def snapshot(self, slot: int, snapshot: KVSnapshot) -> None:
        """All of a worker's pages; then the kept events that are newer."""
        stream = self._streams[slot]
        newer = [batch for batch in stream.kept if batch.sequence > snapshot.sequence]
        if stream.broken is None or (not newer and snapshot.sequence < stream.last):
            return  # Late or repeated: what is known is newer.
        stream.kept.clear()
        stream.broken = stream.asked = stream.ahead_since = None
        self._counts.resyncs += 1
        if not self._index.replace(slot, snapshot.names):
            self._break(stream, "its snapshot has more pages than it can hold")
        stream.last = snapshot.sequence
        for batch in newer:
            self.apply(slot, batch)

    def heard(self, slot: int, sequence: int, now: float) -> None:
        """The worker's load speaks of events up to this number."""
        stream = self._streams[slot]
        if sequence > stream.last and stream.ahead_since is None:
            stream.ahead, stream.ahead_since = sequence, now

    def due(self, now: float) -> Iterator[Resync]:
        """The workers to be asked for a snapshot now."""
        for stream in self._streams.values():
            if stream.ahead_since is not None and now >= stream.ahead_since + self._lag:
                self._break(stream, f"no events after {stream.last} came, though there were some")
                stream.ahead_since = None
            if stream.broken is not None and (stream.asked is None or now >= stream.asked + self._timeout):
                stream.asked = now
                yield Resync(stream.worker, stream.broken)

    def next_due(self) -> float:
        """When `due` may next have something; infinity if nothing is waited for."""
        times = [float("inf")]
        for stream in self._streams.values():
            if stream.ahead_since is not None:
                times.append(stream.ahead_since + self._lag)
            if stream.broken is not None:
                times.append(-float("inf") if stream.asked is None else stream.asked + self._timeout)
        return min(times)

    def _change(self, slot: int, batch: KVEvents) -> str | None:
        """Applies a batch; says what is wrong with it."""
        fault = None
        for event in batch.events:
            if isinstance(event, PagesStored):
                if not self._index.add(slot, event.names):
                    fault = "its events tell of more pages than it can hold"
            elif isinstance(event, PagesRemoved):
                if not self._index.remove(slot, event.names):
                    fault = "it gave up pages that it was not known to have"
            elif isinstance(event, PagesCleared):
                self._index.clear(slot)
        return fault

    def _break(self, stream: _Stream, why: str) -> None:
        if stream.broken is None:
            self._counts.gaps += 1
            stream.broken = why
