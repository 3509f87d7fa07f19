"""A process with an engine (`tenfold.worker`), as an asyncio program has it: requests in, chunks out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from tenfold.protocol import (
    FLUSH_S,
    Abort,
    Chunk,
    Chunks,
    EnginePlan,
    EngineSettings,
    Failed,
    FrontMessage,
    Generate,
    Ready,
    Refused,
    Request,
    Shutdown,
    Start,
    WorkerMessage,
)
from tenfold.worker.framing import FrameReader, frame
from tenfold.worker.process import ENGINE_BUILDER, spawn_worker

log = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0
TICK_S = 0.5
HUNG_TICKS = 6
"""So many ticks in a row without a word and without CPU time, and the process stands still. Ticks, and not a
clock: where this process was stopped too, nothing is proved."""

START_TICKS = 60
"""And so many while it starts: it may wait for a disk."""

News = Chunk | Refused | None
"""None: the process is gone."""


class StartError(Exception):
    """The engine cannot be built; the message is its own."""


class EngineProcess(asyncio.Protocol):
    """One engine process, from `start` to its end: it is not started again.

    ``told`` is called with every message of steps, in order; ``lost`` once, with the reason, when the process
    ends without having been asked to. Everything happens in the event loop.
    """

    def __init__(
        self,
        settings: EngineSettings,
        told: Callable[[Chunks], None],
        lost: Callable[[str], None],
        builder: str = ENGINE_BUILDER,
    ) -> None:
        self._settings = settings
        self._told = told
        self._lost = lost
        self._builder = builder
        self._reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
        self._open: dict[str, asyncio.Queue[News]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._last_words = ""
        self._stopping = False
        self._quiet_ticks = 0
        self._cpu_s = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> EnginePlan:
        """Starts the process and waits until it takes requests. Raises StartError, OSError."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EnginePlan] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._process, sock = spawn_worker(self._builder)
        await loop.create_unix_connection(lambda: self, sock=sock)
        self._send(Start(settings=self._settings))
        self._watch = loop.create_task(self._look())
        return await self._ready

    @property
    def up(self) -> bool:
        """Whether it takes requests."""
        return self._transport is not None and not self._stopping

    @property
    def getting_on(self) -> bool:
        """Whether it was seen to work, or to be idle, lately."""
        return self.up and self._quiet_ticks <= HUNG_TICKS // 2

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    def submit(self, request: Request) -> asyncio.Queue[News]:
        """Takes up a request; what comes of it arrives in the queue. `forget` it in the end."""
        queue: asyncio.Queue[News] = asyncio.Queue()
        if not self.up:
            queue.put_nowait(None)
            return queue
        self._open[request.id] = queue
        self._send(Generate(request=request))
        return queue

    def forget(self, id: str) -> None:
        """Nobody wants to know of a request any more; the engine is told, if it is at work on it."""
        if self._open.pop(id, None) is not None:
            self._send(Abort(id=id))

    async def stop(self) -> None:
        """Ends the process; it is killed where it does not end by itself."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        if self._process is None:
            return
        self._send(Shutdown())
        if self._transport is not None:
            flush_s = 0.0 if self._settings.kv_disk is None else FLUSH_S
            await asyncio.wait([self._ended], timeout=EXIT_GRACE_S + flush_s)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._quiet_ticks = 0
        for message in self._reader.feed(data):
            if isinstance(message, Chunks):
                for chunk in message.chunks:
                    self._pass_on(chunk.id, chunk, chunk.finish is not None)
                self._told(message)
            elif isinstance(message, Refused):
                self._pass_on(message.id, message, True)
            elif isinstance(message, Failed):
                self._last_words = message.error
            elif isinstance(message, Ready):
                self._ready.set_result(message.plan)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        queues, self._open = self._open, {}
        for queue in queues.values():
            queue.put_nowait(None)
        assert self._process is not None
        self._process.kill()  # a socket that is closed and a process that lives: it is of no use
        code = self._process.wait()
        reason = self._last_words or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        if not self._ended.done():
            self._ended.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(StartError(reason))
        elif not self._stopping:
            self._lost(reason)

    def _pass_on(self, id: str, news: Chunk | Refused, last: bool) -> None:
        queue = self._open.get(id)
        if queue is None:
            return  # It was given up a moment ago.
        if last:
            del self._open[id]
        queue.put_nowait(news)

    def _send(self, message: FrontMessage) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    async def _look(self) -> None:
        """A process that stands still is killed: its requests go on elsewhere."""
        while True:
            await asyncio.sleep(TICK_S)
            cpu_s = self._cpu_seconds()
            moved = cpu_s is None or cpu_s > self._cpu_s
            self._cpu_s = cpu_s or 0.0
            self._quiet_ticks = 0 if moved else self._quiet_ticks + 1
            most = HUNG_TICKS if self._ready.done() else START_TICKS
            if self._quiet_ticks >= most and self._process is not None:
                log.error("the engine's process stands still: killing it")
                self._last_words = "it stood still, and was killed"
                self._process.kill()
                return

    def _cpu_seconds(self) -> float | None:
        """Of the process, all its threads; None where there is no /proc."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
            user, system = stat.rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return None
