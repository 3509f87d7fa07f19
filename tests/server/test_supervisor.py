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
