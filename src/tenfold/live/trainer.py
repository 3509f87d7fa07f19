"""The process that trains heads beside a server: spawning it, and what it does first."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tenfold.interpreter import python_command
from tenfold.live.folder import LOG, VERDICT
from tenfold.live.job import LiveJob, Verdict

_BOOT = "from tenfold.live.trainer import main; main({parent}, {job!r})"
_MOST_LOG = 400


class Trainer:
    """A training under way, in a process of its own that ends with this one."""

    def __init__(self, job: LiveJob) -> None:
        """Starts it. Raises OSError."""
        self._work = Path(job.work)
        self._log = Path(job.live) / LOG
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                python_command(_BOOT.format(parent=os.getpid(), job=msgspec.json.encode(job))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # In the worker's session: Linux shares processors out by session first (autogroups), and a
                # process that is alone in one would get its half, however it gives way.
                # Before torch is imported: later it has its threads already.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def poll(self) -> Verdict | str | None:
        """None while it works; then the verdict, or in words how it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            try:
                return msgspec.json.decode((self._work / VERDICT).read_bytes(), type=Verdict)
            except (OSError, msgspec.MsgspecError) as error:
                return f"it left no verdict: {error}"
        if code < 0:
            return f"killed by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1][:_MOST_LOG]
        return f"exit code {code}"

    def stop(self) -> None:
        """Kills it, if it still works."""
        self._process.kill()
        self._process.wait()


def give_way() -> None:
    """Lets every other process of the machine go first, and be spared when memory is short."""
    os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(parent: int, job: bytes) -> None:
    """The process. ``parent`` is the worker's."""
    from tenfold.worker.main import die_with_parent

    die_with_parent(parent)
    give_way()
    work(job)


def work(job: bytes) -> None:
    """Trains; what the user can mend is told in a line."""
    from tenfold.live.training import train_live

    try:
        train_live(msgspec.json.decode(job, type=LiveJob))
    except (ValueError, OSError) as error:
        sys.exit(f"{error}")
