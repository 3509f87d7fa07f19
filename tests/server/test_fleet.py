"""What a fleet does with its workers, on a clock and with hosts of the tests' own: no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tenfold.protocol import (
    Abort,
    Chunk,
    Chunks,
    EnginePlan,
    EngineSettings,
    FrontMessage,
    Generate,
    KVEvents,
    KVSnapshot,
    LoadSnapshot,
    Pages,
    PagesStored,
    Refused,
    Request,
    Resync,
    SamplingParams,
)
from tenfold.router.names import page_names
from tenfold.router.policies import Policy
from tenfold.router.timing import WorkerTiming
from tenfold.server.fleet import KILL_AFTER_S, TICK_S, Fleet
from tenfold.server.host import WorkerEvents
from tests.server.test_app import PLAN

SLOW = WorkerTiming(prefill_step=0.1, prefill_token=0.02, decode_step=0.1)
"""Ten seconds for a full step."""


class FakeHost:
    """A worker that does what the test says."""

    def __init__(self, events: WorkerEvents) -> None:
        self.events = events
        self.said: list[FrontMessage] = []
        self.kills = 0
        self.cpu = 0.0
        self.up = False

    async def start(self) -> EnginePlan:
        self.ready()
        return PLAN

    async def restart(self) -> EnginePlan:
        self.die(planned=True)
        self.ready()
        return PLAN

    def ready(self) -> None:
        self.up = True
        self.events.worker_ready(PLAN)

    def die(self, planned: bool = False) -> None:
        self.up = False
        self.events.worker_lost(planned)

    def send(self, message: FrontMessage) -> None:
        self.said.append(message)

    def kill(self) -> None:
        self.kills += 1
        self.die()

    def cpu_seconds(self) -> float | None:
        return self.cpu

    async def ended(self) -> None: ...

    async def stop(self) -> None: ...

    def requests(self) -> list[str]:
        """Sent there and not aborted."""
        ids = [message.request.id for message in self.said if isinstance(message, Generate)]
        gone = {message.id for message in self.said if isinstance(message, Abort)}
        return [id for id in ids if id not in gone]

    def says(
        self,
        *chunks: Chunk,
        steps: int | None = None,
        events: KVEvents | None = None,
        waiting: int = 0,
    ) -> None:
        load = None
        if steps is not None:
            load = LoadSnapshot(
                running=0,
                waiting=waiting,
                pages_total=64,
                pages_free=64,
                steps=steps,
                prompt_tokens=0,
                cached_tokens=0,
                generated_tokens=0,
                preemptions=0,
                kv_sequence=0 if events is None else events.sequence,
            )
        self.events.worker_message(Chunks(chunks=chunks, load=load, events=events))


class Day:
    """A fleet, its clock, and what it tells."""

    def __init__(self, workers: int = 2, policy: Policy = "cache-aware", accepts: bool = False) -> None:
        self.now = 100.0
        self.steps = 0
        self.hosts: dict[str, FakeHost] = {}
        self.returned_ids: list[str] = []
        self.deaths: list[str] = []
        self.suspects: list[str] = []
        self.chunks: list[Chunk] = []
        self.downs: list[str] = []
        settings = EngineSettings(model="m", workers=workers, routed=workers > 1)
        self.fleet = Fleet(settings, self, self._host, policy=policy, clock=lambda: self.now, accepts=accepts)

    def _host(self, name: str, events: WorkerEvents) -> FakeHost:
        self.hosts[name] = FakeHost(events)
        return self.hosts[name]

    def pass_time(
        self,
        seconds: float,
        working: Sequence[str] = (),
        talking: Sequence[str] = (),
        computing: Sequence[str] = (),
    ) -> None:
        """Ticks; ``working`` workers make steps and say so, ``talking`` ones only say that they live,
        ``computing`` ones use their CPU and say nothing."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for name in working:
                self.steps += 1
                self.hosts[name].says(steps=self.steps)
            for name in talking:
                self.hosts[name].says(steps=0)
            for name in computing:
                self.hosts[name].cpu += TICK_S
            assert self.fleet._ticking is not None
            self.fleet._ticking.cancel()
            self.fleet._tick()

    def send(self, id: str, prompt: range = range(40), namespace: str = "") -> str | None:
        """The worker that gets a request; None if it waits."""
        request = Request(id=id, prompt=tuple(prompt), params=SamplingParams(), namespace=namespace)
        if self.fleet.send([request]) != [id]:
            return None
        return next(name for name, host in self.hosts.items() if id in host.requests())

    def news(self, chunks: Sequence[Chunk]) -> None:
        self.chunks += chunks

    def progress(self) -> None: ...

    def load(self, worker: str, load: LoadSnapshot) -> None: ...

    def lost(self, worker: str, planned: bool) -> None: ...

    def refused(self, message: Refused) -> None: ...

    def returned(self, ids: Sequence[str], died: bool) -> None:
        self.returned_ids += ids
        self.deaths += ids if died else ()

    def suspected(self, ids: Sequence[str]) -> None:
        self.suspects += ids

    def ready(self) -> None: ...

    def room(self) -> None: ...

    def down(self, reason: str) -> None:
        self.downs.append(reason)


