"""Segment files: runs of KV pages on disk, each of which says what it holds and whether it is whole.

A segment is written by one process, run after run, and never changed; its name is a random number, which
seeds its checksums, so that nothing of an earlier file that stood on the same blocks is ever taken for its
own. A run is up to `MOST_PAGES` consecutive pages of one chain::

      head                                                      payload
      +-------+-----------+--------+------+------+----------+---+--------+--------+-- ...
      | fixed | namespace | tokens | keys | sums | checksum |pad| page 0 | page 1 |
      +-------+-----------+--------+------+------+----------+---+--------+--------+-- ...

``tokens`` are all tokens of the chain from its beginning to the run's end, so that what a page holds is known
from its run alone: a reader compares them. ``keys`` are the pages' keys in the prefix index, ``sums``
XXH3-64 of each page. The payload is written first and the head last, so a head that is whole stands before
pages that were handed to the system; what a crash tore has no head, or a page without its sum. All numbers
are little-endian.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from struct import Struct

import msgspec
import numpy as np
import xxhash

from tenfold.backends.base import PAGE_ROWS
from tenfold.kv.vectored import read_all, write_all

MOST_PAGES = 32
"""Of a run."""
_MAGIC = b"TFKVRUN\x01"
_FIXED = Struct("<8sIIII")
"""Magic, pages, index of the first in its chain, bytes of the namespace, bytes of the head with its pad."""
_SUM = Struct("<Q")
_ALIGN = 64
_MOST_HEAD = 256 << 20
_FIRST_READ = 8192


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive pages of a chain, somewhere in a segment."""

    offset: int
    first: int
    """Index of the first page in its chain."""
    namespace: bytes
    tokens: bytes
    """Of the chain up to the run's end, as 32-bit numbers."""
    keys: tuple[int, ...]
    sums: tuple[int, ...]

    @property
    def head_bytes(self) -> int:
        """The head with its pad."""
        pages = len(self.keys)
        size = _FIXED.size + len(self.namespace) + len(self.tokens) + 16 * pages + _SUM.size
        return -(-size // _ALIGN) * _ALIGN

    def page_offset(self, place: int, page_bytes: int) -> int:
        """Where the run's page number ``place`` begins in the segment."""
        return self.offset + self.head_bytes + place * page_bytes

    def end(self, page_bytes: int) -> int:
        """Where the next run begins."""
        return self.page_offset(len(self.keys), page_bytes)

    def holds(self, place: int, namespace: bytes, tokens: bytes) -> bool:
        """Whether page ``place`` comes after, and is made of, exactly the first of ``tokens`` (32-bit
        numbers)."""
        size = 4 * PAGE_ROWS * (self.first + place + 1)
        return self.namespace == namespace and len(tokens) >= size and self.tokens[:size] == tokens[:size]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as a run has them."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def page_sum(page: memoryview) -> int:
    """A page's checksum: XXH3-64."""
    return xxhash.xxh3_64_intdigest(page)


def head_of(run: Run, seed: int) -> bytes:
    """The bytes of a run's head."""
    pages = len(run.keys)
    body = b"".join(
        (
            _FIXED.pack(_MAGIC, pages, run.first, len(run.namespace), run.head_bytes),
            run.namespace,
            run.tokens,
            np.array(run.keys, "<i8").tobytes(),
            np.array(run.sums, "<u8").tobytes(),
        )
    )
    body += _SUM.pack(xxhash.xxh3_64_intdigest(body, seed ^ run.offset))
    return body.ljust(run.head_bytes, b"\0")


def read_head(file: int, offset: int, size: int, page_bytes: int, seed: int) -> Run | None:
    """The run at ``offset`` of a segment of ``size`` bytes; None if none stands there that is whole. Raises
    OSError."""
    data = os.pread(file, min(_FIRST_READ, size - offset), offset) if offset < size else b""
    if len(data) < _FIXED.size:
        return None
    magic, pages, first, named, head_bytes = _FIXED.unpack_from(data)
    at = _FIXED.size + named
    length = at + 4 * PAGE_ROWS * (first + pages) + 16 * pages
    if magic != _MAGIC or not 1 <= pages <= MOST_PAGES or head_bytes > _MOST_HEAD:
        return None
    if length + _SUM.size > head_bytes or offset + head_bytes + pages * page_bytes > size:
        return None
    if len(data) < head_bytes:
        data += os.pread(file, head_bytes - len(data), offset + len(data))
    if len(data) < length + _SUM.size:
        return None
    if _SUM.unpack_from(data, length)[0] != xxhash.xxh3_64_intdigest(data[:length], seed ^ offset):
        return None
    sums = np.frombuffer(data, "<u8", pages, length - 8 * pages)
    run = Run(
        offset=offset,
        first=first,
        namespace=data[_FIXED.size : at],
        tokens=data[at : length - 16 * pages],
        keys=tuple(np.frombuffer(data, "<i8", pages, length - 16 * pages).tolist()),
        sums=tuple(sums.tolist()),
    )
    return run if run.head_bytes == head_bytes else None


def write_pages(file: int, run: Run, pages: Sequence[memoryview]) -> None:
    """Writes a run's pages; the run is not there before its head is. Raises OSError."""
    write_all(file, pages, run.offset + run.head_bytes)


def write_head(file: int, run: Run, seed: int) -> None:
    """Writes a run's head, after its pages. Raises OSError."""
    head = memoryview(head_of(run, seed))
    while head:
        head = head[os.pwrite(file, head, run.offset + run.head_bytes - len(head)) :]


def read_pages(file: int, run: Run, place: int, pages: Sequence[memoryview], page_bytes: int) -> int:
    """Reads consecutive pages of a run, the first its number ``place``; returns how many of them, from the
    first on, are what was written. Raises OSError."""
    whole = read_all(file, pages, run.page_offset(place, page_bytes))
    for i in range(whole):
        if page_sum(pages[i]) != run.sums[place + i]:
            return i
    return whole
