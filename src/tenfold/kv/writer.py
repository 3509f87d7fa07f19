"""The thread that writes pages to the disk tier.

It reads them where they lie and owns none: a ready page does not change until it is evicted, and the engine's
thread says so (`Writing.lost`) before the page is used again. So what was lost while it was being written is
known before the head is written that would make it count.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from tenfold.kv.disk import DiskTier
from tenfold.kv.prefix import Node
from tenfold.kv.segment import token_bytes

NICE = 19
"""Niceness of the thread: whoever computes comes first."""


class Writing:
    """Consecutive pages of a chain that are being written."""

    def __init__(self, nodes: Sequence[Node], views: Sequence[memoryview]) -> None:
        self.nodes = nodes
        self.views = views
        self.lost = False
        """One of the pages was evicted: set by the engine's thread."""
        self.began = time.monotonic()
        self.error: OSError | None = None
        self.stored = False
        self.over = False


class Writer:
    """Writes one run at a time; `start` the next when the last is over. For the engine's thread."""

    def __init__(self, disk: DiskTier, news: threading.Event) -> None:
        self._disk = disk
        self._news = news
        self._lock = threading.Condition()
        self._next: Writing | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def start(self, writing: Writing) -> None:
        """Has a run written."""
        with self._lock:
            self._next = writing
            self._lock.notify()

    def close(self, wait_s: float) -> bool:
        """Stops the thread after the run that it is at; False if it does not come back."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no niceness of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._lock:
                while self._next is None and not self._stopping:
                    self._lock.wait()
                if self._next is None:
                    return
                writing, self._next = self._next, None
            try:
                writing.stored = self._write(writing)
            except OSError as error:
                writing.error = error
            finally:
                writing.over = True
                self._news.set()

    def _write(self, writing: Writing) -> bool:
        chain: list[int] = []
        parts = []
        node: Node | str = writing.nodes[-1]
        while isinstance(node, Node):
            parts.append(node.tokens)
            node = node.parent
        for tokens in reversed(parts):
            chain += tokens
        return self._disk.append(
            node.encode(),
            token_bytes(chain),
            len(parts) - len(writing.nodes),
            [each.key for each in writing.nodes],
            writing.views,
            lambda: not writing.lost,
        )