def play(scenario: Callable[[Day], None], workers: int = 2, policy: Policy = "cache-aware") -> None:
    """Runs a scenario with workers that are ready."""

    async def run() -> None:
        day = Day(workers, policy)
        await day.fleet.start()
        scenario(day)
        await day.fleet.stop()

    asyncio.run(run())


def stored(prompt: range, namespace: str = "", sequence: int = 1) -> KVEvents:
    return KVEvents(sequence=sequence, events=(PagesStored(page_names(prompt, 16, namespace)),))


def other(name: str) -> str:
    return "w1" if name == "w0" else "w0"


def test_a_prompt_goes_where_it_lies_within_its_namespace() -> None:
    """Promise: workers' events steer requests, and pages of one namespace attract no request of another."""

    def scenario(day: Day) -> None:
        day.hosts["w1"].says(steps=1, events=stored(range(320), "team"))
        for number in range(3):
            assert day.send(f"team {number}", range(320), "team") == "w1"
            day.fleet.abort(f"team {number}")
        found = day.fleet.router.counts.overlap_tokens
        assert found == 3 * 320
        day.send("other", range(320), "other")
        day.send("none", range(320))
        assert day.fleet.router.counts.overlap_tokens == found

    play(scenario)


def test_a_silent_worker_loses_its_requests_and_then_its_life() -> None:
    """Promise: a worker that neither speaks nor computes gets nothing new after 3 s, its requests go
    elsewhere, and after 10 s it is killed; its requests are not to blame for that."""

    def scenario(day: Day) -> None:
        stopped = day.send("r")
        assert stopped is not None
        alive = other(stopped)
        day.pass_time(4, working=[alive])
        assert day.returned_ids == ["r"] and day.hosts[stopped].requests() == []
        assert day.send("r~1") == alive
        assert not day.deaths and not day.suspects and not day.hosts[stopped].kills
        # What it says of the old request when it wakes is nobody's news.
        day.pass_time(KILL_AFTER_S, working=[alive])
        assert day.hosts[stopped].kills == 1
        assert not day.deaths and not day.suspects
        assert day.hosts[alive].kills == 0
        day.hosts[stopped].ready()
        assert set(day.fleet.router.usable()) == {"w0", "w1"}

    play(scenario)


def test_a_worker_that_speaks_again_is_used_again() -> None:
    """Promise: a pause costs a worker its requests and nothing else; late news of those are dropped."""

    def scenario(day: Day) -> None:
        stopped = day.send("r")
        assert stopped is not None
        alive = other(stopped)
        day.pass_time(5, working=[alive])
        day.hosts[stopped].says(Chunk(id="r", tokens=(1,), cached_tokens=0), steps=3)
        assert day.chunks == []
        assert set(day.fleet.router.usable()) == {"w0", "w1"}
        day.pass_time(20, working=[alive, stopped])
        assert not day.hosts[stopped].kills and not day.suspects

    play(scenario)


