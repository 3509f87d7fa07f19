"""A stretch of memory that other processes may open, with the pages of one prompt in it, in the order of its
chain.

::

      0            64                     tokens_at          sums_at         pages_at
      +------------+----------------------+------------------+---------------+--------+--------+--
      | head       | identity, namespace  | tokens           | sums          | page 0 | page 1 |
      +------------+----------------------+------------------+---------------+--------+--------+--

The exporter writes a page and its sum, then counts it as ready in the head; an importer reads no page
before, and looks at the head again after it: a region that was given up has another generation there, or
whatever else the memory (`tenfold.kv.arena`) holds by then. When all are there and the exporter's first token
is drawn, that goes into the head too, and the region is complete. The exporter reads and writes by system
calls, and so do importers of its machine: memory that is missing is an error and not a signal.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from struct import Struct
from typing import Literal, Protocol

import msgspec

from tenfold.kv.arena import Arena
from tenfold.kv.segment import page_sum
from tenfold.kv.vectored import read_all, write_all

State = Literal["open", "complete", "failed"]
_STATES: tuple[State, ...] = ("open", "complete", "failed")
_HEAD = Struct("<8sIIIIQQII")
"""Magic, bytes of the identity, of the namespace, tokens, pages, bytes of a page, generation, pages ready,
state."""
_READY = Struct("<II")
_READY_AT = _HEAD.size - _READY.size
_MAGIC = b"TFKVREG\x01"
_COMPLETE = Struct("<d")
_COMPLETE_AT = 48
"""When the last page was there, by the exporter's monotonic clock: that of all processes of a machine."""
_TAKEN_AT = 56
"""The importer writes a 1 there when it needs the region no more."""
_TOKEN = Struct("<I")
_TOKEN_AT = 60
"""One more than the token that was drawn behind the prompt; 0: there is none to go on with."""
_NAMES_AT = 64
_MOST_NAME = 1 << 16
_MOST_TOKENS = 1 << 26
"""What is more is no region's, but whatever its memory holds now."""


Fallback = Literal["gone", "late", "checksum", "foreign", "broken"]
"""Why pages did not come; see `tenfold.protocol.TransferCounts`."""


class TransferError(Exception):
    """Pages did not come: whoever waited for them computes them."""

    def __init__(self, message: str, reason: Fallback = "broken") -> None:
        super().__init__(message)
        self.reason = reason


