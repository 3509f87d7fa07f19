"""A file mapped for reading, whose pages can be let go."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import open_regular

_LARGEST_FOLIO = 2 << 20


class MappedFile:
    """A read-only mapping of a whole file. Views of it keep it alive; `close` only drops this object's hold.

    A file that another process truncates while it is mapped ends this process (SIGBUS), as with any mapping.
    """

    def __init__(self, path: str) -> None:
        """Raises CheckpointError if ``path`` is not a readable file with something in it."""
        self.path = path
        try:
            with open_regular(path) as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    # Those that a system makes up as they are read (/proc, /sys) have no size.
                    what = (
                        "the file is empty" if not file.read(1) else "not a file on a disk, so it has no size"
                    )
                    raise CheckpointError(f"{path}: {what}; a model is a GGUF file or a folder")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.size = len(self._bytes)

    @property
    def map(self) -> mmap.mmap:
        """The mapping itself: slices of it are copies."""
        return self._map

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes in place, not copied. The caller has checked that they are within the file."""
        if self._bytes is None:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        return self._bytes[offset : offset + length]

    def prefetch(self, offset: int, length: int) -> None:
        """Asks the system to read these bytes soon."""
        self._advise("MADV_WILLNEED", offset, length)

    def release(self, offset: int, length: int) -> None:
        """Lets go of the memory behind these bytes and around them; reading it again brings it back."""
        # One page fault may map a whole large folio, so what was let go before may be mapped again.
        start = max(0, offset - _LARGEST_FOLIO)
        self._advise("MADV_DONTNEED", start, offset + length - start)

    def _advise(self, advice: str, offset: int, length: int) -> None:
        # Not every system has madvise; without it nothing but memory is lost.
        option = getattr(mmap, advice, None)
        start = offset - offset % mmap.PAGESIZE
        end = min(offset + length, self.size)
        if option is not None and end > start and self._bytes is not None:
            self._map.madvise(option, start, end - start)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last view where there still is one."""
        self._bytes = None
        with contextlib.suppress(BufferError):
            self._map.close()
