"""How a worker is kept and reached: the seam between the fleet and whatever runs a worker.

`tenfold.server.supervisor.Supervisor` keeps a process on this machine, `tenfold.server.joined.JoinedHost` a
connection to one that was started elsewhere. The fleet knows no more of a worker
than what is here.
"""

from __future__ import annotations

from typing import Protocol

from tenfold.protocol import Chunks, EnginePlan, FrontMessage, Pages, Refused


class StartError(Exception):
    """There is no worker and there will be none: it could not build its engine (the message is its own), or
    the supervision itself has failed."""


class WorkerEvents(Protocol):
    """Who is told of a worker's life. Called in the event loop, in order."""

    def worker_ready(self, plan: EnginePlan, warm: bool = False) -> None:
        """A worker, the first or a later one, takes requests; it knows none of the earlier ones. ``warm``: it
        may hold pages."""

    def worker_message(self, message: Chunks | Pages | Refused) -> None: ...

    def worker_lost(self, planned: bool) -> None:
        """Everything that was sent to it is forgotten; a new one is on its way. ``planned``: it was asked to
        go, by `WorkerHost.restart`."""

    def worker_down(self, reason: str) -> None:
        """Starting it again keeps failing; attempts go on, slowly."""


class WorkerHost(Protocol):
    """Keeps one worker alive."""

    @property
    def up(self) -> bool:
        """Whether a worker takes requests now."""
        ...

    async def start(self) -> EnginePlan:
        """Starts the first worker and waits until it is ready. Raises StartError."""
        ...

    async def restart(self) -> EnginePlan:
        """Ends the worker and waits until a new one is ready. Raises StartError when that keeps failing;
        attempts go on even so."""
        ...

    def send(self, message: FrontMessage) -> None:
        """Sends if a worker is up; otherwise the message is dropped, as a worker that dies would drop it."""
        ...

    def kill(self) -> None:
        """Ends a worker that does not answer, up or still starting; another is started."""
        ...

    def cpu_seconds(self) -> float | None:
        """CPU time that the worker has used: what tells one that computes from one that stands still. None
        where that cannot be known."""
        ...

    async def ended(self) -> None:
        """Waits until nobody looks after the worker any more: `stop` was called, or that has failed, and then
        `stop` raises."""
        ...

    async def stop(self) -> None:
        """Ends the worker for good. Raises StartError when looking after it had failed."""
        ...
