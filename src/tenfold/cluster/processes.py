"""The processes of a cluster on this machine: started, watched, started again whatever they end with.

Dynamo's processes end with code 0 when they have lost sight of etcd for half a minute, and come back by
themselves from nothing; so every end is answered by a start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tenfold.cluster.probe import Probe

log = logging.getLogger(__name__)

BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 10.0
"""A process that lived this long is started again without delay."""
STOP_S = 15.0
"""A process that was told to end is killed after that."""
POLL_S = 0.05
MOST_FAILURES = 3
"""So many questions without an answer, and a process is killed."""
MOST_STARTS = 3
"""A process that has ended so often and was never up will not come up."""
LAST_LINES = 8


class NeverUp(ValueError):
    """A process cannot be there; the message says why, as far as its log does."""


class Running(Protocol):
    """A process that was started: what is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Kept:
    """One process that is to be there. Its output goes to a file, or where ours goes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: dict[str, str],
        output: Path | None = None,
        probe: str | None = None,
    ) -> None:
        """``probe``: a URL; a process that has answered there and does so no more is killed."""
        self.name = name
        self.output = output
        self.starts = 0
        self.up = False
        """Whether it ever was: it has said so where it is asked, or lived for a while."""
        self._command = command
        self._variables = variables
        self._url = probe
        self._probe: Probe | None = None
        self._process: Running | None = None
        self._started_at = 0.0
        self._short_lives = 0
        self._due = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process; None between two."""
        return None if self._process is None else self._process.pid

    def look(self, now: float) -> None:
        """Starts it where it is not there, once its time has come. Raises NeverUp where that is of no use."""
        if self._process is not None and not self.up:
            self.up = self.is_up(now)
        if self._process is not None and (code := self._process.poll()) is not None:
            lived_s = now - self._started_at
            self._close_probe()
            if not self.up and self.starts >= MOST_STARTS:
                self._process = None
                raise NeverUp(self._last_words(code))
            self._short_lives = 0 if lived_s >= HEALTHY_AFTER_S else self._short_lives + 1
            delay = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (self._short_lives - 1)) if self._short_lives else 0.0
            why = self.why(code)
            log.error("%s ended after %.0f s (%s); again in %.1f s", self.name, lived_s, why, delay)
            self._process = None
            self._due = now + delay
        if self._probe is not None and self._probe.failures >= MOST_FAILURES:
            log.error("%s does not answer: killing it", self.name)
            self._close_probe()
            self.signal(signal.SIGKILL)
        if self._process is None and now >= self._due:
            self._start(now)

    def is_up(self, now: float) -> bool:
        """Whether the process that is there has come up."""
        return now >= self._started_at + HEALTHY_AFTER_S if self._probe is None else self._probe.up

    def why(self, code: int) -> str:
        """It ended, in words."""
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return how if self.output is None else f"{how}; {self.output}"

    def _last_words(self, code: int) -> str:
        text = f"{self.name} ended {self.starts} times and was never up ({self.why(code)})"
        if self.output is None:
            return text
        lines = self.output.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n  ".join([f"{text}; its log ends:", *lines])

    def spawn(self) -> Running:
        """Starts the process."""
        with contextlib.ExitStack() as stack:
            output = None if self.output is None else stack.enter_context(self.output.open("ab"))
            # In a session of its own: Ctrl-C in the terminal is for us, and we end it in order.
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._variables},
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """To the process, if it is there."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, deadline: float) -> None:
        """Until it has ended; kills it at the deadline (monotonic)."""
        self._close_probe()
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _start(self, now: float) -> None:
        self.starts += 1
        self._probe = None if self._url is None else Probe(self._url)
        self._started_at = now
        self._process = self.spawn()


def keep(processes: Sequence[Kept], often: Callable[[], None] = lambda: None) -> None:
    """Keeps them there until SIGINT or SIGTERM, then ends them; calls ``often`` between. Raises NeverUp, when
    all have ended, where one of them cannot be there."""
    stop: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: stop.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not stop:
            for process in processes:
                process.look(time.monotonic())
            often()
            time.sleep(POLL_S)
    finally:
        end(processes)
        for number, handler in before.items():
            signal.signal(number, handler)


def end(processes: Sequence[Kept]) -> None:
    """Ends them, the last first: workers before their broker and etcd, so that they can take leave."""
    deadline = time.monotonic() + STOP_S
    for process in reversed(processes):
        process.signal(signal.SIGTERM)
    for process in reversed(processes):
        process.wait(deadline)
