"""One engine for calls from several threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tenfold.protocol import Chunk, Request
from tenfold.worker.loop import EngineLike

Inbox = deque[Chunk]
"""News of a call's requests that the call has not read yet."""


class GenerationError(RuntimeError):
    """The engine gave a request up, or cannot be used in this process."""


class SharedEngine:
    """Lets calls from several threads share steps: a step serves them all, whichever thread makes it.

    A call gives its requests to `add`, asks `next` for news until all have ended, and calls `leave` on every
    way out. The engine is held for no longer than a step. Raises ValueError when it is closed,
    GenerationError in a forked child.
    """

    def __init__(self, engine: EngineLike) -> None:
        self._engine: EngineLike | None = engine
        self._process = os.getpid()
        self._lock = threading.Lock()
        """Held by the thread that uses the engine."""
        self._door = threading.Lock()
        """Held by the thread that is next to use it: whoever made a step cannot overtake it."""
        self._inboxes: dict[str, Inbox] = {}
        """Of the requests under way, by id. Guarded by ``_lock``."""
        self._left: deque[tuple[str, int | None]] = deque()
        """Requests that nobody waits for any more, and how many tokens of each are its answer."""

    def add(self, requests: Iterable[Request], inbox: Inbox) -> None:
        """Begins the requests; their news go to ``inbox``. Raises RequestError at the first that is refused;
        those before it stay until they are left."""
        with self._turn() as engine:
            for request in requests:
                engine.add(request)
                self._inboxes[request.id] = inbox

    def next(self, inbox: Inbox) -> Chunk:
        """The next news of a call that has requests under way; makes steps if there are none yet."""
        while not inbox:
            with self._turn() as engine:
                if not inbox:  # else another call's step brought some while this one waited
                    for chunk in engine.step():
                        self._hand_out(chunk)
        self._check()
        return inbox.popleft()

    def leave(self, ids: Iterable[str], keep: int | None = None) -> None:
        """Aborts what is still under way of ``ids``; ``keep``: see `tenfold.protocol.Abort`.

        Never waits, as the garbage collector may drop a stream amid a step of the same thread: then the
        requests are aborted when that step is over.
        """
        self._left.extend((id, keep) for id in ids)
        self._sweep()

    def close(self) -> None:
        """Frees the engine, after the step that is being made. Calls under way fail."""
        if os.getpid() != self._process:  # the lock may be that of a thread that is not in this process
            self._engine = None
            return
        with self._door:
            self._lock.acquire()
        try:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._inboxes.clear()
        finally:
            self._lock.release()

    @contextmanager
    def _turn(self) -> Iterator[EngineLike]:
        self._check()
        with self._door:
            self._lock.acquire()
        try:
            yield self._check()
        finally:
            self._lock.release()
            self._sweep()

    def _check(self) -> EngineLike:
        engine = self._engine
        if engine is None:
            raise ValueError("this LLM is closed")
        if os.getpid() != self._process:
            raise GenerationError(
                "this LLM belongs to the process that made it, and its threads do not survive a fork; make a "
                "new LLM in the child"
            )
        return engine

    def _hand_out(self, chunk: Chunk) -> None:
        inbox = self._inboxes.get(chunk.id)
        if inbox is None:  # the farewell of a request that was left
            return
        inbox.append(chunk)
        if chunk.finish is not None:
            del self._inboxes[chunk.id]

    def _sweep(self) -> None:
        """Aborts what was left. Whoever holds the lock meanwhile sweeps when it is released."""
        while self._left and os.getpid() == self._process and self._lock.acquire(blocking=False):
            try:
                engine = self._engine
                while self._left:
                    id, keep = self._left.popleft()
                    if engine is not None and self._inboxes.pop(id, None) is not None:
                        engine.abort(id, keep)
                while engine is not None and engine.has_work and not self._inboxes:
                    engine.step()  # nothing but farewells
            finally:
                self._lock.release()
