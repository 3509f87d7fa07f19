"""One worker of a fleet, as the fleet sees it: its name, its role, its host, and what is known of it."""

from __future__ import annotations

from typing import Literal, Protocol

from tenfold.protocol import Chunks, EnginePlan, Pages, Refused, WorkerRole
from tenfold.server.host import WorkerHost

State = Literal["starting", "up", "draining", "stuck", "silent", "down"]
STATES: tuple[State, ...] = ("starting", "up", "draining", "stuck", "silent", "down")
"""``stuck``: it says that it lives, and gets on with nothing. ``down``: starting it again keeps failing."""


class PostEvents(Protocol):
    """Who is told; as `tenfold.server.host.WorkerEvents`, with the post."""

    def post_ready(self, post: Post, plan: EnginePlan, warm: bool) -> None: ...

    def post_message(self, post: Post, message: Chunks | Pages | Refused) -> None: ...

    def post_lost(self, post: Post, planned: bool) -> None: ...

    def post_down(self, post: Post) -> None: ...


class Post:
    """A worker's place. Workers come and go; the post stays. The fleet owns it, and sets ``host``."""

    host: WorkerHost

    def __init__(
        self, name: str, events: PostEvents, role: WorkerRole = "mixed", address: str | None = None
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        """Of a worker that joined; the post is there as long as that is. None: of this front's own
        workers."""
        self._events = events
        self.plan: EnginePlan | None = None
        """Of the worker that takes requests; None between two."""
        self.steps = 0
        """That its worker has made."""
        self.waiting = 0
        """Requests that wait in its queue."""
        self.down: str | None = None
        """Why it cannot be started."""
        self.kv_pages = 0
        """Of its latest worker: what the next is expected to have too. 0: there was none yet."""
        self.draining = False
        self.silent_since: float | None = None
        self.stuck_since: float | None = None
        self.heard = 0.0
        self.cpu: float | None = None
        """CPU seconds it had when it had been quiet for a while; None: it has spoken since."""
        self.requests: dict[str, None] = {}
        """On this worker now, in the order they were sent."""
        self.taken_away: dict[str, None] = {}
        """Were here when it stopped to get on: if it comes to nothing good, they may be why."""

    @property
    def state(self) -> State:
        """For people."""
        if self.down is not None:
            return "down"
        if self.plan is None:
            return "starting"
        if self.silent_since is not None:
            return "silent"
        if self.stuck_since is not None:
            return "stuck"
        return "draining" if self.draining else "up"

    # What its host says

    def worker_ready(self, plan: EnginePlan, warm: bool = False) -> None:
        """See `tenfold.server.host.WorkerEvents`."""
        self.plan, self.down, self.kv_pages = plan, None, plan.kv_pages
        self._events.post_ready(self, plan, warm)

    def worker_message(self, message: Chunks | Pages | Refused) -> None:
        """See `tenfold.server.host.WorkerEvents`."""
        self._events.post_message(self, message)

    def worker_lost(self, planned: bool) -> None:
        """See `tenfold.server.host.WorkerEvents`."""
        self._events.post_lost(self, planned)
        self.steps = self.waiting = 0
        self.plan = self.silent_since = self.stuck_since = self.cpu = None
        self.draining = False
        self.requests.clear()
        self.taken_away.clear()

    def worker_down(self, reason: str) -> None:
        """See `tenfold.server.host.WorkerEvents`."""
        self.down = reason
        self._events.post_down(self)
