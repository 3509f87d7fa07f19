"""Requests between their acceptance and their end, whatever happens to the worker meanwhile.

Who owns what: `Flights` has the table of requests in flight and is told of the worker's life by its
supervisor; a `Flight` belongs to the HTTP handler that submitted it, which must release it. A flight ends in
exactly one way: with a chunk that has a finish reason, or with an exception from `Flight.next`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

import msgspec

from tenfold.protocol import Abort, Chunk, Chunks, EnginePlan, EngineSettings, Generate, Refused, Request
from tenfold.server.errors import ApiError, broken, invalid, unavailable
from tenfold.server.metrics import Metrics
from tenfold.server.supervisor import Supervisor
from tenfold.worker.process import ENGINE_BUILDER

MAX_DEATHS = 2
"""So many workers may die with a request in flight; then it is given up, for it may be what kills them."""
MAX_RETRY_AFTER_S = 60
_KNOWN_ENDS = 16
"""From fewer ends no rate is to be had: the first requests of a burst end late, and then many at once."""


class ClientGone(Exception):
    """Nobody waits for this request any more."""


class Flight:
    """One request in flight."""

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.submitted_at = now
        self.first_at: float | None = None
        """When its first token arrived."""
        self.last_at = now
        """When its latest token arrived."""
        self.tokens: list[int] = []
        """All tokens received: what a new worker must know to carry on."""
        self.sent = False
        self.deaths = 0
        self._news: list[Chunk] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Chunk]:
        """Waits for news and takes all there is. Raises ApiError or ClientGone for a request that failed."""
        if not self._news and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._news:
            news, self._news = self._news, []
            return news
        assert self._error is not None
        raise self._error

    def arrived(self, chunk: Chunk) -> None:
        """News; wakes the handler."""
        self._news.append(chunk)
        self._wake()

    def fail(self, error: Exception) -> None:
        """The end, as an exception for the handler."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Flights:
    """All requests in flight, over one supervised worker."""

    def __init__(
        self,
        settings: EngineSettings,
        metrics: Metrics,
        *,
        max_queue: int,
        stall_after_s: float,
        builder: str = ENGINE_BUILDER,
    ) -> None:
        self._most = settings.max_running + max_queue
        self._max_running = settings.max_running
        self._stall_after_s = stall_after_s
        self._metrics = metrics
        self._supervisor = Supervisor(settings, self, builder)
        self._flights: dict[str, Flight] = {}
        self._ends: deque[float] = deque(maxlen=64)
        self._progress_at = time.monotonic()
        self._steps = 0
        self._down: str | None = None
        self._closing: str | None = None

    async def start(self) -> EnginePlan:
        """Starts the worker. Raises StartError."""
        return await self._supervisor.start()

    async def ended(self) -> None:
        """See `Supervisor.ended`."""
        await self._supervisor.ended()

    async def stop(self) -> None:
        """Ends every flight, then the worker. Raises StartError as `Supervisor.stop` does."""
        self.abort_all("the server is shutting down")
        await self._supervisor.stop()

    def refuse_new(self, reason: str) -> None:
        """From now on `submit` answers 503; flights go on."""
        self._closing = reason

    def abort_all(self, reason: str) -> None:
        """Ends every flight with 503 ``reason``."""
        self.refuse_new(reason)
        for flight in list(self._flights.values()):
            self._end(flight, unavailable(reason, 1))

    def submit(self, request: Request) -> Flight:
        """Takes up a request. Raises ApiError: 429 when too many wait, 503 when the server cannot serve."""
        if self._closing is not None:
            raise unavailable(self._closing, 1)
        if self._down is not None:
            raise unavailable(f"the worker cannot be started: {self._down}", 10)
        if len(self._flights) >= self._most:
            wait_s = self._retry_after_s()
            raise ApiError(
                429,
                f"{len(self._flights)} requests are running or waiting, the most this server takes; "
                f"try again in {wait_s} s",
                type="rate_limit_error",
                code="queue_full",
                headers=(("retry-after", str(wait_s)),),
            )
        now = time.monotonic()
        if not self._flights:
            self._progress_at = now
            self._ends.clear()  # from before the server fell idle: they say nothing of its rate
        flight = Flight(request, now)
        self._flights[request.id] = flight
        self._metrics.in_flight += 1
        self._send(flight)
        return flight

    def release(self, flight: Flight, keep: int | None = None) -> None:
        """The handler is done with it; if the engine is not, it is told. ``keep``: see `Abort`."""
        if self._forget(flight):
            self._supervisor.send(Abort(id=flight.request.id, keep=keep))

    def cancel(self, flight: Flight) -> None:
        """The client is gone."""
        self._end(flight, ClientGone())

    def not_ready(self) -> str | None:
        """None if requests make progress, or could; else why not."""
        if self._closing is not None:
            return self._closing
        if self._down is not None:
            return f"the worker cannot be started: {self._down}"
        if not self._supervisor.up:
            return "the worker is starting"
        still_s = time.monotonic() - self._progress_at
        if self._flights and still_s > self._stall_after_s:
            return f"no step for {still_s:.0f} s with {len(self._flights)} requests in flight"
        return None

    def worker_ready(self, plan: EnginePlan) -> None:
        """Whoever is in flight carries on here, from the tokens received."""
        self._down = None
        self._steps = 0
        self._progress_at = time.monotonic()
        for flight in self._flights.values():
            self._send(flight)

    def worker_lost(self) -> None:
        """Counts the death for all who were there; gives up on those who saw too many."""
        self._metrics.worker_gone()
        self._metrics.worker_restarts += 1
        for flight in list(self._flights.values()):
            if flight.sent:
                flight.sent = False
                flight.deaths += 1
                if flight.deaths >= MAX_DEATHS:
                    self._end(flight, broken(f"{MAX_DEATHS} workers died while they computed this request"))

    def worker_down(self, reason: str) -> None:
        """Nobody can be helped for now."""
        self._down = reason
        for flight in list(self._flights.values()):
            self._end(flight, unavailable(f"the worker cannot be started: {reason}", 10))

    def worker_message(self, message: Chunks | Refused) -> None:
        """News from the worker."""
        now = time.monotonic()
        if isinstance(message, Refused):
            flight = self._flights.get(message.id)
            if flight is not None:
                self._end(flight, invalid(message.field, message.error))
            return
        if message.load is not None:
            self._metrics.load = message.load
            if message.load.steps != self._steps:
                self._steps = message.load.steps
                self._progress_at = now
        if message.chunks:
            self._progress_at = now
        for chunk in message.chunks:
            flight = self._flights.get(chunk.id)
            if flight is not None:  # else it was aborted a moment ago
                self._take(flight, chunk, now)

    def _take(self, flight: Flight, chunk: Chunk, now: float) -> None:
        metrics = self._metrics
        if chunk.tokens:
            count = len(chunk.tokens)
            flight.tokens += chunk.tokens
            metrics.generated_tokens += count
            if flight.first_at is None:
                flight.first_at = now
                metrics.ttft.observe(now - flight.submitted_at)
            else:
                metrics.itl.observe((now - flight.last_at) / count, count)
            flight.last_at = now
        flight.arrived(chunk)
        if chunk.finish is not None:
            self._forget(flight)

    def _send(self, flight: Flight) -> None:
        if self._supervisor.up:
            request = flight.request
            if flight.tokens:
                request = msgspec.structs.replace(request, output=tuple(flight.tokens))
            flight.sent = True
            self._supervisor.send(Generate(request=request))

    def _end(self, flight: Flight, error: Exception) -> None:
        self.release(flight)
        flight.fail(error)

    def _forget(self, flight: Flight) -> bool:
        if self._flights.pop(flight.request.id, None) is None:
            return False
        self._metrics.in_flight -= 1
        self._ends.append(time.monotonic())
        return True

    def _retry_after_s(self) -> int:
        """When those who wait now will have begun, at the rate at which requests ended lately."""
        waiting = len(self._flights) - self._max_running
        if len(self._ends) < _KNOWN_ENDS:
            return 1
        span_s = time.monotonic() - self._ends[0]
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(waiting * span_s / (len(self._ends) - 1))))
