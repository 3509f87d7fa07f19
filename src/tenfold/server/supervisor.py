"""Keeps one worker alive: starts it, notices its end at once, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import cast

import msgspec

from tenfold.protocol import (
    FLUSH_S,
    Chunks,
    EnginePlan,
    EngineSettings,
    Failed,
    FrontMessage,
    Pages,
    Refused,
    Shutdown,
    Start,
    WorkerMessage,
)
from tenfold.server.host import StartError, WorkerEvents
from tenfold.worker.framing import FrameReader, frame
from tenfold.worker.process import spawn_worker

log = logging.getLogger(__name__)

BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 10.0
"""A worker that lived this long is restarted without delay when it dies."""
DOWN_AFTER_STARTS = 3
"""So many starts in a row that come to nothing, and the worker counts as down."""
EXIT_GRACE_S = 1.0


class _Link(asyncio.Protocol):
    """The front's end of a worker's socket."""

    def __init__(self, owner: Supervisor) -> None:
        self._owner = owner
        self._reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._owner.received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self._owner.lost()

    def send(self, message: FrontMessage) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class Supervisor:
    """Owns the worker process and the link to it. A `tenfold.server.host.WorkerHost`; ``name`` is for the
    log."""

    def __init__(self, settings: EngineSettings, events: WorkerEvents, builder: str, name: str) -> None:
        self._name = name
        self._settings = settings
        self._events = events
        self._builder = builder
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[EnginePlan] | None = None
        self._again: asyncio.Future[EnginePlan] | None = None
        """Of `restart`: the next worker."""
        self._planned = False
        """The worker that lives was asked to go."""
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words = ""
        self._up_since: float | None = None
        self._lived_s: float | None = None
        """How long the last worker took requests; None if it never did."""
        self._stopping = asyncio.Event()

    @property
    def up(self) -> bool:
        """Whether a worker takes requests now."""
        return self._up_since is not None

    async def start(self) -> EnginePlan:
        """Starts the first worker and waits until it is ready. Raises StartError."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        return await self._first

    async def restart(self) -> EnginePlan:
        """Ends the worker, killing it when it does not go by itself, and waits until the next is ready.
        Raises StartError when starting one keeps failing; attempts go on."""
        if self._again is None or self._again.done():
            self._again = asyncio.get_running_loop().create_future()
        again = self._again
        if self.up and self._link is not None:
            self._planned = True
            link = self._link
            link.send(Shutdown())
            await asyncio.wait([link.ended], timeout=self._exit_s)
            link.close()
        return await again

    def kill(self) -> None:
        """SIGKILL, which reaches a stopped process too; then it is started again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def cpu_seconds(self) -> float | None:
        """Of the process that lives, all its threads; None without one, or where there is no /proc."""
        if self._process is None:
            return None
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    async def ended(self) -> None:
        """Waits until the supervision has ended: it was stopped, or has failed, and then `stop` raises."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def send(self, message: FrontMessage) -> None:
        """Sends if a worker is up; otherwise the message is dropped, as a worker that dies would drop it."""
        if self.up and self._link is not None:
            self._link.send(message)

    async def stop(self) -> None:
        """Ends the worker; it is killed when it is in a step that does not end, or still loading.

        Raises StartError when the supervision has failed.
        """
        self._stopping.set()
        if self._task is None:
            return
        if self.up and self._link is not None:
            self._link.send(Shutdown())
            await asyncio.wait([self._task], timeout=self._exit_s)
        if self._link is not None:
            self._link.close()
        await self._task

    @property
    def _exit_s(self) -> float:
        """How long a worker that was told to end may take: with a disk tier it writes pages first."""
        return EXIT_GRACE_S + (0.0 if self._settings.kv_disk is None else FLUSH_S)

    def received(self, message: WorkerMessage) -> None:
        """A message from the link."""
        if isinstance(message, Chunks | Pages | Refused):
            self._events.worker_message(message)
        elif isinstance(message, Failed):
            self._last_words = message.error
        else:
            self._up_since = time.monotonic()
            self._events.worker_ready(message.plan)
            for waiting in (self._first, self._again):
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.plan)

    def lost(self) -> None:
        """The link has ended."""
        self._link = None
        if self._up_since is not None:
            self._lived_s = time.monotonic() - self._up_since
            self._up_since = None
            if not self._stopping.is_set():
                self._events.worker_lost(self._planned)

    async def _supervise(self) -> None:
        """`_keep_alive`; an exception that it did not expect ends everything, and nobody waits for ever."""
        assert self._first is not None
        try:
            await self._keep_alive()
        except Exception as error:
            log.exception("supervising the worker failed")
            reason = f"supervising the worker failed: {type(error).__name__}: {error}"
            self._events.worker_down(reason)
            if self._first.done():
                raise StartError(reason) from error
            self._first.set_exception(StartError(reason))
        finally:
            if self._again is not None and not self._again.done():
                self._again.cancel()

    async def _keep_alive(self) -> None:
        assert self._first is not None
        short_lives = failed_starts = 0
        while True:
            reason = await self._life()
            if self._stopping.is_set():
                return
            if not self._first.done():
                if not self._last_words:
                    reason = f"worker {self._name} ended while it was being started: {reason}"
                self._first.set_exception(StartError(reason))
                return
            planned, self._planned = self._planned, False
            if planned:
                log.info("worker %s has ended as it was asked to; starting the next", self._name)
                continue
            failed_starts = failed_starts + 1 if self._lived_s is None else 0
            short_lives = short_lives + 1 if (self._lived_s or 0) < HEALTHY_AFTER_S else 0
            delay = min(MAX_BACKOFF_S, BACKOFF_S * (2 ** (short_lives - 2))) if short_lives > 1 else 0.0
            log.error("worker %s ended (%s); starting it again in %.1f s", self._name, reason, delay)
            if failed_starts >= DOWN_AFTER_STARTS:
                self._events.worker_down(reason)
                if self._again is not None and not self._again.done():
                    self._again.set_exception(StartError(reason))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return

    async def _life(self) -> str:
        """One worker from start to end; returns why it ended."""
        self._last_words = ""
        self._lived_s = None
        try:
            process, sock = spawn_worker(self._builder)
        except OSError as error:  # too many processes or files, which may pass
            return f"no process to be had: {error}"
        self._process = process
        try:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: _Link(self), sock=sock)
            self._link = link
            link.send(Start(settings=self._settings))
            await link.ended
        finally:
            code = await _reap(process, 0.0 if self._stopping.is_set() else EXIT_GRACE_S)
            self._process = None
        return self._last_words or _end_of(code)


def _end_of(code: int) -> str:
    """A process's, in words."""
    if code == -signal.SIGKILL:
        return (
            "killed by signal 9, as the kernel does when memory runs out: less --kv-memory, fewer workers or "
            "--format q8 take less"
        )
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


async def _reap(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Waits for a process whose socket is closed, and kills it when it lingers."""
    deadline = time.monotonic() + grace_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(0.005)
    assert process.returncode is not None
    return process.returncode