def test_a_long_step_is_no_silence() -> None:
    """Promise: a worker that says nothing and computes is left alone; idle ones that speak once a second
    are."""

    def scenario(day: Day) -> None:
        day.fleet.router.set_timing(SLOW)
        busy = day.send("r")
        assert busy is not None
        for _ in range(10):
            day.hosts[other(busy)].says(steps=0)
            day.pass_time(1, computing=[busy])
        assert day.returned_ids == []
        assert day.fleet.router.counts.silent == 0

    play(scenario)


def test_a_worker_that_lives_and_gets_nowhere_is_noticed() -> None:
    """Promise: one that says it lives, for ever without a step, loses its requests by their deadline, is
    sent nothing new, and is killed in the end."""

    def scenario(day: Day) -> None:
        stuck = day.send("r")
        assert stuck is not None
        day.pass_time(10, talking=[stuck], working=[other(stuck)])
        assert day.returned_ids == ["r"]
        assert day.send("new", range(1000, 1040)) == other(stuck)
        day.pass_time(50, talking=[stuck], working=[other(stuck)])
        assert day.hosts[stuck].kills == 1
        assert day.suspects == ["r"]

    play(scenario)


def test_the_last_worker_keeps_its_requests() -> None:
    """Promise: nothing is taken from a worker when there is no other; when one comes, it is."""

    def scenario(day: Day) -> None:
        stopped = day.send("r")
        assert stopped is not None
        day.hosts[other(stopped)].die()
        day.pass_time(5)
        assert day.returned_ids == [] and day.hosts[stopped].requests() == ["r"]
        day.hosts[other(stopped)].ready()
        assert day.returned_ids == ["r"]

    play(scenario)


def test_one_worker_is_never_judged() -> None:
    """Promise: with a single worker the fleet has no deadlines, as there is nobody to turn to."""

    async def run() -> None:
        day = Day(1)
        await day.fleet.start()
        assert day.send("r") == "w0"
        assert day.fleet._ticking is None
        await day.fleet.stop()

    asyncio.run(run())


def test_a_worker_that_joins_has_a_post_as_long_as_it_is_there() -> None:
    """Promise: it gets requests when it is ready; one that brought pages is asked which, and that is no gap;
    when it goes, so does its post, and its requests are sent anew."""

    async def run() -> None:
        day = Day(1, accepts=True)
        await day.fleet.start()
        day.hosts["w0"].says(steps=1)
        post = day.fleet.join("w0", "10.0.0.2:5000")
        assert (post.name, post.state) == ("w0-2", "starting")
        host = day.hosts["w0-2"] = FakeHost(post)
        post.host = host
        assert day.send("first") == "w0"
        host.up = True
        post.worker_ready(PLAN, warm=True)
        day.pass_time(2 * TICK_S, talking=["w0", "w0-2"])
        assert sum(isinstance(message, Resync) for message in host.said) == 1
        names = page_names(range(1000, 1320), 16)
        host.events.worker_message(Pages(snapshot=KVSnapshot(sequence=7, names=names)))
        assert day.fleet.router.counts.gaps == 0
        assert day.send("second", range(1000, 1320)) == "w0-2"
        assert day.send("third", range(1000, 1320)) == "w0-2"
        host.die()
        assert [one.name for one in day.fleet.posts] == ["w0"]
        assert day.returned_ids == ["second", "third"]
        assert day.send("second~1", range(1000, 1320)) == "w0"
        await day.fleet.stop()

    asyncio.run(run())


