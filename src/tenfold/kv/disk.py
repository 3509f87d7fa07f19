"""The disk tier's folder: segments of several processes side by side, an index of their pages, and its bound.

::

    DIR/lock                       held for a moment by whoever begins a segment and makes room for it
    DIR/IDENTITY/NUMBER.kv         a segment (`tenfold.kv.segment`); its writer holds a lock on it while it
    grows

A segment has its full length from the start (a hole), so that all files together are never more than the tier
may have, however many processes write; what is more than that, left by a tier that might have more, goes
when the next is opened. A segment is cut to what it holds when it is full, when its process ends in order,
or, after a crash, by whoever opens the tier next. Room is made by deleting the segments unused for longest,
of whatever identity, that nobody writes: those who still read one keep it open.

No file is trusted: what is torn, cut, overwritten or gone is a miss. Nothing is flushed to the device: what a
crash of the system takes is found missing by its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tenfold.checkpoint.regular import descriptor
from tenfold.folders import make_private
from tenfold.kv.segment import (
    MOST_PAGES,
    Run,
    page_sum,
    read_head,
    read_pages,
    write_head,
    write_pages,
)

SEGMENT_BYTES = 256 << 20
"""Of a segment, at most."""
SEGMENTS = 32
"""Segments that a tier has room for, at least: one of them is what is deleted at a time."""
MOST_BYTES = 32 << 30
"""Of a tier whose size is not given."""
TOUCH_S = 10.0
"""A segment that is read is marked as used no more often than this."""
_MAKE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def default_disk_bytes(root: Path) -> int:
    """A quarter of what is free where ``root`` is or would be, what the tier has already counted as free,
    but no more than `MOST_BYTES`. 0 where that cannot be told."""
    there = root
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        own = sum(path.stat().st_size for path in root.glob("*/*.kv"))
    except OSError:
        return 0
    return min(MOST_BYTES, (free + own) // 4)


def least_disk_bytes(page_bytes: int, max_context: int) -> int:
    """What a tier must have so that each of its segments holds at least two pages of any chain."""
    return SEGMENTS * (2 * page_bytes + 4 * max_context + 8192)


class NoRoom(OSError):
    """All of the tier is taken by segments that others write."""


class Segment:
    """An open segment, and how much of it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seed = int(path.stem, 16)
        self.file = descriptor(path, os.O_RDONLY)
        self.known = 0
        """Bytes whose runs are in the index."""
        self.keys: set[int] = set()
        self.touched = 0.0

    def close(self) -> None:
        """Gives the file back; a late reader gets an error."""
        file, self.file = self.file, -1
        os.close(file)

    def touch(self) -> None:
        """Marks it as used."""
        now = time.monotonic()
        if now >= self.touched + TOUCH_S:
            self.touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


class Place(NamedTuple):
    """Where a page lies."""

    segment: Segment
    offset: int
    """Of its run."""
    place: int
    """Its number in the run."""


