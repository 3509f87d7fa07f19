"""A supervision that fails itself: the server must end and say so, and not wait for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest

from tenfold.config import ServeConfig
from tenfold.protocol import EngineSettings
from tenfold.server.flights import Flights
from tenfold.server.host import StartError
from tenfold.server.metrics import Metrics
from tenfold.server.serve import serve
from tenfold.worker.process import spawn_worker
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.fake_text import load_fake_text
from tests.helpers.server_process import BUILDER

MODEL = msgspec.json.encode(FakeConfig()).decode()


def test_settings_that_cannot_travel_are_an_error_at_start() -> None:
    """A number that no message can carry: `start` raises, `stop` returns, no process remains."""

    async def scenario() -> str:
        settings = EngineSettings(model=MODEL, kv_memory_bytes=10**30)
        flights = Flights(settings, Metrics(), max_queue=1, stall_after_s=30, builder=BUILDER)
        with pytest.raises(StartError) as caught:
            await asyncio.wait_for(flights.start(), 10)
        await asyncio.wait_for(flights.stop(), 10)
        return str(caught.value)

    assert "OverflowError" in asyncio.run(scenario())


def test_a_worker_killed_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the error says which worker, and what it often is and what to do."""

    def spawn_killed(builder: str) -> Any:
        found = spawn_worker(builder)
        found[0].kill()
        return found

    monkeypatch.setattr("tenfold.server.supervisor.spawn_worker", spawn_killed)

    async def scenario() -> str:
        flights = Flights(
            EngineSettings(model=MODEL), Metrics(), max_queue=1, stall_after_s=30, builder=BUILDER
        )
        with pytest.raises(StartError) as caught:
            await flights.start()
        await flights.stop()
        return str(caught.value)

    error = asyncio.run(scenario())
    assert error.startswith("worker w0 ended while it was being started: killed by signal 9, ")
    assert "less --kv-memory" in error


def test_a_server_that_is_stopped_does_not_wait_to_start_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: while a worker that keeps dying waits for its next start, the server ends at once."""
    monkeypatch.setattr("tenfold.server.supervisor.BACKOFF_S", 600.0)
    monkeypatch.setattr("tenfold.server.supervisor.MAX_BACKOFF_S", 600.0)
    processes: list[Any] = []

    def spawn_known(builder: str) -> Any:
        found = spawn_worker(builder)
        processes.append(found[0])
        return found

    monkeypatch.setattr("tenfold.server.supervisor.spawn_worker", spawn_known)

    async def scenario() -> None:
        settings = EngineSettings(model=MODEL)
        flights = Flights(settings, Metrics(), max_queue=1, stall_after_s=30, builder=BUILDER)
        await flights.start()
        for life in (1, 2):
            while len(processes) < life or flights.workers() != {"w0": "up"}:
                await asyncio.sleep(0.01)
            processes[-1].kill()
            while flights.workers() == {"w0": "up"}:
                await asyncio.sleep(0.01)
        while processes[-1].returncode is None:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(flights.stop(), 60)

    asyncio.run(asyncio.wait_for(scenario(), 300))
    assert len(processes) == 2


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), OSError("out of processes")])
def test_a_supervision_that_fails_later_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What nobody foresaw ends `serve` with an error; a system short of processes is tried again."""
    processes: list[Any] = []

    def spawn_once(builder: str) -> Any:
        if len(processes) == 1:
            processes.append(None)
            raise error
        found = spawn_worker(builder)
        processes.append(found[0])
        if len(processes) == 3:  # it was tried again: that is all
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr("tenfold.server.supervisor.spawn_worker", spawn_once)

    def run() -> None:
        config = ServeConfig(model=MODEL, served_name="fake", port=0, drain_s=5)
        serve(config, MODEL, load_fake_text, lambda plan, url: processes[0].kill(), BUILDER)

    if isinstance(error, OSError):
        run()
        assert len(processes) == 3
    else:
        with pytest.raises(StartError, match="supervising the worker failed: RuntimeError: out of luck"):
            run()
        assert len(processes) == 2
