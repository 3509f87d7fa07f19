"""A worker over the fake engine, as a process that joins a front by address; and a wire between the two that
a test can spoil."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tenfold.protocol import EngineSettings
from tenfold.worker.sealed import ANSWER, TAG
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import BUILDER, MODEL_ID, ROOT

SECRET = "0123456789abcdef0123456789abcdef"


def main() -> None:
    """The worker's process; its argument is a JSON object."""
    import logging

    from tenfold.worker.join import Joining, work
    from tenfold.worker.loop import JoinRefused

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    given = json.loads(sys.argv[1])
    settings = msgspec.convert(given["settings"], EngineSettings)
    joining = Joining("127.0.0.1", given["port"], given["secret"].encode(), given["name"])
    try:
        work(settings, joining, BUILDER, lambda path: given["model_id"])
    except JoinRefused as error:
        sys.exit(f"refused: {error}")


class JoiningWorker:
    """A running one."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30.0) -> int:
        """Waits for its exit code."""
        return self.process.wait(seconds)


@contextlib.contextmanager
def joining_worker(
    log: Path,
    port: int,
    fake: FakeConfig | None = None,
    name: str = "away",
    secret: str = SECRET,
    model_id: str = MODEL_ID,
    **settings: Any,
) -> Iterator[JoiningWorker]:
    """A worker that wants to join the front at ``port``; killed at exit, if it is still there."""
    given = {
        "port": port,
        "secret": secret,
        "name": name,
        "model_id": model_id,
        "settings": {"model": msgspec.json.encode(fake or FakeConfig()).decode(), "routed": True, **settings},
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from tests.helpers.joining_process import main; main()",
                json.dumps(given),
            ],
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
    try:
        yield JoiningWorker(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


Spoil = Callable[[int, bytes], list[bytes]]
"""Number of a message from the worker, its frame; what the front gets instead."""


class Wire:
    """Passes connections on to a front. ``spoil`` is applied to the worker's messages of the first one."""

    def __init__(self, port: int, spoil: Spoil) -> None:
        self._front = port
        self._spoil: Spoil | None = spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                self.connections += 1
                front = socket.create_connection(("127.0.0.1", self._front))
                spoil, self._spoil = self._spoil, None
                threading.Thread(target=self._down, args=(front, worker), daemon=True).start()
                threading.Thread(target=self._up, args=(worker, front, spoil), daemon=True).start()

    def _down(self, front: socket.socket, worker: socket.socket) -> None:
        with contextlib.suppress(OSError), front, worker:
            while data := front.recv(1 << 16):
                worker.sendall(data)
            worker.shutdown(socket.SHUT_RDWR)

    def _up(self, worker: socket.socket, front: socket.socket, spoil: Spoil | None) -> None:
        with contextlib.suppress(OSError, EOFError), front, worker:
            front.sendall(_exactly(worker, ANSWER))
            number = 0
            while True:
                head = _exactly(worker, 4)
                frame = head + _exactly(worker, int.from_bytes(head, "little") + TAG)
                for one in [frame] if spoil is None else spoil(number, frame):
                    front.sendall(one)
                number += 1


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
