"""The host of a worker that joined: a connection, and what can be done through it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from tenfold.protocol import (
    FLUSH_S,
    Alive,
    Chunks,
    EnginePlan,
    Failed,
    FrontMessage,
    Join,
    JoinedMessage,
    Leaving,
    LoadSnapshot,
    Pages,
    Ready,
    Refused,
    Shutdown,
    TurnedAway,
)
from tenfold.server.counts import counts_since
from tenfold.server.host import StartError, WorkerEvents

log = logging.getLogger(__name__)

EXIT_S = FLUSH_S + 2.0
"""How long a worker that was told to end may take before its connection is closed."""


class Link(Protocol):
    """A connection to a worker that is known to have the secret."""

    address: str

    def send(self, message: FrontMessage) -> None: ...

    def close(self) -> None:
        """At once; nothing comes from it any more."""
        ...

    def part(self) -> None:
        """Nothing comes from it any more; it is closed when the worker has read what was sent, or soon."""
        ...


class JoinedHost:
    """A `tenfold.server.host.WorkerHost` of a process on another machine. What cannot be done to it there is
    done to its connection: to kill it is to close that, and the worker may come back.

    ``events``: its post; ``retire`` takes its requests away, gently; ``objection`` says what is wrong with a
    plan."""

    def __init__(
        self,
        link: Link,
        name: str,
        events: WorkerEvents,
        retire: Callable[[], Awaitable[None]],
        objection: Callable[[EnginePlan], str | None],
    ) -> None:
        self._link = link
        self._name = name
        self._events = events
        self._retire = retire
        self._objection = objection
        self._plan: asyncio.Future[EnginePlan] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._planned = False
        self._cpu: float | None = None
        self._base: LoadSnapshot | None = None
        """The counts it came with."""
        self._ready = self._warm = False
        self._leaving: asyncio.Task[None] | None = None
        self._why = "the connection ended"

    @property
    def up(self) -> bool:
        """See `WorkerHost.up`."""
        return self._ready and not self._closed.is_set()

    async def start(self) -> EnginePlan:
        """Waits until it is ready: it has been started already. Raises StartError if it goes before."""
        return await asyncio.shield(self._plan)

    async def restart(self) -> EnginePlan:
        """Raises StartError: only who started it can start it again."""
        raise StartError(f"worker {self._name} runs on another machine, at {self._link.address}")

    def send(self, message: FrontMessage) -> None:
        """See `WorkerHost.send`."""
        if self.up:
            self._link.send(message)

    def kill(self, why: str = "it did not get on") -> None:
        """Closes the connection."""
        self._why = f"the connection was closed from here: {why}"
        self._link.close()
        self.lost()

    def cpu_seconds(self) -> float | None:
        """As it told last; None before."""
        return self._cpu

    async def ended(self) -> None:
        """Waits until the connection has ended."""
        await self._closed.wait()

    async def stop(self) -> None:
        """Closes the connection: the worker keeps its engine and looks for this front's successor."""
        self._planned = True
        self._why = "this front ends"
        if self._leaving is not None:
            self._leaving.cancel()
        self._link.close()
        self.lost()

    def received(self, message: JoinedMessage) -> None:
        """A message from the link. Raises ValueError for one that does not belong here."""
        if isinstance(message, Chunks):
            self._events.worker_message(message if message.load is None else self._counted(message))
        elif isinstance(message, Pages | Refused):
            self._events.worker_message(message)
        elif isinstance(message, Alive):
            self._cpu = message.cpu_seconds
        elif isinstance(message, Leaving):
            if self._leaving is None:
                self._leaving = asyncio.get_running_loop().create_task(self._let_go())
        elif isinstance(message, Failed):
            self._why = message.error
        elif isinstance(message, Ready) and not self._ready:
            self._begin(message)
        else:
            raise ValueError(f"{type(message).__name__} is not expected now")

    def lost(self) -> None:
        """The link has ended. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._plan.done():
            self._plan.set_exception(StartError(self._why))
            self._plan.exception()  # Seen: perhaps nobody waits.
        level = logging.INFO if self._planned else logging.WARNING
        log.log(level, "worker %s at %s is gone: %s", self._name, self._link.address, self._why)
        self._events.worker_lost(self._planned)

    def _begin(self, message: Ready) -> None:
        if (why := self._objection(message.plan)) is not None:
            self._why = "it was turned away"
            self._link.send(TurnedAway(reason=why))
            self._link.part()
            self.lost()
            return
        self._ready, self._warm = True, message.warm
        self._plan.set_result(message.plan)
        log.info("worker %s at %s is ready", self._name, self._link.address)
        self._events.worker_ready(message.plan, message.warm)

    def _counted(self, message: Chunks) -> Chunks:
        """With counts that begin with this connection: those before are in the metrics, or another
        front's."""
        assert message.load is not None
        if not self._warm:
            return message
        if self._base is None:
            self._base = message.load
        return replace(message, load=counts_since(self._base, message.load))

    async def _let_go(self) -> None:
        """It was asked to end, there."""
        log.info("worker %s at %s wants to end", self._name, self._link.address)
        await self._retire()
        if self._closed.is_set():
            return
        self._planned = True
        self._why = "it was asked to end, there"
        self._link.send(Shutdown())
        try:
            await asyncio.wait_for(self._closed.wait(), EXIT_S)
        except asyncio.TimeoutError:
            self._link.close()
            self.lost()


def identity_objection(theirs: Join, ours: Join) -> str | None:
    """Why a worker cannot compute for this front; None: it can."""
    if theirs.version != ours.version or theirs.code != ours.code:
        return (
            f"it is Tenfold {theirs.version} (code {theirs.code}) and the front {ours.version} (code "
            f"{ours.code}); install the same on both"
        )
    if theirs.model != ours.model:
        return (
            f"its model is another one (fingerprint {theirs.model}, the front's {ours.model}); give both the "
            "same files"
        )
    for option, its, here in (
        ("--format", theirs.format, ours.format),
        ("--kv-format", theirs.kv_format, ours.kv_format),
    ):
        if its != here:
            return f"it was started with {option} {its}, the front with {here}; start both with the same"
    return None


_ALIKE = ("vocab_size", "max_context", "kv_format", "page_bytes", "format_bytes", "weights", "lossy_weights")


def plan_objection(theirs: EnginePlan, ours: EnginePlan) -> str | None:
    """What differs between two plans that must not; None: nothing."""
    for field in _ALIKE:
        its, here = getattr(theirs, field), getattr(ours, field)
        if its != here:
            return f"its {field} is {its}, that of the workers here {here}"
    return None
