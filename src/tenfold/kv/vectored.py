"""Pages to and from a file, several in a call, until all have gone: a call may move fewer bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence


def write_all(file: int, pages: Sequence[memoryview], offset: int) -> None:
    """Writes buffers one after another. Raises OSError."""
    buffers = list(pages)
    while buffers:
        written = os.pwritev(file, buffers, offset)
        offset += written
        _drop(buffers, written)


def read_all(file: int, pages: Sequence[memoryview], offset: int) -> int:
    """Fills buffers one after another; returns how many were filled before the file ended. Raises OSError."""
    buffers = list(pages)
    while buffers:
        read = os.preadv(file, buffers, offset)
        if not read:
            break
        offset += read
        _drop(buffers, read)
    return len(pages) - len(buffers)


def _drop(buffers: list[memoryview], count: int) -> None:
    """Takes the first ``count`` bytes away."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
