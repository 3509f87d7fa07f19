"""What a fleet of prefill and decode workers does with a request on its way: hosts of the tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tenfold.protocol import (
    Abort,
    Chunk,
    EngineSettings,
    Fetch,
    Generate,
    LoadSnapshot,
    Refused,
    Request,
    SamplingParams,
    TransferCounts,
)
from tenfold.router.split import SplitRouter
from tenfold.router.timing import WorkerTiming
from tenfold.server.fleet import Fleet
from tenfold.server.split import divisible, places, settings_of, transferred
from tests.server.test_app import PLAN
from tests.server.test_fleet import Day

HANDOFF = {"transport": "memory", "path": "/proc/1/fd/3", "expires": 1e12}
DONE = {**HANDOFF, "expires": 2e12}
TIMING = WorkerTiming(prefill_step=0.005, prefill_token=0.001, decode_step=0.01)


class SplitDay(Day):
    """A fleet with prefill and decode workers, of which the latter have streams."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        super().__init__(1)
        self.hosts = {}
        settings = EngineSettings(
            model="m", workers=prefill + decode, prefill_workers=prefill, routed=True, transfer=True
        )
        self.fleet = Fleet(settings, self, self._host, clock=lambda: self.now)

    def streams(self) -> None:
        """Four requests that decode."""
        self.fleet.router.set_timing(TIMING)
        for number in range(4):
            at = self.send(f"s{number}", range(1000 * number, 1000 * number + 20))
            assert at is not None and at[0] == "d"
            self.hosts[at].says(Chunk(id=f"s{number}", tokens=(1,), cached_tokens=0))

    def long(self, id: str = "r") -> str | None:
        return self.send(id, range(10_000, 10_400))

    def said(self, name: str, kind: type) -> list[object]:
        return [message for message in self.hosts[name].said if type(message) is kind]

    def sent(self, name: str, id: str) -> Request:
        """The request as this worker was told it last."""
        found = [m.request for m in self.hosts[name].said if isinstance(m, Generate) and m.request.id == id]
        return found[-1]

    def begin(self) -> None:
        """The long request is begun on p0, with d0 reading along."""
        self.streams()
        assert self.long() == "p0"
        assert self.sent("p0", "r").prefill_only
        self.hosts["p0"].says(Chunk(id="r", handoff=HANDOFF))

    def finish(self, handoff: dict[str, object] | None = DONE) -> None:
        """Its prefill ends."""
        chunk = Chunk(id="r", tokens=(7,), finish="length", cached_tokens=0, handoff=handoff)
        self.hosts["p0"].says(chunk)


def play(scenario: Callable[[SplitDay], None], prefill: int = 1, decode: int = 1) -> None:
    async def run() -> None:
        day = SplitDay(prefill, decode)
        await day.fleet.start()
        scenario(day)
        assert isinstance(day.fleet.router, SplitRouter)
        day.fleet.router.check()
        await day.fleet.stop()

    asyncio.run(run())


def test_a_handover_from_end_to_end() -> None:
    """Promise: the decode worker is told to read along when the prefill is begun, and to go on with the first
    token and the final handoff; who has the request sees one stream without an end in its midst."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        (fetch,) = day.said("d0", Fetch)
        assert isinstance(fetch, Fetch) and not fetch.request.prefill_only
        assert (fetch.request.id, fetch.request.prompt) == ("r", tuple(range(10_000, 10_400)))
        assert fetch.request.handoff == HANDOFF
        day.finish()
        went_on = day.sent("d0", "r")
        assert (went_on.output, went_on.handoff, went_on.prefill_only) == ((7,), DONE, False)
        assert len(day.said("d0", Fetch)) == 1
        day.hosts["p0"].says(Chunk(id="r", tokens=(9,)))  # it has nothing more to say
        day.hosts["d0"].says(Chunk(id="r", tokens=(8,), cached_tokens=384))
        day.hosts["d0"].says(Chunk(id="r", tokens=(5,), finish="length"))
        ours = [chunk for chunk in day.chunks if chunk.id == "r"]
        assert [chunk.tokens for chunk in ours if chunk.tokens] == [(7,), (8,), (5,)]
        assert [chunk.finish for chunk in ours if chunk.finish] == ["length"]
        assert day.fleet.sent["p0"] == 1 and day.fleet.sent["d0"] == 5

    play(scenario)


def test_a_decode_worker_that_is_ahead() -> None:
    """Promise: what it says before the prefill worker's last word is heard comes after that word, in order;
    even its end."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.hosts["d0"].says(Chunk(id="r", tokens=(8,), cached_tokens=384))
        day.hosts["d0"].says(Chunk(id="r", tokens=(5,), finish="length"))
        assert [chunk for chunk in day.chunks if chunk.id == "r" and chunk.tokens] == []
        day.finish()
        ours = [chunk for chunk in day.chunks if chunk.id == "r"]
        assert [chunk.tokens for chunk in ours if chunk.tokens] == [(7,), (8,), (5,)]
        assert [chunk.finish for chunk in ours if chunk.finish] == ["length"]
        assert day.sent("d0", "r").output == (7,)
        assert all("r" not in post.requests for post in day.fleet.posts)

    play(scenario)


