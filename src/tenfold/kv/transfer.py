"""Pages from one engine to another: what a handoff says, and the two ends of a transfer.

The exporter fills a region (`tenfold.kv.region`) as pages become ready and hands out a handoff, a dict that
is opaque to everyone between the engines. The importer opens it and reads pages as they come, while the
exporter still computes. Transports: ``memory`` (one machine; one copy in, one copy out, nothing through a
socket), ``tcp`` (`tenfold.kv.tcp`) and ``nixl`` (`tenfold.kv.nixl`); `tenfold.kv.choice` chooses. A region is
lent until its deadline: then, or when the importer has taken it, or when the exporter's process ends, it is
gone. Everything is checked, and whatever goes wrong means computing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from tenfold.kv.arena import Arena
from tenfold.kv.region import Contents, FileReach, Mapped, NoRoom, Reach, Region, State, TransferError

LEASE_S = 30.0
"""How long a region is kept for its importer once all of it is there."""
LONGEST_S = 600.0
"""How long its exporter may take to fill it."""
STALL_S = 30.0
"""An importer waits no longer than this for the next page."""
POLL_S = 0.0005
LONGEST_POLL_S = 0.002
"""Who waits long (for a step of the exporter) looks less often."""
READ_PAGES = 4
"""Most pages of one read: they are waited for together."""


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where NIXL finds a region; see `tenfold.kv.nixl`."""

    metadata: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    """Of the exporter's agent, in base64."""
    address: Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]
    """Of the region, in the exporter's process."""
    proof: Annotated[str, msgspec.Meta(max_length=64)]
    """That who says this knows the secret."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a handoff says: what is in the region, and how one gets at it, in each way that its exporter
    offers. Raises msgspec.ValidationError for a dict that is none."""

    pages: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    expires: float
    """Unix time."""
    path: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of the exporter's memory, for importers of its machine,"""
    at: Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)] = 0
    """and where in it the region begins."""
    host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    """Of the exporter, if it has importers elsewhere too."""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """For TCP,"""
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """and which region."""
    nixl: NixlOffer | None = None


class Source(Protocol):
    """The importer's end of a transfer."""

    contents: Contents

    @property
    def seconds(self) -> float:
        """Spent on pages that were ready."""
        ...

    @property
    def complete_at(self) -> float:
        """When the last page was ready, by this machine's monotonic clock; 0: not known."""
        ...

    @property
    def token(self) -> int | None:
        """Once the last page was read: the exporter's first token, to go on behind; None: it has none."""
        ...

    @property
    def ended(self) -> bool:
        """Whether everything is there, read or not; False where that is not known at once. Raises
        TransferError, OSError."""
        ...

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """Fills the views with the pages from number ``first`` on, and waits for them, with the last page for
        the token too; returns how many, from the first on, are right. Raises TransferError or OSError when
        they do not come."""
        ...

    def cancel(self) -> None:
        """Has a `read` that waits in another thread fail."""
        ...

    def take(self) -> None:
        """The exporter need not keep the pages. Raises TransferError or OSError."""
        ...

    def close(self) -> None:
        """Ends the transfer, without waiting for anything."""
        ...


Opener = Callable[[Handoff], Source]
"""Opens the importer's end of a transfer, on a reading thread. Raises TransferError or OSError."""


