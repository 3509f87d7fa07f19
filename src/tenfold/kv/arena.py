"""The memory of all regions (`tenfold.kv.region`) that an engine exports: one stretch, at one place from the
engine's start to its end.

So whoever reads it from elsewhere (NIXL, which registers memory once and then reads past its owner) can come
late and find other pages there, but never no memory. Memory is taken from the system when it is first
written, and kept: what is there already is filled three times as fast. It is a memfd: it has no name that
could be left behind, and is gone with the last process that has it open.
"""

from __future__ import annotations

import os

STEP = 4096
"""Stretches begin and end at multiples of it."""


class Arena:
    """Owns the memory, and knows which of it is lent. First fit: memory that has been used is used again."""

    def __init__(self, size: int) -> None:
        """``size``: bytes. Raises OSError."""
        self.size = _rounded(size)
        self.file = os.memfd_create("tenfold-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.size)
        self._lent: dict[int, int] = {}
        """Where stretches end, by where they begin; in this order."""

    @property
    def used(self) -> int:
        """Bytes that are lent."""
        return sum(end - at for at, end in self._lent.items())

    def take(self, size: int) -> int | None:
        """Where so many bytes are lent from now on; None: there is no room."""
        size, at = _rounded(size), 0
        for began, end in self._lent.items():
            if began - at >= size:
                break
            at = end
        if at + size > self.size:
            return None
        self._lent = dict(sorted([*self._lent.items(), (at, at + size)]))
        return at

    def give(self, at: int) -> None:
        """A stretch is lent no more."""
        del self._lent[at]

    def close(self) -> None:
        """Gives the memory back, if no one else has it open."""
        os.close(self.file)


def _rounded(size: int) -> int:
    return -(-size // STEP) * STEP
