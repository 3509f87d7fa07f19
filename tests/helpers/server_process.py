"""A real server process over the fake engine, on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tenfold.config import ServeConfig, ServerPlan
from tests.helpers.fake_engine import FakeConfig

BUILDER = "tests.helpers.fake_engine:build_fake_engine"
MODEL_ID = "the fake model"
"""What identifies it to workers that join."""
ROOT = Path(__file__).resolve().parents[2]


FAR_AWAY = "far away"
"""A model that it takes a minute to find."""


def locate(model: str) -> str:
    """A fake model is its own path."""
    if model == FAR_AWAY:
        time.sleep(60)
    return model


def main() -> None:
    """The server's process: two arguments, ServeConfigs of its models as JSON and the engine's builder."""
    import logging

    from tenfold.server.access_log import log_handler
    from tenfold.server.serve import serve
    from tests.helpers.fake_text import load_fake_text

    config, *others = msgspec.json.decode(sys.argv[1], type=list[ServeConfig])
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(config.log_format)])

    def ready(plan: ServerPlan, url: str) -> None:
        print(json.dumps({"url": url, "plan": plan.to_json()}), flush=True)

    more = [(other, other.model) for other in others]
    serve(
        config,
        config.model,
        load_fake_text,
        ready,
        sys.argv[2],
        others=more,
        locate=locate,
        identify=lambda path: MODEL_ID,
    )


class ServerProcess:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def worker_pid(self) -> int | None:
        """The worker's process id; None between two workers."""
        pids = self.worker_pids()
        return pids[0] if pids else None

    def worker_pids(self) -> list[int]:
        """The process ids of all workers."""
        return [pid for pid in self._children() if b"worker.main" in _command(pid)]

    def checker_pids(self) -> list[int]:
        """Of the processes that look at constraints first."""
        return [pid for pid in self._children() if b"constraints.checking" in _command(pid)]

    def _children(self) -> list[int]:
        pids: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids += [int(pid) for pid in (task / "children").read_text().split()]
        return pids

    def kill_worker(self) -> None:
        """SIGKILL, as the system does it when memory is short."""
        pid = wait_for(self.worker_pid)
        os.kill(pid, signal.SIGKILL)

    def metric(self, name: str) -> float:
        """A metric's value, 0 if it is not there; ``name`` with its labels. Without the label ``model``: the
        sum over all models."""
        name, _, rest = name.partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            there, _, rest = line.partition("{") if "{" in line else line.partition(" ")
            found = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if "model" not in labels:
                found.pop("model", None)
            if there == name and found == labels:
                total += float(line.split()[-1])
        return total

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals the server and returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(20)


def _command(pid: int) -> bytes:
    """Empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def running_server(
    log: Path,
    fake: FakeConfig | None = None,
    builder: str = BUILDER,
    others: Mapping[str, FakeConfig] | None = None,
    **config: Any,
) -> Iterator[ServerProcess]:
    """A server with the given ServeConfig fields; ``others``: further models by their names. At exit it must
    still stop cleanly."""
    full = [
        {"model": path_of(model), "served_name": name, "port": 0, "drain_s": 0.5, **config}
        for name, model in {"fake": fake or FakeConfig(), **(others or {})}.items()
    ]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from tests.helpers.server_process import main; main()",
                json.dumps(full),
                builder,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            server = ServerProcess(process, json.loads(line)["url"], log)
            yield server
            if process.poll() is None:
                assert server.stop() == 0
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()


@contextlib.contextmanager
def serving_model(
    log: Path, *models: str, kv_memory: str = "256MiB", options: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """`tenfold serve MODEL...` (smollm2), as a user starts it; at exit it must stop cleanly."""
    cli = [sys.executable, "-c", "from tenfold.cli import main; main()"]
    command = [*cli, "serve", *(models or ["smollm2"]), "--port", "0", "--kv-memory", kv_memory, "--json"]
    command += options
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield ServerProcess(process, json.loads(line)["url"], log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "Traceback" not in log.read_text()


def path_of(fake: FakeConfig) -> str:
    """What stands in the place of a fake model's path."""
    return msgspec.json.encode(fake).decode()


def wait_for(probe: Any, seconds: float = 60.0) -> Any:
    """What ``probe`` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := probe():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")
