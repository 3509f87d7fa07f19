"""A stretch of memory that other processes may open, with the pages of one prompt in it, in the order of its
chain.

::

      0            64                     tokens_at          sums_at         pages_at
      +------------+----------------------+------------------+---------------+--------+--------+--
      | head       | identity, namespace  | tokens           | sums          | page 0 | page 1 |
      +------------+----------------------+------------------+---------------+--------+--------+--

The exporter writes a page and its sum, then counts it as ready in the head; an importer reads no page
before. When all are there and the exporter's first token is drawn, that goes into the head too, and the
region is complete. The memory is a memfd: it has no name that could be left behind, and is gone with the last
process that has it open. Both sides read and write it by system calls, so that a region cut short is an error
and not a signal.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from struct import Struct
from typing import Literal

import msgspec

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


Fallback = Literal["gone", "late", "checksum", "foreign", "broken"]
"""Why pages did not come; see `tenfold.protocol.TransferCounts`."""


class TransferError(Exception):
    """Pages did not come: whoever waited for them computes them."""

    def __init__(self, message: str, reason: Fallback = "broken") -> None:
        super().__init__(message)
        self.reason = reason


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
    """The exporter's side. Owns the memory."""

    def __init__(self, contents: Contents, capacity: int = 0) -> None:
        """``capacity``: bytes, if it is to be renewed for more than ``contents``; memory is taken as it is
        written. Raises OSError."""
        self.capacity = max(capacity, contents.size)
        self.file = os.memfd_create("tenfold-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, self.capacity)
            self.renew(contents)
        except OSError:
            os.close(self.file)
            raise

    def renew(self, contents: Contents) -> None:
        """Holds something else from now on, of at most ``capacity`` bytes: memory that is there already takes
        half the time to fill. Who still reads what it held finds the new generation. Raises OSError."""
        self.contents = contents
        self.ready = 0
        identity = contents.identity.encode()
        head = _HEAD.pack(
            _MAGIC,
            len(identity),
            len(contents.namespace),
            len(contents.tokens) // 4,
            contents.pages,
            contents.page_bytes,
            secrets.randbits(64),
            0,
            0,
        )
        os.pwrite(self.file, head.ljust(_NAMES_AT, b"\0") + identity + contents.namespace, 0)
        os.pwrite(self.file, contents.tokens, contents.tokens_at)

    @property
    def path(self) -> str:
        """Under which other processes of the same user can open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def taken(self) -> bool:
        """Whether an importer has all that it wanted."""
        return os.pread(self.file, 1, _TAKEN_AT) == b"\1"

    def add(self, pages: Sequence[memoryview]) -> None:
        """Copies the next pages in, and says that they are ready. Raises OSError."""
        contents, first = self.contents, self.ready
        write_all(self.file, pages, contents.page_at(first))
        sums = b"".join(page_sum(page).to_bytes(8, "little") for page in pages)
        os.pwrite(self.file, sums, contents.sums_at + 8 * first)
        self.ready += len(pages)
        if self.ready == contents.pages:
            os.pwrite(self.file, _COMPLETE.pack(time.monotonic()), _COMPLETE_AT)
        self._say("open")

    def end(self, token: int | None) -> bool:
        """Nothing more comes. True: all pages are there, and with a ``token`` whoever has them may go on
        behind it. Raises OSError."""
        whole = self.ready == self.contents.pages
        if whole and token is not None:
            os.pwrite(self.file, _TOKEN.pack(token + 1), _TOKEN_AT)
        self._say("complete" if whole else "failed")
        return whole

    def _say(self, state: State) -> None:
        os.pwrite(self.file, _READY.pack(self.ready, _STATES.index(state)), _READY_AT)

    def close(self) -> None:
        """Gives the memory back; importers that have it open keep it."""
        os.close(self.file)


class Mapped:
    """The importer's side of a region that it opened. Owns ``file``."""

    def __init__(self, file: int) -> None:
        """Raises TransferError if this is none."""
        self.file = file
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise TransferError("what the handoff names is no region of pages")
        _, named, spaced, tokens, pages, page_bytes, self._generation, _, _ = _HEAD.unpack(head)
        names = os.pread(file, named + spaced, _NAMES_AT)
        at = _NAMES_AT + named + spaced
        self.contents = Contents(
            identity=names[:named].decode(errors="replace"),
            namespace=names[named:],
            tokens=os.pread(file, 4 * tokens, at),
            pages=pages,
            page_bytes=page_bytes,
        )
        if os.fstat(file).st_size < self.contents.size:
            raise TransferError("the region is cut short")

    def progress(self) -> tuple[int, State]:
        """Pages that are ready, and how it stands. Raises TransferError if the region holds something else by
        now."""
        *_, generation, ready, state = _HEAD.unpack(os.pread(self.file, _HEAD.size, 0))
        if generation != self._generation:
            raise TransferError("the exporter has given the region up", "gone")
        return ready, _STATES[min(state, len(_STATES) - 1)]

    @property
    def complete_at(self) -> float:
        """When its last page was ready, by the monotonic clock of the exporter's machine; 0: it is not."""
        (when,) = _COMPLETE.unpack(os.pread(self.file, _COMPLETE.size, _COMPLETE_AT))
        return float(when)

    @property
    def token(self) -> int | None:
        """Of a complete region: the token to go on behind, if there is one."""
        (token,) = _TOKEN.unpack(os.pread(self.file, _TOKEN.size, _TOKEN_AT))
        return int(token) - 1 if token else None

    def sums(self, first: int, count: int) -> bytes:
        """Checksums of pages."""
        return os.pread(self.file, 8 * count, self.contents.sums_at + 8 * first)

    def read(self, first: int, pages: Sequence[memoryview]) -> int:
        """Copies ready pages out; returns how many, from the first on, are what was put in. Raises
        TransferError as `progress` does."""
        whole = read_all(self.file, pages, self.contents.page_at(first))
        good = right(pages[:whole], self.sums(first, len(pages)))
        self.progress()
        return good

    def take(self) -> None:
        """Tells the exporter that the region is needed no more."""
        os.pwrite(self.file, b"\1", _TAKEN_AT)

    def close(self) -> None:
        """Gives the file back."""
        os.close(self.file)


def right(pages: Sequence[memoryview], sums: bytes) -> int:
    """How many pages, from the first on, have their checksum."""
    for i, page in enumerate(pages):
        if page_sum(page).to_bytes(8, "little") != sums[8 * i : 8 * i + 8]:
            return i
    return len(pages)