class DiskTier:
    """Pages of one identity in a folder that other processes use too.

    ``find`` is for the engine's thread. `refresh` and `read` are for one reading thread, `append` for one
    writing thread, `close` when both have ended. Opening never fails: a folder that cannot be used shows in
    the errors of the other calls. It deletes what is more than ``size_bytes``, but for what others write.
    """

    def __init__(self, root: Path, identity: str, page_bytes: int, size_bytes: int) -> None:
        self.root = root
        self.folder = root / identity
        self.page_bytes = page_bytes
        self.size_bytes = size_bytes
        self.segment_bytes = min(SEGMENT_BYTES, size_bytes // SEGMENTS)
        self._places: dict[int, Place] = {}
        self._others: dict[int, list[Place]] = {}
        """Further places of pages that were stored more than once, by other processes or earlier ones: which
        of them is damaged shows when it is read."""
        self._segments: dict[str, Segment] = {}
        self._lock = threading.Lock()
        """Guards the index."""
        self._own: Path | None = None
        self._own_file = -1
        self._end = 0
        self.corrupt = 0
        """Reads that found something torn or overwritten."""
        self._dropped: list[int] = []
        with contextlib.suppress(OSError):
            if root.is_dir() and self.used_bytes() > size_bytes:
                with self._alone():
                    self._shrink(size_bytes)

    @property
    def pages(self) -> int:
        """Pages in the index."""
        return len(self._places)

    def run_pages(self, tokens: int) -> int:
        """How many pages a run may have in whose chain there are so many tokens; 0: none fits."""
        room = self.segment_bytes - 4 * tokens - 4096
        return max(0, min(MOST_PAGES, room // (self.page_bytes + 16)))

    def find(self, key: int) -> Place | None:
        """Where a page with this key lies, as far as is known."""
        return self._places.get(key)

    def take_dropped(self) -> list[int]:
        """Keys of pages whose files are gone since this was asked last."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def refresh(self) -> None:
        """Takes in what other processes have written and deleted. Raises OSError."""
        try:
            names = {entry.name for entry in os.scandir(self.folder) if entry.name.endswith(".kv")}
        except FileNotFoundError:
            names = set()
        with self._lock:
            gone = self._segments.keys() - names
        for name in gone:
            self._drop(name)
        own = self._own
        for name in names:
            if own is not None and name == own.name:
                continue  # what we write ourselves is taken in when it is written
            segment = self._segments.get(name)
            try:
                if segment is None:
                    segment = Segment(self.folder / name)
                    with self._lock:
                        self._segments[name] = segment
                self._scan(segment)
            except (OSError, ValueError):  # deleted meanwhile, or not one of ours
                continue

    def read(
        self, found: Sequence[Place], namespace: bytes, tokens: bytes, pages: Sequence[memoryview]
    ) -> int:
        """Fills ``pages`` from consecutive places of one run; returns how many, from the first on, are right.
        Raises OSError.

        ``tokens`` are the chain's, from its beginning: a page that holds others has the right key by chance.
        """
        segment, offset, place = found[0]
        size = os.fstat(segment.file).st_size
        run = read_head(segment.file, offset, size, self.page_bytes, segment.seed)
        if run is None or place + len(found) > len(run.keys):
            self.corrupt += 1
            return 0
        if not run.holds(place + len(found) - 1, namespace, tokens):
            return 0
        good = read_pages(segment.file, run, place, pages, self.page_bytes)
        self.corrupt += good < len(pages)
        segment.touch()
        return good

    def forget(self, found: Sequence[Place]) -> None:
        """Takes places out of the index that turned out to hold something else; where a page lies elsewhere
        too, it is found there from now on."""
        gone = set(found)
        with self._lock:
            for key in [key for key, place in self._places.items() if place in gone]:
                self._remove(key)

    def append(
        self,
        namespace: bytes,
        tokens: bytes,
        first: int,
        keys: Sequence[int],
        pages: Sequence[memoryview],
        unchanged: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Stores consecutive pages of a chain, the first its number ``first``; ``tokens`` are the chain's up
        to their end. False, and nothing is stored, if the pages are not ``unchanged`` when they have been
        read. Raises OSError, NoRoom among them; nothing is stored then either."""
        sums = tuple(page_sum(page) for page in pages)
        run = Run(
            offset=self._end, first=first, namespace=namespace, tokens=tokens, keys=tuple(keys), sums=sums
        )
        if self._own is not None and not os.fstat(self._own_file).st_nlink:
            self._seal()
            raise FileNotFoundError(f"{self.folder} was deleted under the tier")
        if self._own is None or run.end(self.page_bytes) > self.segment_bytes:
            self._seal()
            run = replace(run, offset=0)
            if run.end(self.page_bytes) > self.segment_bytes:
                raise NoRoom(f"{run.end(self.page_bytes)} bytes do not fit a segment of {self.segment_bytes}")
            self._begin()
        assert self._own is not None
        seed = int(self._own.stem, 16)
        write_pages(self._own_file, run, pages)
        if not unchanged():
            return False
        write_head(self._own_file, run, seed)
        self._end = run.end(self.page_bytes)
        if (segment := self._segments.get(self._own.name)) is not None:
            self._enter(segment, run)
        return True

    def close(self) -> None:
        """Gives all files back."""
        with contextlib.suppress(OSError):
            self._seal()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._places.clear()
        self._others.clear()

    def used_bytes(self) -> int:
        """Bytes of all files, as they count against the bound."""
        return sum(size for _, size, _ in self._files())

    def _scan(self, segment: Segment) -> None:
        """Takes in the runs that were added to a segment, and cuts off what a crash left behind."""
        size = os.fstat(segment.file).st_size
        at = segment.known
        while (run := read_head(segment.file, at, size, self.page_bytes, segment.seed)) is not None:
            self._enter(segment, run)
            at = run.end(self.page_bytes)
        if at < size:
            self._cut(segment)

    def _enter(self, segment: Segment, run: Run) -> None:
        """Puts a run into the index."""
        with self._lock:
            for number, key in enumerate(run.keys):
                place = Place(segment, run.offset, number)
                before = self._places.get(key)
                if before is not None and before != place:
                    self._others.setdefault(key, []).append(before)
                self._places[key] = place
            segment.keys.update(run.keys)
            segment.known = run.end(self.page_bytes)

    def _cut(self, segment: Segment) -> None:
        with contextlib.suppress(OSError), _opened(segment.path) as file:
            if _locked(file):
                size = os.fstat(file).st_size
                if read_head(file, segment.known, size, self.page_bytes, segment.seed) is None:
                    os.ftruncate(file, segment.known)
                    if not segment.known:
                        segment.path.unlink()

    def _drop(self, name: str) -> None:
        """Forgets a segment that was deleted."""
        with self._lock:
            segment = self._segments.pop(name)
            for key in segment.keys:
                if key in self._others:
                    self._others[key] = [place for place in self._others[key] if place.segment is not segment]
                if (place := self._places.get(key)) is not None and place.segment is segment:
                    self._remove(key)
                    if key not in self._places:
                        self._dropped.append(key)
        segment.close()

    def _remove(self, key: int) -> None:
        """The place of a page is gone; the next one, if there is one, takes its place."""
        if others := self._others.get(key):
            self._places[key] = others.pop()
        else:
            del self._places[key]
            self._others.pop(key, None)

    def _begin(self) -> None:
        """A new segment of our own."""
        make_private(self.folder)
        with self._alone():
            if self._shrink(self.size_bytes - self.segment_bytes) + self.segment_bytes > self.size_bytes:
                raise NoRoom(f"all of {self.root} is being written by other processes; give it a larger size")
            path = self.folder / f"{int.from_bytes(os.urandom(8), 'little'):016x}.kv"
            file = os.open(path, _MAKE | os.O_EXCL, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(file, self.segment_bytes)
            except OSError:
                os.close(file)
                raise
        with self._lock:
            if path.name not in self._segments:
                self._segments[path.name] = Segment(path)
            self._own, self._own_file, self._end = path, file, 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process makes room. Raises OSError."""
        lock = os.open(self.root / "lock", _MAKE, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _shrink(self, most_bytes: int) -> int:
        """Deletes segments that nobody writes until all are no more than so many bytes; returns how many they
        are."""
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used <= most_bytes:
                break
            with contextlib.suppress(OSError), _opened(path) as file:
                if _locked(file):
                    path.unlink()
                    used -= size
        return used

    def _files(self) -> list[tuple[float, int, Path]]:
        """Every segment: when it was used last, its size, its path."""
        files = []
        for path in self.root.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        return files

    def _seal(self) -> None:
        if self._own is None:
            return
        file, self._own, self._own_file = self._own_file, None, -1
        try:
            os.ftruncate(file, self._end)
        finally:
            os.close(file)
            self._end = 0


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = descriptor(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    """Whether nobody writes the segment; then nobody does until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
