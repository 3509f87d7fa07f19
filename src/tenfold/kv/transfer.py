"""Pages from one engine to another: what a handoff says, and the two ends of a transfer.

The exporter fills a region (`tenfold.kv.region`) as pages become ready and hands out a handoff, a dict that
is opaque to everyone between the engines. The importer opens it and reads pages as they come, while the
exporter still computes. Transports: ``memory`` (one machine; one copy in, one copy out, nothing through a
socket) and ``tcp`` (`tenfold.kv.tcp`). A region is lent until its deadline: then, or when the importer has
taken it, or when the exporter's process ends, it is gone. Everything is checked, and whatever goes wrong
means computing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tenfold.backends.base import PAGE_ROWS
from tenfold.kv.region import Contents, Mapped, Region, State, TransferError

LEASE_S = 30.0
"""How long a region is kept for its importer once all of it is there."""
LONGEST_S = 600.0
"""How long its exporter may take to fill it."""
STALL_S = 30.0
"""An importer waits no longer than this for the next page."""
POLL_S = 0.0005
LONGEST_POLL_S = 0.002
"""Who waits long (for a step of the exporter) looks less often."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a handoff says. Raises msgspec.ValidationError for a dict that is none."""

    transport: str
    path: str = ""
    """``memory``: of the region; ``tcp``: the same, for importers of the same machine."""
    host: str = ""
    port: int = 0
    key: str = ""
    """``tcp``: which region."""
    expires: float
    """Unix time."""


class Source(Protocol):
    """The importer's end of a transfer."""

    contents: Contents
    seconds: float
    """Spent on pages that were ready."""
    complete_at: float
    """When the last page was ready, by this machine's monotonic clock; 0: not known."""

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """Fills the views with the pages from number ``first`` on, and waits for them; returns how many, from
        the first on, are right. Raises TransferError or OSError when they do not come."""
        ...

    def cancel(self) -> None:
        """Has a `read` that waits in another thread fail."""
        ...

    def close(self, taken: bool) -> None:
        """Ends the transfer. ``taken``: the exporter need not keep the pages."""
        ...


