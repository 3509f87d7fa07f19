"""Workers with KV memory of different sizes: what a request returns does not tell which one it met. Hosts of
the tests' own, and real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from tenfold.protocol import Chunk, Pooling, Refused, Request, SamplingParams
from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for
from tests.server.test_app import PLAN
from tests.server.test_fleet import Day
from tests.server.test_joining import Place, ask, up

TINY, BIG = replace(PLAN, kv_pages=10), replace(PLAN, kv_pages=100)
"""160 tokens, and 1,600."""
LACK = "prompt has 200 tokens; they do not fit the KV memory, which holds 160"


class SizesDay(Day):
    """Worker w0 is tiny, w1 is big."""

    def ask(
        self, id: str, prompt: int, tokens: int | None, output: int = 0, pooling: Pooling | None = None
    ) -> str | None:
        """Where a request goes; None if it waits."""
        params = SamplingParams(max_tokens=tokens)
        request = Request(id=id, prompt=(1,) * prompt, params=params, output=(2,) * output, pooling=pooling)
        if self.fleet.send([request]) != [id]:
            return None
        return next(name for name, host in self.hosts.items() if id in host.requests())

    def refused(self, message: Refused) -> None:
        self.refusals.append(message.id)

    refusals: list[str]


def play(scenario: Callable[[SizesDay], None]) -> None:
    async def run() -> None:
        day = SizesDay(2)
        day.refusals = []
        await day.fleet.start()
        for name, plan in (("w0", TINY), ("w1", BIG)):
            day.hosts[name].die(planned=True)
            day.hosts[name].up = True
            day.hosts[name].events.worker_ready(plan)
        scenario(day)
        await day.fleet.stop()

    asyncio.run(run())


def test_a_request_goes_only_where_all_of_it_fits() -> None:
    """Promise: prompt and answer together decide; an answer without a limit may take the model's context; an
    embedding has no answer. Where all fits everywhere, the size of a worker does not matter."""

    def scenario(day: SizesDay) -> None:
        for number in range(4):
            assert day.ask(f"long {number}", 120, 50) == "w1"
            assert day.ask(f"endless {number}", 5, None) == "w1"
        assert day.ask("resumed", 120, 41, output=40) == "w1"
        mean = Pooling(kind="mean")
        assert {day.ask(f"text {number}", 161, None, pooling=mean) for number in range(4)} == {"w1"}
        assert "w0" in {day.ask(f"short {number}", 120, 40) for number in range(8)}
        assert "w0" in {day.ask(f"whole {number}", 160, None, pooling=mean) for number in range(8)}

    play(scenario)


def test_a_request_waits_for_the_worker_that_has_room_for_it() -> None:
    """Promise: while the only worker that holds it is started again, it waits; where that cannot be started,
    or where nobody holds all of it, it goes where there is most."""

    def scenario(day: SizesDay) -> None:
        day.hosts["w1"].die()
        assert day.ask("long", 200, 50) is None and day.ask("short", 100, 50) == "w0"
        day.hosts["w1"].up = True
        day.hosts["w1"].events.worker_ready(BIG)
        assert day.ask("long", 200, 50) == "w1"
        assert day.ask("more than anybody has", 1500, 5000) == "w1"
        day.hosts["w1"].die()
        day.hosts["w1"].events.worker_down("no memory")
        assert day.ask("long~1", 200, 50) == "w0"

    play(scenario)


def test_workers_of_nearly_one_size_share_what_none_of_them_holds() -> None:
    """Promise: a worker that found a little less free memory than another is not left without requests that
    have no limit; one that such a request outgrows hands it on, to one that has more."""

    def scenario(day: SizesDay) -> None:
        day.hosts["w0"].die(planned=True)
        day.hosts["w0"].up = True
        day.hosts["w0"].events.worker_ready(replace(PLAN, kv_pages=95))
        assert {day.ask(f"endless {number}", 5, None) for number in range(8)} == {"w0", "w1"}
        assert {day.ask(f"had {number}", 1600, None) for number in range(8)} == {"w1"}

    play(scenario)


@pytest.mark.parametrize("how", ["refused", "ended"])
def test_a_worker_that_is_too_small_passes_a_request_on(how: str) -> None:
    """Promise: what a small worker refuses or gives up for its own size goes to a larger one, with the tokens
    that it has; what the largest refuses or gives up has come to its end. Other refusals are final
    anywhere."""

    def says(day: SizesDay, worker: str, id: str) -> None:
        host = day.hosts[worker]
        if how == "refused":
            host.events.worker_message(Refused(id=id, error=LACK, field="prompt", beyond_memory=True))
        else:
            host.says(Chunk(id=id, tokens=(3,), cached_tokens=0), steps=1)
            host.says(Chunk(id=id, finish="error", error="full", beyond_memory=True), steps=2)

    def scenario(day: SizesDay) -> None:
        day.hosts["w1"].die()
        day.hosts["w1"].events.worker_down("no memory")
        assert day.ask("r", 200, 50) == "w0"
        day.hosts["w1"].up = True
        day.hosts["w1"].events.worker_ready(BIG)
        says(day, "w0", "r")
        assert day.returned_ids == ["r"] and not day.deaths and not day.refusals
        assert [chunk.finish for chunk in day.chunks] == ([] if how == "refused" else [None])
        assert day.ask("r~1", 200, 50) == "w1"
        says(day, "w1", "r~1")
        assert day.returned_ids == ["r"]
        assert (day.refusals == ["r~1"]) if how == "refused" else (day.chunks[-1].finish == "error")
        assert day.ask("other", 5, 5) in ("w0", "w1")
        host = next(host for host in day.hosts.values() if "other" in host.requests())
        host.events.worker_message(Refused(id="other", error="prompt has ...", field="prompt"))
        assert day.returned_ids == ["r"] and day.refusals[-1] == "other"
        day.fleet.router.check()

    play(scenario)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


BIG_FAKE = FakeConfig(kv_pages=64, delay_s=0.002)
TINY_FAKE = FakeConfig(kv_pages=2, delay_s=0.002)


def test_a_small_worker_that_joins_fails_no_request(place: Place) -> None:
    """Promise: beside a worker with room for 32 tokens every answer is what it is without that one, however
    long, and whether the request says how long or not."""
    server = place.front(BIG_FAKE, workers=1)
    place.worker(TINY_FAKE, name="tiny")
    wait_for(up(server, "w0", "tiny"), 120)
    prompts = [f"{number} " + "abc " * (number % 3) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        sizes = [100 if number % 2 else 5 for number in range(12)]
        texts = list(pool.map(lambda prompt, tokens: ask(server, prompt, tokens), prompts, sizes))
    assert texts == [expected.text(*of) for of in zip(prompts, [1] * 12, sizes, strict=True)]
    assert server.metric('tenfold_router_requests_total{worker="tiny"}') > 0
    assert server.metric('tenfold_router_requests_total{worker="w0"}') >= 6


def _long(server: ServerProcess) -> tuple[int, str]:
    body = {"prompt": "abc " * 30, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    return answer.status_code, answer.text


def test_what_is_taken_follows_the_largest_worker_that_is_there(place: Place) -> None:
    """Promise: a server whose first worker is small refuses what that cannot hold; as soon as a larger one
    has joined it takes it, and no more when that has left."""
    place.worker(TINY_FAKE, name="tiny")
    server = place.front(BIG_FAKE, workers=0)
    status, text = _long(server)
    assert status == 400 and "holds 32" in text
    big = place.worker(BIG_FAKE, name="big")
    wait_for(up(server, "tiny", "big"), 120)
    for _ in range(6):
        assert _long(server)[0] == 200
    big.process.terminate()
    assert big.end() == 0
    status, text = _long(server)
    assert status == 400 and "holds 32" in text


def test_without_room_in_any_worker_the_answer_is_one_workers(tmp_path: Path) -> None:
    """Promise: what is more than the KV memory of all is refused with the reason, as with one worker."""
    with running_server(tmp_path / "log", TINY_FAKE, workers=2) as server:
        status, text = _long(server)
        assert status == 400 and "do not fit the KV memory, which holds 32" in text
