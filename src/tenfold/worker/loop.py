"""The worker's loop: take what has arrived, make a step, tell the front."""

from __future__ import annotations

import time
from typing import Protocol

from tenfold.limits import BeyondMemory, RequestError
from tenfold.protocol import (
    Abort,
    Chunk,
    Chunks,
    Fetch,
    FrontMessage,
    Generate,
    KVEvents,
    KVSnapshot,
    LoadSnapshot,
    Pages,
    Refused,
    Request,
    Resync,
    Shutdown,
    StepTime,
    TurnedAway,
)
from tenfold.worker.framing import Channel

LOAD_INTERVAL_S = 0.1
"""A load snapshot is sent no more often than this while the engine works."""

HEARTBEAT_S = 1.0
"""How often an idle worker says that it is there."""

CHUNK_INTERVAL_S = 0.016
"""Tokens of steps that are quicker than this (a frame of a 60 Hz screen) travel together: each message wakes
the front, which shares the machine's cores with the engine. First and last tokens of a request never wait."""


class JoinRefused(Exception):
    """The front does not want this worker, for a reason that trying again does not mend."""


class EngineLike(Protocol):
    """What whoever runs an engine needs of it; `tenfold.engine.engine.Engine` is one."""

    def add(self, request: Request) -> None:
        """Raises RequestError for a request that it cannot serve."""
        ...

    def abort(self, id: str, keep: int | None = None) -> bool: ...

    def step(self) -> list[Chunk]: ...

    @property
    def has_work(self) -> bool: ...

    def load(self) -> LoadSnapshot: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class ServedEngine(EngineLike, Protocol):
    """What the loop needs of it: also what routers are told."""

    def kv_events(self) -> KVEvents | None:
        """What became of pages since the last call."""
        ...

    def kv_snapshot(self) -> KVSnapshot:
        """All pages, after the events that were handed out."""
        ...

    def step_times(self) -> tuple[StepTime, ...]:
        """Of some of the steps since the last call."""
        ...

    def fetch(self, fetch: Fetch) -> None:
        """See `tenfold.protocol.Fetch`."""
        ...


class WorkerLoop:
    """Drives one engine from one channel, in one thread.

    While there is work it never waits for messages; when there is none it checks the engine's books, reports
    its load and sleeps on the socket, a second at a time, with a sign of life between. Chunks of a step, and
    of quick steps, travel in one message with all else there is to tell: the front wakes up once.
    """

    def __init__(self, engine: ServedEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._load_due = 0.0
        self._held: list[Chunk] = []
        self._sent_at = 0.0
        self._here: set[str] = set()
        """Requests that came by this channel, or were told of, and have not ended."""
        self._fetched: set[str] = set()
        """Those that were told of and have not come."""

    def run(self) -> None:
        """Returns after Shutdown. Raises EOFError when the front is gone, JoinRefused when it wants no more
        of this worker."""
        engine, channel = self._engine, self._channel
        while True:
            for message in channel.poll() if engine.has_work else self._rest():
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            if engine.has_work:
                self._publish(engine.step())

    def abandon(self) -> None:
        """The front is gone: nobody wants what its requests had to come."""
        for id in self._here:
            self._engine.abort(id)

    def _rest(self) -> list[FrontMessage]:
        self._engine.check_integrity()
        self._load_due = 0.0
        while True:
            self._send_all(time.monotonic(), loaded=True)
            if messages := self._channel.wait(HEARTBEAT_S):
                return messages

    def _handle(self, message: FrontMessage) -> None:
        if isinstance(message, Generate):
            if message.acknowledge:
                self._channel.send(Chunks(chunks=(Chunk(id=message.request.id),)))
            id = message.request.id
            try:
                self._engine.add(message.request)
                if id not in self._fetched:  # else it may have ended already
                    self._here.add(id)
            except RequestError as error:
                self._here.discard(id)
                beyond = isinstance(error, BeyondMemory)
                self._channel.send(Refused(id=id, error=str(error), field=error.field, beyond_memory=beyond))
            self._fetched.discard(id)
        elif isinstance(message, Abort):
            self._engine.abort(message.id, message.keep)
            self._here.discard(message.id)
            self._fetched.discard(message.id)
        elif isinstance(message, Fetch):
            self._engine.fetch(message)
            self._here.add(message.request.id)
            self._fetched.add(message.request.id)
        elif isinstance(message, Resync):
            self._send_all(time.monotonic(), loaded=False)
            self._channel.send(Pages(snapshot=self._engine.kv_snapshot()))
        elif isinstance(message, TurnedAway):
            raise JoinRefused(message.reason)
        else:
            raise RuntimeError(f"unexpected message {type(message).__name__} in a running worker")

    def _publish(self, chunks: list[Chunk]) -> None:
        now = time.monotonic()
        self._held += chunks
        self._here.difference_update(chunk.id for chunk in chunks if chunk.finish is not None)
        urgent = any(
            chunk.finish is not None or chunk.cached_tokens is not None or chunk.handoff is not None
            for chunk in chunks
        )
        if not urgent and now < self._sent_at + CHUNK_INTERVAL_S:
            return
        loaded = now >= self._load_due
        if loaded:
            self._load_due = now + LOAD_INTERVAL_S
        if self._held or loaded:
            self._send_all(now, loaded)

    def _send_all(self, now: float, loaded: bool) -> None:
        """Everything that there is to tell, in one message. Pages first: the load has the number of their
        newest events."""
        engine = self._engine
        events = engine.kv_events()
        load = engine.load() if loaded else None
        steps = engine.step_times() if loaded else ()
        self._channel.send(Chunks(chunks=tuple(self._held), load=load, events=events, steps=steps))
        self._held = []
        self._sent_at = now
