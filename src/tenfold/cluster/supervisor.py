"""Keeping one worker on a node of somebody else's cluster: what an actor of Ray does there, without Ray."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tenfold.cluster.alike import check_alike
from tenfold.cluster.launcher import kept_worker
from tenfold.cluster.model_folder import write_model_folder
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.processes import POLL_S, Kept, NeverUp, end
from tenfold.cluster.runtime import Runtime

MARK = "this-cluster"
"""A file in the cluster's folder, by which a node knows that it sees the same folder."""
MOST_LINES = 100


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and what its node must know of the cluster."""

    name: str
    options: WorkerOptions
    runtime: Runtime
    """Its address is that of the machine of the front."""
    folder: str
    """Of the cluster: for logs, and for the registry where there is no etcd."""
    mark: str
    """What is in the file `MARK` there."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker does."""

    address: str
    output: str
    """Its log, a file of its node."""
    pid: int | None = None
    up: bool = False
    """It has come up."""
    lines: list[str] = msgspec.field(default_factory=list)
    """What befell it since the last report."""
    refused: str | None = None
    """Why there can be no worker on this node."""


class Supervisor:
    """Keeps a worker at ``address`` of this machine until it is told to end. Its worker dies with it."""

    def __init__(self, job: Job, address: str) -> None:
        self._address = address
        self._output = Path(job.folder) / "logs" / f"{job.name}.log"
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._ended = threading.Event()
        self._refused: str | None = None
        self._thread: threading.Thread | None = None
        try:
            self._kept = self._prepare(job)
        except (ValueError, OSError) as error:
            self._refused = str(error)
            return
        handler = _Lines(self._lines)
        logging.getLogger("tenfold.cluster").addHandler(handler)
        # One thread starts the process, again and again: Linux kills it when that thread ends.
        self._thread = threading.Thread(target=self._keep, name="keep", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """How the worker does. Raises RuntimeError where it is kept no more."""
        if self._refused is not None:
            return Report(address=self._address, output=str(self._output), refused=self._refused)
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the thread that kept the worker has ended")
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return Report(
            address=self._address,
            output=str(self._output),
            pid=self._kept.pid,
            up=self._kept.up,
            lines=lines,
        )

    def say(self, line: str) -> None:
        """In the next report."""
        self._lines.append(line)

    def end(self) -> None:
        """Tells the worker to take its leave, and waits for it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        try:
            while not self._ended.wait(POLL_S):
                self._kept.look(time.monotonic())
        except NeverUp as error:
            self._refused = str(error)
        finally:
            end([self._kept])

    def _prepare(self, job: Job) -> Kept:
        """The worker, once this machine has what it needs. Raises ValueError, OSError."""
        options = job.options
        settings = options.settings
        for what, path in (
            ("the model", settings.model),
            ("the secret", settings.transfer_secret),
            ("the drafter", settings.drafter),
        ):
            if path is not None and not Path(path).exists():
                raise ValueError(f"{what} is not at {path} there: it must be at the same path on all nodes")
        check_alike(options.namespace, settings)
        folder = Path(job.folder)
        if options.discovery == "file":
            # The front reads what workers write there, and they read the model's text side from there.
            mark = folder / MARK
            if not mark.exists() or mark.read_text() != job.mark:
                raise ValueError(
                    f"{folder} there is not the folder of `cluster up`: give a --dir that all nodes share, "
                    "or --etcd"
                )
        else:
            own = folder / job.name / "model"
            hole = write_model_folder(Path(settings.model), own)
            options = replace(options, folder=str(own), hole=hole)
        if settings.transfer_address is not None:
            options = replace(options, settings=replace(settings, transfer_address=self._address))
        self._output.parent.mkdir(parents=True, exist_ok=True)
        return kept_worker(job.name, options, replace(job.runtime, address=self._address), self._output)


class _Lines(logging.Handler):
    """Keeps what is logged, for the next report."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
