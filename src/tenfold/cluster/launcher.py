"""Where the workers of a cluster run, and who starts them there: this machine, or Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from tenfold.cluster.children import command
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.ports import bracketed, free_ports
from tenfold.cluster.processes import Kept
from tenfold.cluster.runtime import Runtime, worker_environment


class Launcher(Protocol):
    """Makes the workers of a cluster."""

    def worker(self, name: str, options: WorkerOptions) -> Kept:
        """A worker that is to be there, not started yet."""

    def close(self) -> None:
        """Gives back what the launcher itself has taken; its workers have ended."""


class LocalLauncher:
    """Starts workers as processes of this machine."""

    def __init__(self, runtime: Runtime, logs: Path) -> None:
        self._runtime = runtime
        self._logs = logs

    def worker(self, name: str, options: WorkerOptions) -> Kept:
        """A child of this process."""
        return kept_worker(name, options, self._runtime, self._logs / f"{name}.log")

    def close(self) -> None:
        """There is nothing to give back."""


def kept_worker(name: str, options: WorkerOptions, runtime: Runtime, output: Path | None = None) -> Kept:
    """A worker that is to be there on this machine, whose address is ``runtime``'s; it ends with the thread
    that keeps it. Raises OSError for an address that is not this machine's."""
    (port,) = free_ports(runtime.address, 1)
    return Kept(
        name,
        command("worker", msgspec.json.encode(options).decode()),
        worker_environment(runtime, port),
        output,
        probe=f"http://{bracketed(runtime.address)}:{port}/health",
    )
