"""Requests between their acceptance and their end, whatever happens to workers meanwhile.

Who owns what: `Flights` has the table of requests in flight and is told by the fleet what became of them on
the workers; a `Flight` belongs to the HTTP handler that submitted it, which must release it. A flight ends in
exactly one way: with a chunk that has a finish reason, or with an exception from `Flight.next`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from tenfold.protocol import Chunk, EnginePlan, EngineSettings, LoadSnapshot, Refused, Request
from tenfold.router.policies import Policy
from tenfold.server.errors import ApiError, broken, invalid, unavailable
from tenfold.server.fleet import Fleet
from tenfold.server.metrics import Metrics
from tenfold.server.post import Post
from tenfold.server.split import settings_of
from tenfold.server.supervisor import Supervisor
from tenfold.worker.process import ENGINE_BUILDER

log = logging.getLogger(__name__)

NOBODY = "there is no worker: this server has none of its own, and none has joined"
MAX_DEATHS = 2
"""So many workers may die one after another with a request in flight that got on with nothing between; then
it is given up, for it may be what kills them. Where it got beyond the point at which a worker died, that was
not its doing: the same rows were computed again, and did no harm."""
MAX_DEATHS_IN_ALL = 5
"""So many with progress between."""
MAX_UNREAD_BYTES = 8 << 20
"""Most that waits for one client: some 24,000 tokens of plain text, 2,400 with 20 log-probabilities each."""
WAIT_SHARE = 0.25
"""So much of the time that a request takes it may be expected to wait before it begins, where nothing else is
said: under overload those that are taken keep nearly their latency, and others are told at once to come
again."""
MIN_QUEUE = 4
"""With few running, so many may wait all the same."""
MAX_PARTS = 256
"""So many parts of requests that were taken may wait at least: one request may have 128 choices."""
MAX_RETRY_AFTER_S = 60
_KNOWN_ENDS = 16
"""From fewer ends no rate is to be had: the first requests of a burst end late, and then many at once."""


class Backlog:
    """What has arrived for one client and was not taken: it reads its stream more slowly than tokens come.
    Shared by the flights of a request."""

    def __init__(self) -> None:
        self.bytes = 0
        """About so many, in this process's memory."""


class ClientGone(Exception):
    """Nobody waits for this request any more."""


