"""Which worker gets a request: pure, synchronous and without a clock. Time is handed in, messages go in as
calls, and what is to be sent comes out of `Router.tick`; so the same code runs in a server and in simulation.

A request is routed (`route`), then its worker's news are passed on (`on_prefill_done`, `on_token`,
`on_finish`). Workers come and go (`add_worker`, `remove_worker`), tell of their pages (`on_event`,
`on_snapshot`) and their load (`on_load`). Nothing here waits: what has a deadline is looked after by `tick`,
which is to be called at `next_tick` at the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tenfold.protocol import KVEvents, KVSnapshot, LoadSnapshot
from tenfold.router.base import (
    Action,
    Decision,
    Overdue,
    RouterConfig,
    RouterCounts,
    RouteRequest,
    Silent,
)
from tenfold.router.books import Books, Bools, InFlight, Ints
from tenfold.router.cost import Costs, costs
from tenfold.router.index import PageIndex
from tenfold.router.policy import Chooser
from tenfold.router.streams import EventStreams
from tenfold.router.timing import WorkerTiming

_GRAIN_TOKENS = 1024
"""Overlaps that differ by less count as equal when requests are put in order."""
_SESSIONS = 65_536
"""Sessions remembered, the latest."""
_MEMORY = 1 / 256
"""Weight of the newest request in running means."""


class _Worker:
    __slots__ = ("draining", "flights", "heard", "moved", "name", "silent", "slot", "steps")

    def __init__(self, name: str, slot: int, now: float) -> None:
        self.name = name
        self.slot = slot
        self.heard = now
        self.silent = False
        self.draining = False
        self.flights: dict[str, None] = {}
        """Requests there, in the order they were routed."""
        self.moved = now
        """When it last made progress with anything."""
        self.steps = 0


class Router:
    """The router. Not thread-safe. Deterministic: the same calls give the same decisions."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.counts = RouterCounts()
        self.index = PageIndex()
        self._books = Books()
        self._streams = EventStreams(self.index, self.counts, config.resync_timeout_s, config.event_lag_s)
        self._workers: dict[str, _Worker] = {}
        self._by_slot: dict[int, _Worker] = {}
        self._flights: dict[str, InFlight] = {}
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._chooser = Chooser(config.policy, config.seed)
        self._output = config.expected_output
        self._reuse = 0.0

    # Workers

    def add_worker(
        self,
        worker: str,
        pages: int,
        now: float,
        *,
        empty: bool = True,
        timing: WorkerTiming | None = None,
    ) -> None:
        """A worker with room for ``pages`` pages. ``empty``: it has just started and holds none; otherwise it
        is asked for a snapshot. Raises ValueError for a name that is there, or no pages."""
        if worker in self._workers:
            raise ValueError(f"worker {worker!r} is there already; remove it first")
        if pages < 1:
            raise ValueError(f"worker {worker!r} must have at least one page, not {pages}")
        slot = self._books.open(timing or self.config.timing, pages, now)
        self.index.open(slot, pages)
        self._streams.open(slot, worker, empty)
        self._workers[worker] = self._by_slot[slot] = _Worker(worker, slot, now)

    def remove_worker(self, worker: str) -> tuple[str, ...]:
        """The worker is gone. Returns the requests that were there, in the order they were routed; the router
        has forgotten them. An unknown name is no error: it may have been removed for another reason."""
        known = self._workers.pop(worker, None)
        if known is None:
            return ()
        lost = tuple(known.flights)
        for request in lost:
            del self._flights[request]
        self._streams.close(known.slot)
        self.index.close(known.slot)
        self._books.close(known.slot)
        del self._by_slot[known.slot]
        return lost

    def drain(self, worker: str) -> None:
        """No new request goes to this worker from now on."""
        known = self._workers[worker]
        known.draining = True
        self._books.usable[known.slot] = False

    def undrain(self, worker: str) -> None:
        """New requests go there again, unless it is silent."""
        known = self._workers[worker]
        known.draining = False
        self._books.usable[known.slot] = not known.silent

    def set_timing(self, timing: WorkerTiming) -> None:
        """Cost curves that were measured in the meantime. How much slower than expected a worker is, is told
        anew by what is expected now."""
        self._books.expect(timing.token_seconds / self.config.timing.token_seconds)
        self.config = replace(self.config, timing=timing)

    def workers(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(self._workers)

    def requests(self, worker: str) -> frozenset[str]:
        """Requests that are on a worker."""
        return frozenset(self._workers[worker].flights)

    def pages(self, worker: str) -> frozenset[int]:
        """Names of the pages that a worker is believed to hold."""
        return self.index.pages(self._workers[worker].slot)

    def in_step(self, worker: str) -> bool:
        """Whether that belief is up to date, as far as can be known."""
        return self._streams.in_step(self._workers[worker].slot)

    def usable(self) -> tuple[str, ...]:
        """Names of the workers that get new requests."""
        return tuple(name for name, known in self._workers.items() if self._books.usable[known.slot])

    # What workers say

    def on_life(self, worker: str, now: float) -> None:
        """It is known to live, though it said nothing: its host sees it compute."""
        self._heard(worker, now)

    def on_event(self, worker: str, batch: KVEvents, now: float) -> None:
        """News of a worker's pages."""
        if (known := self._heard(worker, now)) is not None:
            self._streams.apply(known.slot, batch)
            self._books.held[known.slot] = self.index.count(known.slot)

    def on_snapshot(self, worker: str, snapshot: KVSnapshot, now: float) -> None:
        """The answer to a `Resync`."""
        if (known := self._heard(worker, now)) is not None:
            self._streams.snapshot(known.slot, snapshot)
            self._books.held[known.slot] = self.index.count(known.slot)

    def on_load(self, worker: str, load: LoadSnapshot, now: float) -> None:
        """A sign of life and of progress, with the number of the last events."""
        if (known := self._heard(worker, now)) is not None:
            if load.steps > known.steps:
                known.steps, known.moved = load.steps, now
            self._streams.heard(known.slot, load.kv_sequence, now)

    def on_prefill_done(self, request: str, now: float) -> None:
        """A request's first token came."""
        if (flight := self._progress(request, now)) is not None and not flight.decoding:
            self._books.prefilled(flight, now)

    def on_token(self, request: str, tokens: int, now: float) -> None:
        """Further tokens came."""
        if (flight := self._progress(request, now)) is not None and flight.decoding:
            self._books.drew(flight, tokens)

    def on_finish(self, request: str, now: float) -> None:
        """A request ended, for whatever reason."""
        flight = self._forget(request, now)
        if flight is None:
            self.counts.strays += 1
        elif flight.decoding:
            self._output += _MEMORY * (flight.drawn - self._output)

    # Routing

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """Chooses a worker and books the request there. None if there is none that takes requests and has
        room for this one.

        Raises ValueError for a request that is under way already.
        """
        if request.id in self._flights:
            raise ValueError(f"request {request.id!r} is under way already")
        among = self._books.usable & self._holds(request.room_tokens)
        candidates = int(np.count_nonzero(among))
        if not candidates:
            return None
        overlap = self._overlap(request)
        priced = self._price(request, overlap, now)
        slot = self._chooser.choose(self._books, priced, overlap, among)
        return self._book(request, slot, priced, overlap, candidates, now)

    def route_all(
        self, requests: Sequence[RouteRequest], now: float
    ) -> list[tuple[RouteRequest, Decision | None]]:
        """Routes what came at one moment: first who has most of its prompt somewhere, since it has most to
        lose elsewhere; among equals who has most left to compute, since small work fills gaps. The answers
        are in the order in which to send them."""
        usable = self._books.usable
        order = []
        for place, request in enumerate(requests):
            overlap = self.index.overlap(request.names, self._books.size)[usable].max(initial=0)
            there = int(overlap) * self.config.page_tokens
            order.append((-(there // _GRAIN_TOKENS), there - request.prompt_tokens, place))
        return [(requests[place], self.route(requests[place], now)) for *_, place in sorted(order)]

    def assign(self, request: RouteRequest, worker: str, now: float) -> Decision:
        """Books a request that is on a worker already, as after a restart of the router. Raises KeyError for
        an unknown worker, ValueError for a request that is under way already."""
        if request.id in self._flights:
            raise ValueError(f"request {request.id!r} is under way already")
        slot = self._workers[worker].slot
        overlap = self._overlap(request)
        priced = self._price(request, overlap, now)
        return self._book(request, slot, priced, overlap, 1, now)

    # Deadlines

    def tick(self, now: float) -> list[Action]:
        """What is due: snapshots to ask for, requests and workers that show no sign of life."""
        actions: list[Action] = list(self._streams.due(now))
        for worker in self._workers.values():
            if not worker.silent and now >= worker.heard + self.config.silence_s:
                worker.silent = True
                self._books.usable[worker.slot] = False
                self.counts.silent += 1
                actions.append(Silent(worker.name, f"nothing heard for {now - worker.heard:.1f} s"))
        for request in [name for name, flight in self._flights.items() if now >= flight.deadline]:
            flight = self._flights[request]
            worker = self._by_slot[flight.slot]
            # Where others get on, a request may wait its turn (again, if it was preempted), but not for ever.
            renewed = min(worker.moved + flight.patience, flight.moved + self.config.lost_s)
            if now < renewed:
                flight.deadline = renewed
                continue
            what = "no token" if flight.decoding else "no first token"
            self.counts.overdue += 1
            self._forget(request, now)
            actions.append(Overdue(request, worker.name, f"{what} for {now - flight.moved:.1f} s"))
        return actions

    def next_tick(self) -> float:
        """When `tick` is to be called at the latest; infinity if nothing is waited for."""
        silence = self.config.silence_s
        times = [self._streams.next_due()]
        times.extend(worker.heard + silence for worker in self._workers.values() if not worker.silent)
        times.extend(flight.deadline for flight in self._flights.values())
        return min(times)

    def check(self) -> None:
        """Raises ValueError unless the books balance."""
        self.index.check()
        for worker in self._workers.values():
            flights = [self._flights[request] for request in worker.flights]
            decoding = [flight for flight in flights if flight.decoding]
            books = self._books
            expected = (len(flights) - len(decoding), len(decoding))
            if (books.prefills[worker.slot], books.decodes[worker.slot]) != expected:
                raise ValueError(f"worker {worker.name}: the books do not tell of {expected} requests")
            if books.context[worker.slot] != sum(f.prompt_tokens + max(f.drawn - 1, 0) for f in flights):
                raise ValueError(f"worker {worker.name}: the books tell of another context")
        if sum(len(worker.flights) for worker in self._workers.values()) != len(self._flights):
            raise ValueError("requests are on no worker, or on several")

    def _book(
        self,
        request: RouteRequest,
        slot: int,
        priced: Costs,
        overlap: Ints,
        candidates: int,
        now: float,
    ) -> Decision:
        worker = self._by_slot[slot]
        cost = priced.at(slot)
        config = self.config
        # A step of others' prompts may come between any two tokens, and none is longer than a full one.
        step = config.timing.chunk(config.timing.chunk_tokens) * float(self._books.slow[slot])
        patience = config.late_floor_s + config.late_factor * max(cost.wait + cost.prefill, step)
        missing = max(request.prompt_tokens - int(overlap[slot]), 1)
        flight = InFlight(
            slot,
            request.prompt_tokens,
            missing,
            cost.prefill,
            now,
            now,
            patience,
            now + patience,
            room_tokens=request.room_tokens,
        )
        self._books.dispatch(flight, now)
        self._flights[request.id] = flight
        worker.flights[request.id] = None
        if request.session is not None:
            self._sessions[request.session] = (worker.name, request.prompt_tokens)
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        there = min(int(overlap[slot]), request.prompt_tokens)
        best = min(int(overlap[self._books.usable].max(initial=0)), request.prompt_tokens)
        counts = self.counts
        counts.routed += 1
        counts.prompt_tokens += request.prompt_tokens
        counts.overlap_tokens += there
        counts.spilled += best > there
        self._reuse += _MEMORY * (best / request.prompt_tokens - self._reuse)
        return Decision(
            request.id, worker.name, config.policy, there, best, cost, flight.deadline, candidates
        )

    def _holds(self, tokens: int) -> Bools:
        """[slots] whose workers have pages for so many tokens."""
        return self._books.capacity * self.config.page_tokens >= tokens

    def _overlap(self, request: RouteRequest) -> Ints:
        """[slots] tokens of a prompt that each worker has. Where a session was last counts for a worker whose
        pages are not known at the moment."""
        overlap = self.index.overlap(request.names, self._books.size) * self.config.page_tokens
        if request.session is not None and request.session in self._sessions:
            name, tokens = self._sessions[request.session]
            worker = self._workers.get(name)
            if worker is not None and not self._streams.in_step(worker.slot):
                overlap[worker.slot] = max(int(overlap[worker.slot]), min(tokens, request.prompt_tokens))
        return overlap

    def _price(self, request: RouteRequest, overlap: Ints, now: float) -> Costs:
        expected = request.expected_output
        output = self._output if expected is None else float(expected)
        return self._costs(request.prompt_tokens, overlap, output, now)

    def _costs(self, prompt_tokens: int, overlap: Ints, output: float, now: float) -> Costs:
        return costs(
            self._books,
            self.config.timing,
            prompt_tokens,
            overlap,
            output,
            self.config.page_tokens,
            self._reuse,
            now,
        )

    def _heard(self, worker: str, now: float) -> _Worker | None:
        known = self._workers.get(worker)
        if known is None:
            self.counts.strays += 1
            return None
        known.heard = now
        if known.silent:
            known.silent = False
            self._books.usable[known.slot] = not known.draining
        return known

    def _progress(self, request: str, now: float) -> InFlight | None:
        flight = self._flights.get(request)
        if flight is None:
            self.counts.strays += 1
            return None
        worker = self._by_slot[flight.slot]
        worker.heard = worker.moved = flight.moved = now
        flight.deadline = now + flight.patience
        return flight

    def _forget(self, request: str, now: float) -> InFlight | None:
        flight = self._flights.pop(request, None)
        if flight is not None:
            del self._by_slot[flight.slot].flights[request]
            self._books.finished(flight, now)
        return flight