def test_a_worker_that_retires_keeps_its_requests_for_a_while() -> None:
    """Promise: it gets nothing new; what ends in time ends there, the rest goes elsewhere, and no death is
    counted."""

    async def run() -> None:
        day = Day(1, accepts=True)
        await day.fleet.start()
        post = day.fleet.join("far", "10.0.0.2:5000")
        host = day.hosts["far"] = FakeHost(post)
        post.host = host
        host.ready()
        placed: dict[str, str | None] = {}
        for number in range(8):
            placed[f"r{number}"] = day.send(f"r{number}", range(number * 100, number * 100 + 40))
        there = [id for id, name in placed.items() if name == "far"]
        assert len(there) >= 2
        leaving = asyncio.ensure_future(day.fleet.retire(post, 0.3))
        await asyncio.sleep(0)
        assert day.send("new", range(9000, 9040)) == "w0"
        host.says(Chunk(id=there[0], tokens=(1,), finish="stop"))
        await leaving
        assert day.returned_ids == there[1:] and not day.deaths and host.requests() == [there[0]]
        host.die(planned=True)
        await day.fleet.stop()

    asyncio.run(run())


def test_a_lost_message_is_healed() -> None:
    """Promise: a gap in a worker's events makes the fleet ask for all its pages, and believe the answer."""

    def scenario(day: Day) -> None:
        host = day.hosts["w1"]
        host.says(steps=1, events=stored(range(320), sequence=2))
        day.pass_time(2 * TICK_S, talking=["w0"])
        assert sum(isinstance(message, Resync) for message in host.said) == 1
        names = page_names(range(1000, 1320), 16)
        host.events.worker_message(Pages(snapshot=KVSnapshot(sequence=2, names=names)))
        assert day.fleet.router.pages("w1") == set(names)
        assert day.fleet.router.in_step("w1")
        assert day.send("r", range(1000, 1320)) == "w1"

    play(scenario)


def test_both_die_at_once_and_nothing_is_sent_into_the_void() -> None:
    """Promise: requests wait until one is there again, and none is forgotten."""

    def scenario(day: Day) -> None:
        sent = {day.send(id): id for id in ("a", "b")}
        assert len(sent) == 2
        day.hosts["w0"].die()
        day.hosts["w1"].die()
        assert sorted(day.deaths) == ["a", "b"]
        assert day.send("a~1") is None
        assert not day.fleet.up
        day.hosts["w1"].ready()
        assert day.send("a~1") == "w1"
        day.fleet.router.check()

    play(scenario)


def test_those_that_waited_are_not_to_blame() -> None:
    """Promise: of the requests on a worker that dies, those in its queue count no death."""

    def scenario(day: Day) -> None:
        ids = [str(number) for number in range(4)]
        assert {day.send(id) for id in ids} == {"w0"}
        day.hosts["w0"].says(steps=1, waiting=3)
        day.hosts["w0"].die()
        assert sorted(day.returned_ids) == ids
        assert day.deaths == ["0"]

    play(scenario, workers=1)


def test_rolling_replaces_each_and_moves_what_takes_too_long() -> None:
    """Promise: workers go one after another; what is not done in time goes on elsewhere, and counts no
    death."""

    async def run() -> None:
        day = Day(2)
        await day.fleet.start()
        first, second = day.send("a"), day.send("b", range(500, 540))
        assert first != second
        await day.fleet.roll(0.0)
        assert sorted(day.returned_ids) == ["a", "b"]
        assert not day.deaths and not day.suspects
        assert set(day.fleet.router.usable()) == {"w0", "w1"}
        await day.fleet.stop()

    asyncio.run(run())


def test_the_policies_can_be_chosen() -> None:
    """Promise: round-robin takes turns whatever is known."""

    def scenario(day: Day) -> None:
        day.hosts["w1"].says(steps=1, events=stored(range(320)))
        assert [day.send(str(number), range(320)) for number in range(4)] == ["w0", "w1", "w0", "w1"]

    play(scenario, policy="round-robin")


def test_as_long_as_one_may_come_nobody_is_given_up() -> None:
    """Promise: only when no worker can be started the requests are told."""

    def scenario(day: Day) -> None:
        for number, name in enumerate(("w0", "w1")):
            assert day.downs == [] and number < 2
            day.hosts[name].die()
            day.hosts[name].events.worker_down("no memory")
        assert day.downs == ["no memory"]

    play(scenario)