class MemorySource:
    """Reads a region of this machine. Of the last page it waits for the exporter's first token too:
    ``token``, None if it did not say one."""

    def __init__(self, handoff: Handoff) -> None:
        """Raises TransferError."""
        if not re.fullmatch(r"/proc/\d+/fd/\d+", handoff.path):
            raise TransferError(f"the handoff's path is {handoff.path[:80]!r}; that is no region")
        self._path = handoff.path
        self._expires = handoff.expires
        self._cancelled = False
        self.seconds = self.complete_at = 0.0
        self.token: int | None = None
        try:
            file = os.open(handoff.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(
                f"the exporter is gone, or has given the region up: {error}", "gone"
            ) from None
        try:
            self._region = Mapped(file)
        except BaseException:
            os.close(file)
            raise
        self.contents = self._region.contents

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `Source`."""
        last = first + len(views)
        await_pages(self._region.progress, last, self._expires, self._there)
        began = time.perf_counter()
        good = self._region.read(first, views)
        self.seconds += time.perf_counter() - began
        if last == self.contents.pages:
            await_pages(self._ended, 1, self._expires, self._there)
            self.token = self._region.token
        self.complete_at = self._region.complete_at
        self._region.progress()  # both are of this prompt
        return good

    @property
    def ended(self) -> bool:
        """Whether everything is there, read or not. Raises TransferError, OSError."""
        return self._ended()[0] > 0

    def cancel(self) -> None:
        """See `Source`."""
        self._cancelled = True

    def close(self, taken: bool) -> None:
        """See `Source`."""
        if taken:
            with contextlib.suppress(OSError):
                self._region.take()
        self._region.close()

    def _ended(self) -> tuple[int, State]:
        _, state = self._region.progress()
        return int(state == "complete"), state

    def _there(self) -> bool:
        try:
            return not self._cancelled and os.stat(self._path).st_ino == os.fstat(self._region.file).st_ino
        except OSError:
            return False


def await_pages(
    progress: Callable[[], tuple[int, State]],
    wanted: int,
    expires: float,
    there: Callable[[], bool] = lambda: True,
) -> None:
    """Waits until so many pages of a region are ready. Raises TransferError if they do not come, come too
    late, or the exporter is not there any more."""
    ready, state = progress()
    stalled = time.monotonic() + STALL_S
    poll_s = POLL_S
    while ready < wanted:
        if state == "failed" or not there():
            raise TransferError("the exporter gave up", "gone")
        if time.monotonic() > stalled or time.time() > expires:
            raise TransferError("the exporter is late", "late")
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.1, LONGEST_POLL_S)
        before = ready
        ready, state = progress()
        if ready > before:
            stalled, poll_s = time.monotonic() + STALL_S, POLL_S


class Export(msgspec.Struct):
    """A region on its way."""

    region: Region
    handoff: dict[str, Any]
    expires: float = 0.0
    """Monotonic time, once nothing is added any more."""


class Exports:
    """The regions of one engine, by request. ``most_bytes`` bounds them all; beyond it nothing is exported.
    For the engine's thread. ``offer``, if given, makes a region available to other machines: it returns the
    fields of its handoff, and a function that takes the offer back."""

    def __init__(
        self,
        identity: str,
        page_bytes: int,
        most_bytes: int,
        offer: Callable[[Region], tuple[dict[str, Any], Callable[[], None]]] | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._identity = identity
        self._page_bytes = page_bytes
        self._most_bytes = most_bytes
        self._offer = offer
        self._lease_s = lease_s
        self._exports: dict[str, Export] = {}
        self._lent: list[Export] = []
        """Complete or failed, until they are taken or expire."""
        self._idle: list[Region] = []
        """Taken regions, to be used again."""
        self._retract: dict[int, Callable[[], None]] = {}
        self.exported_pages = 0
        self.seconds = 0.0
        """Spent on writing pages."""
        self.declined = 0
        """Exports for which there was no room to the end."""

    def begin(self, id: str, namespace: str, tokens: bytes, pages: int) -> dict[str, Any] | None:
        """A handoff for the first ``pages`` pages of a request; None if there is no room. ``tokens`` are
        those of the pages."""
        self.sweep()
        contents = Contents(
            identity=self._identity,
            namespace=namespace.encode(),
            tokens=tokens,
            pages=pages,
            page_bytes=self._page_bytes,
        )
        region = self._region(contents) if pages else None
        if region is None:
            return None
        fields: dict[str, Any] = {"transport": "memory", "path": region.path}
        if self._offer is not None:
            fields, self._retract[id_of(region)] = self._offer(region)
        export = Export(region, {**fields, "expires": time.time() + LONGEST_S})
        self._exports[id] = export
        return export.handoff

    def prepare(self, pages: int) -> None:
        """A region for prompts of up to so many pages is there from now on. Its memory is taken when it is
        first written, and then kept: what is there already is filled three times as fast."""
        contents = Contents(
            identity=self._identity,
            namespace=bytes(64),
            tokens=bytes(4 * PAGE_ROWS * pages),
            pages=pages,
            page_bytes=self._page_bytes,
        )
        with contextlib.suppress(OSError):
            empty = msgspec.structs.replace(contents, tokens=b"", pages=0)
            self._idle.append(Region(empty, contents.size))

    def missing(self, id: str) -> tuple[int, int]:
        """The number of the next page of a request's region, and how many it wants in all; (0, 0): none."""
        export = self._exports.get(id)
        return (0, 0) if export is None else (export.region.ready, export.region.contents.pages)

    def add(self, id: str, pages: Sequence[memoryview]) -> None:
        """The next pages are ready."""
        export = self._exports[id]
        began = time.perf_counter()
        try:
            export.region.add(pages)
        except OSError:
            self.end(id)
        else:
            self.exported_pages += len(pages)
        self.seconds += time.perf_counter() - began

    def end(self, id: str, token: int | None = None) -> dict[str, Any] | None:
        """A request needs its pages no more; returns its handoff if all of them are in it. ``token``: see
        `Region.end`."""
        export = self._exports.pop(id, None)
        if export is None:
            return None
        whole = False
        with contextlib.suppress(OSError):
            whole = export.region.end(token)
        export.expires = time.monotonic() + self._lease_s
        self._lent.append(export)
        return {**export.handoff, "expires": time.time() + self._lease_s} if whole else None

    @property
    def bytes(self) -> int:
        """Of all regions that are lent or being filled."""
        return sum(each.region.capacity for each in (*self._exports.values(), *self._lent))

    def sweep(self, everything: bool = False) -> None:
        """Gives back regions that were taken, or whose time is over."""
        now = time.monotonic()
        keep = []
        for export in self._lent:
            taken = export.region.taken
            if not (everything or taken or now > export.expires):
                keep.append(export)
                continue
            self._retract.pop(id_of(export.region), lambda: None)()
            if taken and not everything:
                self._idle.append(export.region)
            else:
                export.region.close()
        self._lent = keep

    def close(self) -> None:
        """Gives everything back."""
        for id in list(self._exports):
            self.end(id)
        self.sweep(everything=True)
        for region in self._idle:
            region.close()
        self._idle.clear()

    def _region(self, contents: Contents) -> Region | None:
        """A region that is large enough, if there is room; the smallest that is there will do."""
        self._idle.sort(key=lambda region: region.capacity)
        try:
            for region in self._idle:
                if region.capacity >= contents.size:
                    self._idle.remove(region)
                    region.renew(contents)
                    return region
            while self._idle and self._used(contents.size) > self._most_bytes:
                self._idle.pop(0).close()
            return Region(contents) if self._used(contents.size) <= self._most_bytes else None
        except OSError:
            return None

    def _used(self, more: int) -> int:
        return self.bytes + sum(region.capacity for region in self._idle) + more


def id_of(region: Region) -> int:
    """Tells regions apart that are there at once."""
    return region.file
