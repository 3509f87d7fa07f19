"""A worker as a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import tenfold
from tenfold.protocol import (
    EngineSettings,
    Failed,
    FrontMessage,
    Generate,
    Ready,
    Request,
    SamplingParams,
    Start,
    WorkerMessage,
)
from tenfold.worker.framing import FrameReader, frame
from tenfold.worker.process import ENGINE_BUILDER, spawn_worker
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.model_files import random_weights, tiny_config, write_gguf_model
from tests.helpers.server_process import BUILDER, ROOT, wait_for


@contextmanager
def worker(
    config: FakeConfig | str,
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, WorkerMessage]]:
    """A worker that was told to start, and its first message; of a fake, or of the model at a path."""
    process, sock = spawn_worker(BUILDER if isinstance(config, FakeConfig) else ENGINE_BUILDER)
    try:
        sock.settimeout(60)
        model = config if isinstance(config, str) else msgspec.json.encode(config).decode()
        message: FrontMessage = Start(settings=EngineSettings(model=model, max_running=3))
        sock.sendall(frame(message))
        reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
        messages: list[WorkerMessage] = []
        while not messages:
            messages = reader.feed(sock.recv(1 << 16))
        yield process, sock, messages[0]
    finally:
        sock.close()
        process.kill()
        process.wait()


def test_ready_tells_the_plan_and_the_end_of_the_socket_ends_the_process() -> None:
    """A worker reports what it resolved to, and exits quietly when the front is gone."""
    with worker(FakeConfig(max_context=99)) as (process, sock, message):
        assert isinstance(message, Ready)
        plan = message.plan
        assert (plan.max_context, plan.max_running, plan.format_bytes) == (99, 3, {"q4": 1000})
        sock.close()
        assert process.wait(10) == 0


def test_a_worker_whose_front_was_killed_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether it works or rests, with a real engine: no line of what its libraries were left with."""
    pytest.importorskip("tenfold._native", reason="needs the built core")
    config = tiny_config("llama")
    model = str(write_gguf_model(tmp_path / "m.gguf", config, random_weights(config)))
    for busy in (False, True):
        with worker(model) as (process, sock, message):
            assert isinstance(message, Ready)
            if busy:
                params = SamplingParams(max_tokens=None, ignore_eos=True)
                sock.sendall(frame(Generate(request=Request(id="a", prompt=(1, 2), params=params))))
                sock.recv(1)
            sock.close()
            assert process.wait(60) == 0
    captured = capfd.readouterr()
    assert captured.err + captured.out == ""


def test_a_model_that_cannot_be_loaded_is_said_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The reason travels to the front; the worker's own output has no traceback."""
    with worker(FakeConfig(fail="model.gguf is truncated")) as (process, _, message):
        assert message == Failed(error="model.gguf is truncated")
        assert process.wait(10) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker() -> None:
    """It is in a session of its own."""
    with worker(FakeConfig()) as (process, _, message):
        assert isinstance(message, Ready)
        assert os.getsid(process.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_a_worker_in_a_long_step_dies_with_its_front() -> None:
    """Even when it cannot look at its socket, here in the midst of loading."""
    code = (
        "import sys, time; from tenfold.worker.process import spawn_worker;"
        "from tenfold.worker.framing import frame;"
        "from tenfold.protocol import Start, EngineSettings; p, s = spawn_worker(sys.argv[1]);"
        "s.sendall(frame(Start(settings=EngineSettings(model='{\"load_s\": 30}')))); time.sleep(0.5);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    front = subprocess.Popen([sys.executable, "-c", code, BUILDER], stdout=subprocess.PIPE, cwd=ROOT)
    with front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        front.send_signal(signal.SIGKILL)
    time.sleep(0.05)

    def gone() -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True

    wait_for(gone, 5)


def test_the_working_directory_is_not_on_the_workers_path(tmp_path: Path) -> None:
    """A file beside the user's data is not imported for a module of its name."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong msgspec')")
    code = (
        "import sys; sys.path.pop(0); from tenfold.worker.process import spawn_worker;"
        "process, sock = spawn_worker(); sock.close(); sys.exit(process.wait())"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(tenfold.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
