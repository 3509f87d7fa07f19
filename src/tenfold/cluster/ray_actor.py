"""A worker that an actor of Ray keeps, and the actor. Imports Ray: see `tenfold.cluster.ray_launcher`."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from tenfold.cluster.processes import Kept, Running
from tenfold.cluster.supervisor import Job, Report, Supervisor

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""An actor is asked that often how its worker does."""
HUNG_S = 60.0
"""An actor that has answered and does not for so long is killed. Its worker may well be at work."""
PLACE_S = 20.0
"""After so long without a place for a worker, that is said."""
MOST_CHARACTERS = 300
"""Of what Ray says about an end."""


class TenfoldWorker(Supervisor):
    """The actor; its name is what Ray's tools show."""

    def __init__(self, job: Job, home: str) -> None:
        """``home``: Ray's name of the front's node, which the cluster reaches at the address that it was
        given; other nodes it reaches at the one by which Ray does."""
        here = ray.get_runtime_context().get_node_id()
        super().__init__(job, job.runtime.address if here == home else ray.util.get_node_ip_address())
        if (niceness := os.nice(0)) > os.getpriority(os.PRIO_PROCESS, os.getppid()):
            self.say(
                f"{job.name} has niceness {niceness}: start Ray with RAY_worker_niceness=0 for full speed"
            )


class KeptActor(Kept):
    """A worker that is to be there, somewhere on the Ray cluster: a new actor for each that ends."""

    def __init__(self, job: Job, cpus: int) -> None:
        super().__init__(job.name, (), {})
        self._job = job
        self._cpus = cpus
        self._actor: ActorProcess | None = None

    def spawn(self) -> Running:
        """Asks Ray for an actor, on the node with the fewest of them."""
        # Not started again by Ray: that is done here, also where its node is gone, and in one place.
        make = ray.remote(TenfoldWorker).options(
            num_cpus=self._cpus, scheduling_strategy="SPREAD", max_restarts=0
        )
        actor = make.remote(self._job, ray.get_runtime_context().get_node_id())
        self._actor = ActorProcess(self.name, actor, self._cpus)
        return self._actor

    def is_up(self, now: float) -> bool:
        """Whether its worker has come up."""
        return self._actor is not None and self._actor.up

    def why(self, code: int) -> str:
        """It ended, in words."""
        return super().why(code) if self._actor is None else self._actor.why


class ActorProcess:
    """An actor, used like a process. Owns it."""

    def __init__(self, name: str, actor: Any, cpus: int) -> None:
        self.why = ""
        """It ended."""
        self.pid = 0
        """Of the worker, on its node; 0 before it is known."""
        self.up = False
        """Whether the worker has come up."""
        self._name = name
        self._actor = actor
        self._cpus = cpus
        self._code: int | None = None
        self._asked: Any = None
        self._asked_at = self._answered_at = time.monotonic()
        self._place: str | None = None
        self._waiting_said = False
        self._end: Any = None

    def poll(self) -> int | None:
        """None while it is there; it has ended when it or its node is gone, or stands still."""
        now = time.monotonic()
        if self._code is not None or self._end is not None:
            return self._code
        if self._asked is None:
            if self._place is not None and now < self._asked_at + EVERY_S:
                return None
            self._asked, self._asked_at = self._actor.report.remote(), now
        if not ray.wait([self._asked], timeout=0)[0]:
            self._wait_for_report(now)
            return self._code
        asked, self._asked = self._asked, None
        try:
            self._take(ray.get(asked))
            self._answered_at = now
        except ActorUnavailableError:
            self._wait_for_report(now)  # Ray does not know yet whether its node is gone
        except RayError as error:
            self._gone(last_line(error))
        return self._code

    def send_signal(self, sig: int) -> None:
        """SIGTERM lets the worker take its leave, if it has begun; others kill it."""
        if sig == signal.SIGTERM and self._place is not None:
            self._end = self._end or self._actor.end.remote()
        else:
            self.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if self._end is None or not ray.wait([self._end], timeout=timeout)[0]:
                raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
            self._gone("ended")
        return 0

    def kill(self) -> None:
        """The actor, and so its worker."""
        self._gone("killed")

    def _take(self, report: Report) -> None:
        if report.refused is not None:
            self._gone(f"node {report.address}: {report.refused}")
            return
        if self._place is None:
            log.info("%s is on node %s, its log there in %s", self._name, report.address, report.output)
        self._place, self.pid, self.up = report.address, report.pid or 0, report.up
        for line in report.lines:
            log.error("node %s: %s", report.address, line)

    def _wait_for_report(self, now: float) -> None:
        if self._place is not None:
            if now > self._answered_at + HUNG_S:
                self._gone(f"its actor on node {self._place} does not answer")
        elif now > self._answered_at + PLACE_S and not self._waiting_said:
            self._waiting_said = True
            free = ray.available_resources().get("CPU", 0)
            log.warning(
                "%s has not begun: Ray starts it, or waits for a node with %d free CPUs (all nodes have %g)",
                self._name,
                self._cpus,
                free,
            )

    def _gone(self, why: str) -> None:
        self._code, self.why = 1, why
        ray.kill(self._actor)


def last_line(error: BaseException) -> str:
    """Of its text: where Ray has what was raised in an actor."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:MOST_CHARACTERS] if lines else type(error).__name__