def test_what_one_that_has_died_had_said_ahead() -> None:
    """Promise: it is forgotten; another goes on from the first token."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        reads = next(name for name in ("d0", "d1") if day.said(name, Fetch))
        other = {"d0": "d1", "d1": "d0"}[reads]
        day.hosts[reads].says(Chunk(id="r", tokens=(8,), cached_tokens=384))
        day.hosts[reads].die()
        day.finish()
        assert day.sent(other, "r").output == (7,)
        assert [chunk.tokens for chunk in day.chunks if chunk.id == "r" and chunk.tokens] == [(7,)]

    play(scenario, decode=2)


@pytest.mark.parametrize("finish", ["stop", "error", "abort"])
def test_an_answer_that_ends_with_its_first_token(finish: str) -> None:
    """Promise: an end is an end, and nobody reads on."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.hosts["p0"].says(Chunk(id="r", tokens=(0,), finish=finish))  # type: ignore[arg-type]
        assert day.chunks[-1].finish == finish
        assert day.said("d0", Abort) == [Abort(id="r")]
        assert "r" not in day.hosts["d0"].requests()

    play(scenario)


def test_a_lost_handoff() -> None:
    """Promise: without pages the decode worker gets the request all the same, and it is counted."""

    def scenario(day: SplitDay) -> None:
        day.streams()
        day.long()
        day.finish(None)
        assert day.sent("d0", "r").handoff is None
        assert day.said("d0", Fetch) == []
        assert day.fleet.splits is not None and day.fleet.splits.not_exported == 1

    play(scenario)


def test_a_late_announcement() -> None:
    """Promise: where only the last handoff arrives, pages are fetched by that, beside the queue."""

    def scenario(day: SplitDay) -> None:
        day.streams()
        day.long()
        day.finish()
        told = [type(message) for message in day.hosts["d0"].said[-2:]]
        assert told == [Fetch, Generate]

    play(scenario)


def test_given_up_by_its_client() -> None:
    """Promise: both workers are told."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.fleet.abort("r")
        assert day.said("p0", Abort) == day.said("d0", Abort) == [Abort(id="r")]

    play(scenario)


def test_a_prefill_worker_dies() -> None:
    """Promise: the request comes back, and who read along does not go on with it under its old id."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.hosts["d0"].says(Chunk(id="r", tokens=(8,), cached_tokens=384))
        day.hosts["p0"].die()
        assert day.returned_ids == ["r"] and day.said("d0", Abort) == [Abort(id="r")]
        assert day.long("r~1") == "d0"
        assert not day.sent("d0", "r~1").prefill_only

    play(scenario)


def test_a_prefill_worker_stands_still() -> None:
    """Promise: what it had is taken away, and nobody reads along any more."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.pass_time(4, working=["d0"])
        assert "r" in day.returned_ids
        assert Abort(id="r") in day.said("p0", Abort) and Abort(id="r") in day.said("d0", Abort)

    play(scenario)


def test_decode_workers_die() -> None:
    """Promise: another one goes on; without any, the prefill worker itself does."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        reads = next(name for name in ("d0", "d1") if day.said(name, Fetch))
        other = {"d0": "d1", "d1": "d0"}[reads]
        day.hosts[reads].die()
        day.finish()
        assert [type(message) for message in day.hosts[other].said[-2:]] == [Fetch, Generate]
        day.hosts[other].die()
        assert "r" in day.returned_ids
        assert day.send("r~1") == "p0"

    def without(day: SplitDay) -> None:
        day.begin()
        day.hosts["d0"].die()
        day.finish()
        assert day.sent("p0", "r").output == (7,) and not day.sent("p0", "r").prefill_only

    play(scenario, decode=2)
    play(without)


