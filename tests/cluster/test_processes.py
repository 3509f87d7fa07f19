"""Processes that are kept: whatever they end with, they come back, and in the end all are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tenfold.cluster import probe, processes
from tenfold.cluster.processes import Kept, keep
from tests.helpers.server_process import wait_for

LASTING = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_every_end_is_answered_by_a_start(tmp_path: Path, end: str) -> None:
    """Promise: also code 0, with which Dynamo's processes give up; but not without a pause."""
    kept = Kept("one", [sys.executable, "-c", f"import os, sys; {end}"], {}, tmp_path / "log")
    began = time.monotonic()
    while kept.starts < 3:
        kept.look(time.monotonic())
        time.sleep(0.01)
    assert time.monotonic() - began > processes.BACKOFF_S
    kept.wait(time.monotonic() + 10)


def test_one_that_never_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: it is not tried for ever: all end with the last it said. One that was up once is."""
    monkeypatch.setattr(processes, "BACKOFF_S", 0.05)
    ending = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    beside = Kept("beside", LASTING, {}, tmp_path / "beside")
    with pytest.raises(processes.NeverUp, match=r"one ended 3 times .*exit code 1(.|\n)*no such model"):
        keep([beside, Kept("one", ending, {}, tmp_path / "log")])
    assert beside.pid is None or not Path(f"/proc/{beside.pid}").exists()
    kept = Kept("one", ending, {}, tmp_path / "log")
    kept.up = True
    while kept.starts <= processes.MOST_STARTS:
        kept.look(time.monotonic())
        time.sleep(0.01)
    kept.wait(time.monotonic() + 10)


def test_a_signal_ends_all(tmp_path: Path) -> None:
    """Promise: SIGTERM to who keeps them ends all of them, also one that does not care to."""
    deaf = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    kept = [Kept("soft", LASTING, {}, tmp_path / "a"), Kept("deaf", deaf, {}, tmp_path / "b")]
    pids: list[int] = []

    def look() -> None:
        if not pids and (tmp_path / "a").read_text() == "up\n":
            time.sleep(0.5)
            pids.extend(each.pid or 0 for each in kept)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "STOP_S", 1.0)
        keep(kept, look)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_that_answers_no_more_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a process that has answered and does so no more is killed and started again; one that has not
    answered yet is left to start, though not for ever."""
    monkeypatch.setattr(probe, "EVERY_S", 0.05)
    monkeypatch.setattr(probe, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(probe, "START_S", 5.0)
    answers, code = threading.Event(), 503

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answers.is_set():
                self.send_response(code)
                self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, contextlib.ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        kept = Kept("one", LASTING, {}, tmp_path / "log", f"http://127.0.0.1:{server.server_port}/live")
        stack.callback(lambda: kept.wait(0))

        def look() -> int:
            kept.look(time.monotonic())
            return kept.starts

        look()
        time.sleep(0.5)
        assert look() == 1
        answers.set()
        time.sleep(0.5)
        assert look() == 1 and not kept.up  # it answers that it is not well
        code = 200
        wait_for(lambda: look() == 1 and kept.up, 20)
        answers.clear()
        wait_for(lambda: look() == 2, 20)
        wait_for(lambda: look() == 3, 30)