class Flight:
    """One request in flight."""

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.submitted_at = now
        self.first_at: float | None = None
        """When its first token arrived, or its embedding."""
        self.last_at = now
        """When its latest token arrived."""
        self.tokens: list[int] = []
        """All tokens received: what a new worker must know to carry on."""
        self.sent: str | None = None
        """The id by which it was sent to a worker; None: it is on none."""
        self.sends = 0
        self.heard_of = False
        """Since it was sent last: the worker has it."""
        self.deaths = 0
        self._deaths_here = 0
        """Since its last progress."""
        self._tokens_at_death = 0
        self.backlog = Backlog()
        self._news: list[Chunk] = []
        self._news_bytes = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Chunk]:
        """Waits for news and takes all there is. Raises ApiError or ClientGone for a request that failed."""
        if not self._news and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._news:
            news, self._news = self._news, []
            self.backlog.bytes -= self._news_bytes
            self._news_bytes = 0
            return news
        assert self._error is not None
        raise self._error

    def arrived(self, chunk: Chunk) -> bool:
        """News; wakes the handler. False: the client takes too little of them, and the request is to end."""
        size = _bytes_of(chunk)
        self._news.append(chunk)
        self._news_bytes += size
        self.backlog.bytes += size
        self._wake()
        return self.backlog.bytes <= MAX_UNREAD_BYTES

    def fail(self, error: Exception) -> None:
        """The end, as an exception for the handler."""
        self._error = error
        self._wake()

    def died(self) -> bool:
        """A worker died with it. True: it is to be given up. From the second on, only a worker that was known
        to have it counts: when several die at once, what was sent from one to the next was never there."""
        if self.deaths and not self.heard_of:
            return False
        if len(self.tokens) > self._tokens_at_death:
            self._deaths_here = 0
        self._tokens_at_death = len(self.tokens)
        self._deaths_here += 1
        self.deaths += 1
        return self._deaths_here >= MAX_DEATHS or self.deaths >= MAX_DEATHS_IN_ALL

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Flights:
    """All requests in flight for one model, over its fleet of workers. ``drain_s``: how long a worker that is
    to be replaced lets its requests go on. ``prefix``: see `Fleet`."""

    def __init__(
        self,
        settings: EngineSettings,
        metrics: Metrics,
        *,
        max_queue: int | None,
        stall_after_s: float,
        builder: str = ENGINE_BUILDER,
        routing: Policy = "cache-aware",
        drain_s: float = 5.0,
        prefix: str = "",
        accepts: bool = False,
    ) -> None:
        """``accepts``: workers of other machines may `join`."""
        self._settings = settings
        self._max_queue = max_queue
        self._drain_s = drain_s
        self._stall_after_s = stall_after_s
        self._metrics = metrics
        ranks = itertools.count()
        self._fleet = Fleet(
            settings,
            self,
            lambda name, events: Supervisor(
                msgspec.structs.replace(settings_of(settings, name), rank=next(ranks)), events, builder, name
            ),
            policy=routing,
            hang_after_s=stall_after_s,
            prefix=prefix,
            accepts=accepts,
        )
        metrics.fleet = self._fleet
        self._flights: dict[str, Flight] = {}
        self._sent: dict[str, Flight] = {}
        """By the id they were sent with."""
        self._waiting: dict[str, Flight] = {}
        """On no worker, by their own id, in the order to be sent."""
        self._started = False
        self._rolling: asyncio.Task[None] | None = None
        self._ends: deque[float] = deque(maxlen=64)
        self._progress_at = time.monotonic()
        self._manned_at = time.monotonic()
        """When there was last any worker, or one on its way,"""
        self._manned_for = 0
        """and how many requests they could run."""
        self._down: str | None = None
        self._closing: str | None = None

    async def start(self) -> EnginePlan:
        """Starts the workers. Raises StartError."""
        plan = await self._fleet.start()
        self._started = True
        return plan

    async def ended(self) -> None:
        """See `Fleet.ended`."""
        await self._fleet.ended()

    async def stop(self) -> None:
        """Ends every flight, then the workers. Raises StartError as `Fleet.stop` does."""
        self.abort_all("the server is shutting down")
        await self._fleet.stop()

    def roll(self) -> None:
        """Begins to replace the workers one after another; see `Fleet.roll`. Does nothing before all are
        there, while that goes on already, or when the server is shutting down."""
        if self._started and self._closing is None and (self._rolling is None or self._rolling.done()):
            self._rolling = asyncio.get_running_loop().create_task(self._fleet.roll(self._drain_s))

    async def rolled(self) -> None:
        """Waits until `roll` has come to its end."""
        if self._rolling is not None:
            await asyncio.wait([self._rolling])

    def join(self, name: str, address: str) -> Post:
        """See `Fleet.join`."""
        return self._fleet.join(name, address)

    async def retire(self, post: Post) -> None:
        """See `Fleet.retire`."""
        log.info(
            "worker %s leaves: its %d requests may take %g s more",
            post.name,
            len(post.requests),
            self._drain_s,
        )
        await self._fleet.retire(post, self._drain_s)

    @property
    def kv_tokens(self) -> int | None:
        """See `Fleet.kv_tokens`."""
        return self._fleet.kv_tokens

    @property
    def plan(self) -> EnginePlan | None:
        """Of any worker that takes requests."""
        return next((post.plan for post in self._fleet.posts if post.plan is not None), None)

    def refuse_new(self, reason: str) -> None:
        """From now on `submit` answers 503, and no worker is replaced; flights go on."""
        self._closing = reason
        if self._rolling is not None:
            self._rolling.cancel()

    def abort_all(self, reason: str) -> None:
        """Ends every flight with 503 ``reason``."""
        self.refuse_new(reason)
        for flight in list(self._flights.values()):
            self._end(flight, unavailable(reason, 1))

    def submit(self, request: Request, admitted: bool = False, brief: bool = False) -> Flight:
        """Takes up a request; ``admitted``: it is a further part of one that was taken; ``brief``: it
        takes a step and no more, so many may wait. Raises ApiError: 429 when too many do, 503 when the server
        cannot serve."""
        if self._closing is not None:
            raise unavailable(self._closing, 1)
        if self._down is not None:
            raise unavailable(f"the worker cannot be started: {self._down}", 10)
        if self._deserted:
            raise unavailable(NOBODY, 5)
        if len(self._flights) >= self._max_running + self._queue(admitted, brief):
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
        self._waiting[request.id] = flight
        self.room()
        return flight

    def release(self, flight: Flight, keep: int | None = None) -> None:
        """The handler is done with it; if the engine is not, it is told. ``keep``: see `Abort`."""
        sent = flight.sent
        if self._forget(flight) and sent is not None:
            self._fleet.abort(sent, keep)

    def cancel(self, flight: Flight) -> None:
        """The client is gone."""
        self._end(flight, ClientGone())

    def not_ready(self) -> str | None:
        """None if requests make progress, or could; else why not."""
        if self._closing is not None:
            return self._closing
        if self._down is not None:
            return f"the worker cannot be started: {self._down}"
        if not self._fleet.posts:
            return NOBODY
        if not self._fleet.up:
            return "the worker is starting" if len(self._fleet.posts) == 1 else "the workers are starting"
        if not self._fleet.answering:
            return "no worker gets on; those that do not soon are killed and started again"
        still_s = time.monotonic() - self._progress_at
        if self._flights and still_s > self._stall_after_s:
            return f"no step for {still_s:.0f} s with {len(self._flights)} requests in flight"
        return None

    def workers(self) -> dict[str, str]:
        """The state of each worker by its name, for people."""
        return {post.name: post.state for post in self._fleet.posts}

    def room(self) -> None:
        """Those that are on no worker are sent, with the tokens received. They wait for somebody to join no
        longer than for a worker to get on."""
        if self._fleet.posts:
            self._manned_at, self._manned_for = time.monotonic(), self._max_running
        if not self._waiting:
            return
        if self._deserted:
            for flight in list(self._waiting.values()):
                self._end(flight, unavailable(NOBODY, 5))
            return
        requests, flights = [], {}
        for flight in self._waiting.values():
            request = flight.request
            id = request.id if not flight.sends else f"{request.id}~{flight.sends}"
            if flight.sends:
                request = msgspec.structs.replace(request, id=id, output=tuple(flight.tokens))
            requests.append(request)
            flights[id] = flight
        # Whatever the fleet tells of them from now on, they are known by these ids.
        doubted = {id for id, flight in flights.items() if flight.deaths}
        for id in self._fleet.send(requests, doubted):
            flight = flights[id]
            flight.heard_of = False
            del self._waiting[flight.request.id]
            flight.sends += 1
            flight.sent = id
            self._sent[id] = flight

    def returned(self, ids: Sequence[str], died: bool) -> None:
        """Counts the death for all who were there; gives up on those who saw too many; sends the others."""
        for id in ids:
            flight = self._sent.pop(id, None)
            if flight is None:
                continue
            flight.sent = None
            self._waiting[flight.request.id] = flight
            if died:
                self._died(flight)
        self.room()

    def suspected(self, ids: Sequence[str]) -> None:
        """They were taken from a worker that has died since: a death all the same."""
        for id in ids:
            flight = self._flights.get(id.partition("~")[0])
            if flight is not None:
                self._died(flight)

    def ready(self) -> None:
        """Whoever waits carries on there."""
        self._down = None
        self._progress_at = time.monotonic()
        self.room()

    def load(self, worker: str, load: LoadSnapshot) -> None:
        """For the metrics."""
        self._metrics.loads[worker] = load

    def lost(self, worker: str, planned: bool) -> None:
        """For the metrics."""
        self._metrics.worker_gone(worker)
        self._metrics.worker_restarts += not planned

    def down(self, reason: str) -> None:
        """Nobody can be helped for now."""
        self._down = reason
        for flight in list(self._flights.values()):
            self._end(flight, unavailable(f"the worker cannot be started: {reason}", 10))

    def refused(self, message: Refused) -> None:
        """The request's own fault; not so when the worker that had room for it has gone meanwhile."""
        flight = self._sent.get(message.id)
        if flight is None:
            return
        if message.beyond_memory and flight.sends > 1:
            self._end(flight, unavailable(f"no worker is left that is large enough: {message.error}", 5))
        else:
            self._end(flight, invalid(message.field, message.error))

    def progress(self) -> None:
        """Some worker gets on."""
        self._progress_at = time.monotonic()

    def news(self, chunks: Sequence[Chunk]) -> None:
        """News from a worker."""
        now = time.monotonic()
        for chunk in chunks:
            flight = self._sent.get(chunk.id)
            if flight is None:
                continue  # It was aborted a moment ago.
            flight.heard_of = True
            if chunk.tokens or chunk.finish is not None or chunk.cached_tokens is not None:
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
        elif chunk.embedding is not None:
            flight.first_at = flight.last_at = now
            metrics.embeddings += 1
        kept_up = flight.arrived(chunk)
        if chunk.finish is not None:
            self._forget(flight)
        elif not kept_up:
            waiting = flight.backlog.bytes
            error = f"the client reads too slowly: {waiting} bytes of its answer wait in the server"
            self._end(flight, ApiError(408, error, code="client_too_slow"))

    def _died(self, flight: Flight) -> None:
        if flight.died():
            self._end(flight, broken(f"{flight.deaths} workers died while they computed this request"))

    def _end(self, flight: Flight, error: Exception) -> None:
        self.release(flight)
        flight.fail(error)

    def _forget(self, flight: Flight) -> bool:
        if self._flights.pop(flight.request.id, None) is None:
            return False
        self._waiting.pop(flight.request.id, None)
        if flight.sent is not None:
            self._sent.pop(flight.sent, None)
            flight.sent = None
        self._metrics.in_flight -= 1
        self._ends.append(time.monotonic())
        return True

    @property
    def _deserted(self) -> bool:
        """Whether nobody has been there for so long that nobody is to be expected."""
        return not self._fleet.posts and time.monotonic() > self._manned_at + self._stall_after_s

    @property
    def _max_running(self) -> int:
        """Of all workers; of the last ones, where there is none."""
        if not self._fleet.posts:
            return self._manned_for
        own = self._settings.max_running
        return sum(own if post.plan is None else post.plan.max_running for post in self._fleet.posts)

    def _queue(self, admitted: bool, brief: bool) -> int:
        """How many may wait. By Little's law whoever has q requests before it waits for q / running of the
        time that one takes. The limit is of requests: were it of their parts too, a request with more of them
        would be told for ever to come again."""
        if self._max_queue is not None:
            own = self._max_queue
        elif brief:
            own = MAX_PARTS
        else:
            own = max(MIN_QUEUE, int(WAIT_SHARE * self._max_running))
        return max(own, MAX_PARTS) if admitted else own

    def _retry_after_s(self) -> int:
        """When those who wait now will have begun, at the rate at which requests ended lately."""
        waiting = len(self._flights) - self._max_running
        if len(self._ends) < _KNOWN_ENDS:
            return 1
        span_s = time.monotonic() - self._ends[0]
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(waiting * span_s / (len(self._ends) - 1))))


def _bytes_of(chunk: Chunk) -> int:
    """About what it takes in memory."""
    size = 300 + 40 * len(chunk.tokens)
    if chunk.logprobs is not None:
        size += sum(200 + 150 * len(one.top) for one in chunk.logprobs)
    return size