class RegionSource:
    """Reads a region whose memory is within reach; see `Source`."""

    def __init__(self, reach: Reach, expires: float, longest_poll_s: float = LONGEST_POLL_S) -> None:
        """Raises TransferError, OSError."""
        self._region = Mapped(reach)
        self._expires = expires
        self._longest_poll_s = longest_poll_s
        self._cancelled = False
        self.contents = self._region.contents
        self.seconds = self.complete_at = 0.0
        self.token: int | None = None

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `Source`."""
        last = first + len(views)
        wait = self._expires, self._there, self._longest_poll_s
        await_pages(self._region.progress, last, *wait)
        began = time.perf_counter()
        good = self._region.read(first, views)
        self.seconds += time.perf_counter() - began
        if last == self.contents.pages:
            self.token = await_token(self._region, *wait)
        return good

    @property
    def ended(self) -> bool:
        """See `Source`."""
        return False

    def cancel(self) -> None:
        """See `Source`."""
        self._cancelled = True

    def take(self) -> None:
        """See `Source`."""
        self._region.take()

    def close(self) -> None:
        """See `Source`."""

    def _there(self) -> bool:
        return not self._cancelled


class MemorySource(RegionSource):
    """Reads a region of this machine."""

    def __init__(self, handoff: Handoff) -> None:
        """Raises TransferError, OSError."""
        if not re.fullmatch(r"/proc/\d+/fd/\d+", handoff.path):
            raise TransferError(f"the handoff's path is {handoff.path!r}; that is no region")
        self._path = handoff.path
        try:
            self._file = os.open(handoff.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the exporter is gone: {error}", "gone") from None
        try:
            super().__init__(FileReach(self._file, handoff.at), handoff.expires)
        except BaseException:
            os.close(self._file)
            raise

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `Source`."""
        good = super().read(first, views)
        self.complete_at = self._region.complete_at()
        return good

    @property
    def ended(self) -> bool:
        """See `Source`."""
        return self._region.progress()[1] == "complete"

    def close(self) -> None:
        """See `Source`."""
        os.close(self._file)

    def _there(self) -> bool:
        try:
            return super()._there() and os.stat(self._path).st_ino == os.fstat(self._file).st_ino
        except OSError:
            return False


def await_pages(
    progress: Callable[[], tuple[int, State]],
    wanted: int,
    expires: float,
    there: Callable[[], bool] = lambda: True,
    longest_poll_s: float = LONGEST_POLL_S,
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
        poll_s = min(poll_s * 1.1, longest_poll_s)
        before = ready
        ready, state = progress()
        if ready > before:
            stalled, poll_s = time.monotonic() + STALL_S, POLL_S


def await_token(
    region: Mapped,
    expires: float,
    there: Callable[[], bool] = lambda: True,
    longest_poll_s: float = LONGEST_POLL_S,
) -> int | None:
    """Waits until a region is complete; returns its token. Raises TransferError as `await_pages` does."""

    def ended() -> tuple[int, State]:
        _, state = region.progress()
        return int(state == "complete"), state

    await_pages(ended, 1, expires, there, longest_poll_s)
    return region.token()


class Export(msgspec.Struct):
    """A region on its way."""

    region: Region
    handoff: dict[str, Any]
    retract: list[Callable[[], None]]
    expires: float = 0.0
    """Monotonic time, once nothing is added any more."""

    def give_back(self) -> None:
        """Nobody may read it any more."""
        for retract in self.retract:
            retract()
        self.region.close()


Offer = Callable[[Region], tuple[dict[str, Any], Callable[[], None]]]
"""Makes a region available in one way: returns its fields of the handoff, and what takes the offer back."""


def offer_memory(region: Region) -> tuple[dict[str, Any], Callable[[], None]]:
    """To other processes of this machine; an `Offer`."""
    return {"path": region.path, "at": region.at}, lambda: None


class Exports:
    """The regions of one engine, by request, all in one arena; beyond it nothing is exported. Owns the arena.
    For the engine's thread. Each of ``offers`` makes a region available to other processes."""

    def __init__(
        self,
        identity: str,
        page_bytes: int,
        arena: Arena,
        offers: Iterable[Offer] = (offer_memory,),
        lease_s: float = LEASE_S,
    ) -> None:
        self._identity = identity
        self._page_bytes = page_bytes
        self._arena = arena
        self._offers = tuple(offers)
        self._lease_s = lease_s
        self._exports: dict[str, Export] = {}
        self._lent: list[Export] = []
        """Complete or failed, until they are taken or expire."""
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
        try:
            region = Region(contents, self._arena) if pages else None
        except (NoRoom, OSError):
            region = None
        if region is None:
            return None
        handoff: dict[str, Any] = {"pages": pages, "expires": time.time() + LONGEST_S}
        retract = []
        for offer in self._offers:
            fields, taken_back = offer(region)
            handoff.update(fields)
            retract.append(taken_back)
        self._exports[id] = Export(region, handoff, retract)
        return handoff

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
        return self._arena.used

    def sweep(self) -> None:
        """Gives back regions that were taken, or whose time is over."""
        now = time.monotonic()
        keep = []
        for export in self._lent:
            if export.region.taken or now > export.expires:
                export.give_back()
            else:
                keep.append(export)
        self._lent = keep

    def close(self) -> None:
        """Gives everything back."""
        for export in (*self._exports.values(), *self._lent):
            export.give_back()
        self._exports.clear()
        self._lent.clear()
        self._arena.close()