class NoRoom(Exception):
    """The arena has no room for a region."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a region's pages are."""

    identity: str
    namespace: bytes
    tokens: bytes
    """Of all its pages, as 32-bit numbers."""
    pages: int
    page_bytes: int

    @property
    def tokens_at(self) -> int:
        """Offset of the tokens."""
        return _NAMES_AT + len(self.identity.encode()) + len(self.namespace)

    @property
    def sums_at(self) -> int:
        """Offset of the pages' checksums, XXH3-64 each."""
        return -(-(self.tokens_at + len(self.tokens)) // 8) * 8

    @property
    def pages_at(self) -> int:
        """Offset of the first page."""
        return -(-(self.sums_at + 8 * self.pages) // 4096) * 4096

    def page_at(self, page: int) -> int:
        """Offset of a page."""
        return self.pages_at + page * self.page_bytes

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.page_at(self.pages)


class Region:
    """The exporter's side. Owns a stretch of the arena."""

    def __init__(self, contents: Contents, arena: Arena) -> None:
        """Raises NoRoom, OSError."""
        self.contents = contents
        self.ready = 0
        at = arena.take(contents.size)
        if at is None:
            raise NoRoom
        self.at = at
        self._arena = arena
        identity = contents.identity.encode()
        head = _HEAD.pack(
            _MAGIC,
            len(identity),
            len(contents.namespace),
            len(contents.tokens) // 4,
            contents.pages,
            contents.page_bytes,
            # 0 is none's.
            secrets.randbits(64) | 1,
            0,
            0,
        )
        try:
            self._write(head.ljust(_NAMES_AT, b"\0") + identity + contents.namespace, 0)
            self._write(contents.tokens, contents.tokens_at)
        except OSError:
            arena.give(at)
            raise

    @property
    def file(self) -> int:
        """The arena's."""
        return self._arena.file

    @property
    def path(self) -> str:
        """Under which other processes of the same user can open the arena while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def taken(self) -> bool:
        """Whether an importer has all that it wanted."""
        return os.pread(self.file, 1, self.at + _TAKEN_AT) == b"\1"

    def add(self, pages: Sequence[memoryview]) -> None:
        """Copies the next pages in, and says that they are ready. Raises OSError."""
        contents, first = self.contents, self.ready
        write_all(self.file, pages, self.at + contents.page_at(first))
        sums = b"".join(page_sum(page).to_bytes(8, "little") for page in pages)
        self._write(sums, contents.sums_at + 8 * first)
        self.ready += len(pages)
        if self.ready == contents.pages:
            self._write(_COMPLETE.pack(time.monotonic()), _COMPLETE_AT)
        self._say("open")

    def end(self, token: int | None) -> bool:
        """Nothing more comes. True: all pages are there, and with a ``token`` whoever has them may go on
        behind it. Raises OSError."""
        whole = self.ready == self.contents.pages
        if whole and token is not None:
            self._write(_TOKEN.pack(token + 1), _TOKEN_AT)
        self._say("complete" if whole else "failed")
        return whole

    def close(self) -> None:
        """Gives the memory back. Who still reads it finds that the generation is gone."""
        self._write(bytes(_HEAD.size), 0)
        self._arena.give(self.at)

    def _say(self, state: State) -> None:
        self._write(_READY.pack(self.ready, _STATES.index(state)), _READY_AT)

    def _write(self, data: bytes, at: int) -> None:
        os.pwrite(self.file, data, self.at + at)


class Reach(Protocol):
    """How an importer gets at the memory of a region. Offsets count from the region's beginning. Raises
    TransferError, OSError."""

    def get(self, at: int, count: int) -> bytes:
        """Bytes of it; fewer where it ends."""
        ...

    def fill(self, at: int, views: Sequence[memoryview]) -> int:
        """Copies bytes of it into the views; returns how many of these are full."""
        ...

    def put(self, at: int, data: bytes) -> None:
        """Writes."""
        ...


class FileReach:
    """A region in a file that is open here; see `Reach`. ``at``: where it begins."""

    def __init__(self, file: int, at: int) -> None:
        self.file = file
        self.at = at

    def get(self, at: int, count: int) -> bytes:
        """See `Reach`."""
        return os.pread(self.file, count, self.at + at)

    def fill(self, at: int, views: Sequence[memoryview]) -> int:
        """See `Reach`."""
        return read_all(self.file, views, self.at + at)

    def put(self, at: int, data: bytes) -> None:
        """See `Reach`."""
        os.pwrite(self.file, data, self.at + at)


class Mapped:
    """The importer's side of a region."""

    def __init__(self, reach: Reach) -> None:
        """Raises TransferError if this is none."""
        self._reach = reach
        head = reach.get(0, _HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise TransferError("the exporter has given the region up, or it never was one", "gone")
        _, named, spaced, tokens, pages, page_bytes, self._generation, _, _ = _HEAD.unpack(head)
        if max(named, spaced) > _MOST_NAME or tokens > _MOST_TOKENS:
            raise TransferError("the head of the region is none")
        names = reach.get(_NAMES_AT, named + spaced)
        self.contents = Contents(
            identity=names[:named].decode(errors="replace"),
            namespace=names[named:],
            tokens=reach.get(_NAMES_AT + named + spaced, 4 * tokens),
            pages=pages,
            page_bytes=page_bytes,
        )
        if len(self.contents.tokens) < 4 * tokens:
            raise TransferError("the region is cut short")
        self.progress()

    def progress(self) -> tuple[int, State]:
        """Pages that are ready, and how it stands. Raises TransferError if the region holds something else by
        now."""
        head = self._reach.get(0, _HEAD.size)
        *_, generation, ready, state = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
        if generation != self._generation:
            raise TransferError("the exporter has given the region up", "gone")
        return ready, _STATES[min(state, len(_STATES) - 1)]

    def complete_at(self) -> float:
        """When its last page was ready, by the monotonic clock of the exporter's machine; 0: it is not.
        Raises TransferError as `progress` does."""
        (when,) = _COMPLETE.unpack(self._get(_COMPLETE_AT, _COMPLETE.size))
        return float(when)

    def token(self) -> int | None:
        """Of a complete region: the token to go on behind, if there is one. Raises TransferError as
        `progress` does."""
        (token,) = _TOKEN.unpack(self._get(_TOKEN_AT, _TOKEN.size))
        return int(token) - 1 if token else None

    def sums(self, first: int, count: int) -> bytes:
        """Checksums of ready pages. Raises TransferError as `progress` does."""
        return self._get(self.contents.sums_at + 8 * first, 8 * count)

    def read(self, first: int, pages: Sequence[memoryview]) -> int:
        """Copies ready pages out; returns how many, from the first on, are what was put in. Raises
        TransferError as `progress` does."""
        whole = self._reach.fill(self.contents.page_at(first), pages)
        return right(pages[:whole], self.sums(first, len(pages)))

    def take(self) -> None:
        """Tells the exporter that the region is needed no more. Raises TransferError as `progress` does."""
        self.progress()
        self._reach.put(_TAKEN_AT, b"\1")

    def _get(self, at: int, count: int) -> bytes:
        """Bytes of this region, and not of what its memory holds after it."""
        found = self._reach.get(at, count)
        self.progress()
        return found


def right(pages: Sequence[memoryview], sums: bytes) -> int:
    """How many pages, from the first on, have their checksum."""
    for i, page in enumerate(pages):
        if page_sum(page).to_bytes(8, "little") != sums[8 * i : 8 * i + 8]:
            return i
    return len(pages)
