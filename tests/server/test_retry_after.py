"""When a refused client shall come again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tenfold.server.flights as flights_module
from tenfold.protocol import EngineSettings, Request, SamplingParams
from tenfold.server.errors import ApiError
from tenfold.server.flights import Flight, Flights
from tenfold.server.metrics import Metrics


class Day:
    """Flights on a clock of the test's own: 4 run, 60 wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(flights_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = EngineSettings(model="m", max_running=4)
        self.flights = Flights(settings, Metrics(), max_queue=60, stall_after_s=30)
        self.open: list[Flight] = []
        self._ids = 0

    def fill(self) -> None:
        while len(self.open) < 64:
            self._ids += 1
            request = Request(id=str(self._ids), prompt=(1,), params=SamplingParams())
            self.open.append(self.flights.submit(request))

    def end(self, count: int, every_s: float) -> None:
        for _ in range(count):
            self.now += every_s
            self.flights.release(self.open.pop(0))

    def refused(self) -> int:
        with pytest.raises(ApiError) as caught:
            self.flights.submit(Request(id="late", prompt=(1,), params=SamplingParams()))
        assert caught.value.status == 429
        return int(dict(caught.value.headers)["retry-after"])


def test_a_burst_is_not_sent_away_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended before the server was idle, and the start of a burst, say nothing of its rate."""
    day = Day(monkeypatch)
    day.fill()
    day.end(64, 0.01)
    day.now += 3600
    day.fill()
    assert day.refused() == 1
    day.end(15, 0.3)  # the first of a burst are slow
    day.fill()
    assert day.refused() == 1
    day.end(64, 0.003)
    day.fill()
    assert day.refused() == 1


@pytest.mark.parametrize(("every_s", "wait_s"), [(0.001, 1), (0.1, 6), (0.5, 30), (5.0, 60)])
def test_the_rate_of_ends_is_the_estimate(
    monkeypatch: pytest.MonkeyPatch, every_s: float, wait_s: int
) -> None:
    """Sixty wait, and one ends every so many seconds: that long, within bounds."""
    day = Day(monkeypatch)
    for _ in range(5):
        day.fill()
        day.end(20, every_s)
    day.fill()
    assert abs(day.refused() - wait_s) <= 1


@pytest.mark.parametrize(("running", "queue"), [(1, 4), (16, 4), (64, 16), (400, 100)])
def test_who_is_taken_waits_for_a_quarter_of_what_a_request_takes(running: int, queue: int) -> None:
    """Unless another limit was asked for: q that wait, where ``running`` are computed at once, take q /
    running of the time of one. Further choices of a request do not count."""
    flights = Flights(
        EngineSettings(model="m", max_running=running), Metrics(), max_queue=None, stall_after_s=30
    )
    for number in range(running + queue):
        flights.submit(Request(id=str(number), prompt=(1,), params=SamplingParams()))
    with pytest.raises(ApiError) as caught:
        flights.submit(Request(id="late", prompt=(1,), params=SamplingParams()))
    assert caught.value.status == 429 and dict(caught.value.headers)["retry-after"]
    for number in range(running + queue, running + 256):
        flights.submit(Request(id=str(number), prompt=(1,), params=SamplingParams()), admitted=True)
    with pytest.raises(ApiError):
        flights.submit(Request(id="late", prompt=(1,), params=SamplingParams()), admitted=True)


@pytest.mark.parametrize("queue", [0, 4, 300])
def test_the_limit_that_was_asked_for_is_of_requests(queue: int) -> None:
    """Further parts of one that was taken wait beyond it, as many as a request can have; if more may wait
    anyway, so many."""
    flights = Flights(EngineSettings(model="m", max_running=2), Metrics(), max_queue=queue, stall_after_s=30)
    taken = 0
    for limit, admitted in ((2 + queue, False), (2 + max(queue, 256), True)):
        while taken < limit:
            request = Request(id=str(taken), prompt=(1,), params=SamplingParams())
            flights.submit(request, admitted=admitted)
            taken += 1
        with pytest.raises(ApiError, match=f"{limit} requests are running or waiting"):
            flights.submit(Request(id="late", prompt=(1,), params=SamplingParams()), admitted=admitted)