def test_a_drained_decode_worker_stops_reading() -> None:
    """Promise: who is to be replaced does not go on with it, and is told so."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        reads = next(name for name in ("d0", "d1") if day.said(name, Fetch))
        day.fleet.router.drain(reads)
        day.finish()
        assert day.said(reads, Abort) == [Abort(id="r")]
        assert "r" in day.hosts[{"d0": "d1", "d1": "d0"}[reads]].requests()

    play(scenario, decode=2)


def test_nobody_is_left() -> None:
    """Promise: a request whose prefill ends when no worker takes any comes back, and waits."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.fleet.router.drain("p0")
        day.fleet.router.drain("d0")
        day.finish()
        assert day.returned_ids == ["r"] and day.deaths == []
        day.fleet.router.undrain("d0")
        assert day.long("r~1") == "d0"

    play(scenario)


def test_a_refused_prompt_is_the_requests_fault() -> None:
    """Promise: the refusal of a prefill worker is passed on, and the next request is served."""

    def scenario(day: SplitDay) -> None:
        day.begin()
        day.hosts["p0"].events.worker_message(Refused(id="r", error="no", field="prompt"))
        assert day.said("d0", Abort) == [Abort(id="r")]
        assert day.long("q") == "p0"

    play(scenario)


def test_what_the_router_learns_of_transfers() -> None:
    """Promise: means of what was new since the last word of a worker."""

    def load(pages: int, import_s: float, starts: int, start_s: float) -> LoadSnapshot:
        counts = TransferCounts(
            exported_pages=3,
            declined=1,
            imported_pages=pages,
            imports={"imported": starts},
            page_bytes=10,
            import_s=import_s,
            fallbacks={"gone": 2},
            starts=starts,
            start_s=start_s,
        )
        return LoadSnapshot(
            running=0,
            waiting=0,
            pages_total=0,
            pages_free=0,
            steps=0,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            preemptions=0,
            transfer=counts,
        )

    def scenario(day: SplitDay) -> None:
        splits, router = day.fleet.splits, day.fleet.router
        assert splits is not None and isinstance(router, SplitRouter)
        before = router.transfer
        splits.load("d0", load(100, 100 * before.page_s, 1, before.start_s))
        assert router.transfer == before
        splits.load("d0", load(100, 100 * before.page_s, 1, before.start_s))
        splits.load("d0", load(200, 1.0, 2, 1.0))
        assert router.transfer.page_s > before.page_s and router.transfer.start_s > before.start_s
        counts = transferred([load(200, 1.0, 2, 1.5), load(1, 0.5, 0, 0.0)])
        assert counts["imported_bytes"] == 2010 and counts["import_us"] == 1_500_000
        assert counts["fallbacks:gone"] == 4 and counts["imports:imported"] == 2

    play(scenario)


def test_names_and_roles() -> None:
    """Promise: p0.. and d0.. with their roles; w0.. where all do both."""
    split = EngineSettings(model="m", workers=3, prefill_workers=1)
    assert places(split) == [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")]
    assert settings_of(split, "p0").role == "prefill" and settings_of(split, "d1").role == "decode"
    mixed = EngineSettings(model="m", workers=2)
    assert places(mixed) == [("w0", "mixed"), ("w1", "mixed")]
    assert settings_of(mixed, "w1") is mixed


@pytest.mark.parametrize(
    ("prompt", "output", "most", "can"),
    [(10, 0, 2, True), (10, 0, 1, False), (10, 1, 2, False), (PLAN.max_context - 1, 0, None, False)],
)
def test_what_can_be_split(prompt: int, output: int, most: int | None, can: bool) -> None:
    """Promise: only what has two tokens or more to come."""
    params = SamplingParams(max_tokens=most)
    request = Request(id="a", prompt=tuple(range(prompt)), output=tuple(range(output)), params=params)
    assert divisible(request, PLAN) == can
