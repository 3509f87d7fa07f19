"""One engine process as the adapter has it: its news, its end, its standing still."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest

from tenfold.cluster import engine_process
from tenfold.cluster.engine_process import EngineProcess, StartError
from tenfold.protocol import Chunk, Chunks, EngineSettings, Refused, Request, SamplingParams
from tests.helpers.expected import tokens
from tests.helpers.fake_engine import REFUSED, FakeConfig
from tests.helpers.server_process import BUILDER

PROMPT = (1, 2, 3)


def settings(**config: Any) -> EngineSettings:
    return EngineSettings(model=msgspec.json.encode(FakeConfig(**config)).decode(), routed=True)


def request(id: str, count: int, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(id=id, prompt=prompt, params=SamplingParams(seed=1, max_tokens=count))


async def read(queue: asyncio.Queue[Any]) -> tuple[list[int], Any]:
    """The tokens of a request, and its last news."""
    got: list[int] = []
    while True:
        news = await queue.get()
        if isinstance(news, Chunk):
            got += news.tokens
        if not isinstance(news, Chunk) or news.finish is not None:
            return got, news


def test_requests_and_their_ends() -> None:
    """Promise: each request gets its own tokens and one end; a refused one is told why; load arrives."""

    async def run() -> None:
        told: list[Chunks] = []
        engine = EngineProcess(settings(), told.append, pytest.fail, BUILDER)
        assert (await engine.start()).backend == "fake" and engine.up and engine.getting_on
        queues = [engine.submit(request(f"r{n}", 5 + n)) for n in range(3)]
        bad = engine.submit(request("bad", 5, (REFUSED,)))
        for number, queue in enumerate(queues):
            got, last = await read(queue)
            assert got == tokens(PROMPT, 1, 5 + number) and last.finish == "length"
        _, refusal = await read(bad)
        assert isinstance(refusal, Refused) and "refuses" in refusal.error
        assert any(message.load is not None for message in told)
        await engine.stop()
        assert not engine.up and await engine.submit(request("late", 1)).get() is None

    asyncio.run(run())


def test_it_cannot_be_built() -> None:
    """Promise: the start fails with the engine's own words."""

    async def run() -> None:
        engine = EngineProcess(settings(fail="no such thing"), lambda message: None, pytest.fail, BUILDER)
        with pytest.raises(StartError, match="no such thing"):
            await engine.start()
        await engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_ends_or_stands_still(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a process that dies, or does nothing any more, is gone: all its requests are told, and so is
    who started it, once."""
    monkeypatch.setattr(engine_process, "TICK_S", 0.2)

    async def run() -> None:
        lost: list[str] = []
        engine = EngineProcess(settings(delay_s=0.01), lambda message: None, lost.append, BUILDER)
        await engine.start()
        queues = [engine.submit(request(f"r{n}", 400)) for n in range(3)]
        await queues[0].get()
        assert engine.pid is not None
        os.kill(engine.pid, number)
        for queue in queues:
            assert (await asyncio.wait_for(read(queue), 30))[1] is None
        assert len(lost) == 1 and not engine.up
        await engine.stop()

    asyncio.run(run())


def test_it_stands_still_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: then the start fails, late but surely."""
    monkeypatch.setattr(engine_process, "TICK_S", 0.05)

    async def run() -> None:
        engine = EngineProcess(settings(load_s=60), lambda message: None, pytest.fail, BUILDER)
        starting = asyncio.create_task(engine.start())
        while engine.pid is None:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(StartError, match="stood still"):
            await asyncio.wait_for(starting, 30)
        await engine.stop()

    asyncio.run(run())


def test_one_that_is_idle_is_left_alone() -> None:
    """Promise: an idle process says that it is there, and is not taken for one that stands still."""

    async def run() -> None:
        engine = EngineProcess(settings(), lambda message: None, pytest.fail, BUILDER)
        await engine.start()
        await asyncio.sleep(4)
        assert engine.getting_on
        await engine.stop()

    asyncio.run(run())


def test_a_request_that_nobody_wants_any_more() -> None:
    """Promise: it is forgotten, and its later news are nobody's."""

    async def run() -> None:
        engine = EngineProcess(settings(delay_s=0.01), lambda message: None, pytest.fail, BUILDER)
        await engine.start()
        queue = engine.submit(request("r", 400))
        await queue.get()
        engine.forget("r")
        while not queue.empty():
            queue.get_nowait()
        again, last = await read(engine.submit(request("r2", 3)))
        assert again == tokens(PROMPT, 1, 3) and last.finish == "length" and queue.empty()
        await engine.stop()

    asyncio.run(run())
