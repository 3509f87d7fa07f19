"""A real `tenfold cluster up` in a process of its own, on a free loopback port, and what that keeps."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tenfold.bench.peers import PeerError
from tenfold.cluster.ports import free_ports
from tenfold.cluster.probe import known_workers
from tenfold.interpreter import python_command

START_S = 120.0


class ClusterServer:
    """Starts a cluster of ``model`` and waits until it is ready. Owns the process: use ``with``.

    ``options`` are those of the command line. Raises PeerError, with the folder of the logs.
    """

    def __init__(self, model: str, *options: str) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="tenfold-cluster-"))
        command = python_command("from tenfold.cli import main\nmain()")
        self._process = subprocess.Popen(
            [*command, "cluster", "up", model, "--port", str(port), "--dir", str(self.folder), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        began = time.monotonic()
        while not (line := self._process.stdout.readline()).startswith("Ready"):
            if not line or time.monotonic() > began + START_S:
                self._process.kill()
                raise PeerError(f"the cluster did not start; its logs are in {self.folder}/logs")

    def pids(self, entry: str, role: str = "") -> list[int]:
        """Of its processes: see `kept_processes`. Linux only."""
        return kept_processes(self._process.pid, entry, role)

    def workers(self) -> int:
        """How many are known to the front; 0: it does not answer."""
        return known_workers(self.url)

    def __enter__(self) -> ClusterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def kept_processes(keeper: int, entry: str, role: str = "") -> list[int]:
    """Ids of a cluster's processes by their entry (`tenfold.cluster.children`): worker, front, broker; of
    workers in a ``role``, if one is given. Linux only."""
    found = []
    for pid in descendants(keeper):  # a launcher may be in between
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if any(f"import {entry}\n" in word for word in words) and (
                not role or any(f'"role":"{role}"' in word for word in words)
            ):
                found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """The processes that a process started; none, if it has ended. The engine's is the one of a cluster's
    worker. Linux only."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Its children, and theirs. Linux only."""
    return [each for child in children(pid) for each in (child, *descendants(child))]
