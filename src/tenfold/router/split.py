"""Prefill apart from decode: for each request, whether a worker for prefill computes its prompt and another
goes on with its answer.

Both ways are priced in seconds (`tenfold.router.cost`), each on the workers that are best for it:

- *together*, on a decode worker: its cost there, and what its prompt takes from the streams there
  (`INTERRUPTION`);
- *apart*: the wait for a prefill worker and the prefill there; from the last page's being ready until the
  decode worker goes on with it (`TransferTiming.start_s`, as measured); the reading of its pages and the rows
  behind the last full page, which the decode worker has to compute; and its share of the streams there.

So a short prompt, or one of which the decode worker has most, stays there; so does one that would wait longer
for a prefill worker than it saves, or that disturbs nobody. Without a prefill worker decode workers prefill
for themselves; without a decode worker prefill workers decode.

A request that is split is on its prefill worker until `SplitRouter.hand_over`. When that begins with it,
`SplitRouter.take` chooses the decode worker, which reads along; it counts there as a stream from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from tenfold.protocol import WorkerRole
from tenfold.router.base import Decision, RouterConfig, RouteRequest, SplitChoice
from tenfold.router.books import Bools, InFlight, Ints
from tenfold.router.cost import STREAM_WEIGHT, Costs
from tenfold.router.policy import Chooser
from tenfold.router.router import Router

INTERRUPTION = 1.0
"""What a second counts by which a prompt delays the next token of a stream: as much as one by which it waits
itself. More than in a fleet of mixed workers (`STREAM_WEIGHT`), where nobody can be spared it."""
REASONS = (
    "worth it",
    "one token",
    "no prefill worker",
    "no decode worker",
    "prefill workers busy",
    "no streams to disturb",
    "cached",
    "short",
)
"""Why a request is split (the first), or not: its answer is one token at most; there is no such worker that
takes requests; its queue is longer than what splitting saves; nobody decodes where it goes; most of the
prompt is there; what is not there takes less time than handing it over."""
_RESERVED = "\0reserved"
_MEMORY = 1 / 16
_SLOWEST_START_S = 5.0


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True):
    """What handing a request over takes."""

    page_s: float
    """Of the decode worker, for each page."""
    start_s: float = 0.05
    """From the last page's being ready until the decode worker goes on with it."""

    @staticmethod
    def guess(page_bytes: int) -> TransferTiming:
        """Before anything was measured: pages are copied and checked at 2 GB/s."""
        return TransferTiming(page_s=page_bytes / 2e9)

    def learn(self, page_s: float | None, start_s: float | None) -> TransferTiming:
        """With the newest mean of each, if there is one."""
        page, start = self.page_s, self.start_s
        if page_s is not None:
            page += _MEMORY * (page_s - page)
        if start_s is not None:
            start += _MEMORY * (min(start_s, _SLOWEST_START_S) - start)
        return TransferTiming(page_s=page, start_s=start)


class SplitCounts(msgspec.Struct):
    """What was decided so far; for metrics."""

    split: int = 0
    not_split: Counter[str] = msgspec.field(default_factory=Counter)
    """By `REASONS`."""


class SplitRouter(Router):
    """A router of workers of which some are for prefill, some for decode. Who is not in ``roles`` counts as a
    decode worker."""

    def __init__(
        self, config: RouterConfig, roles: Mapping[str, WorkerRole], transfer: TransferTiming
    ) -> None:
        super().__init__(config)
        self.transfer = transfer
        self.splits = SplitCounts()
        self._roles = dict(roles)
        self._prefill_chooser = Chooser(config.policy, config.seed)
        self._take_chooser = Chooser(config.policy, config.seed)
        self._taken: dict[str, str] = {}
        """Decode workers that read along, by request."""

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """As `Router.route`. Of a request that is split the decision names the prefill worker."""
        if request.id in self._flights:
            raise ValueError(f"request {request.id!r} is under way already")
        books = self._books
        wholes, decodes = self._parts(request.room_tokens)
        among = decodes if decodes.any() else wholes
        if not among.any():
            return None
        # Of a request that is split a prefill worker has the prompt alone.
        prefills = self._parts(min(request.prompt_tokens, request.room_tokens))[0]
        overlap = self._overlap(request)
        priced = self._price(request, overlap, now)
        candidates = int(np.count_nonzero(prefills | wholes | decodes))
        if prefills.any() and decodes.any() and request.divisible:
            chosen = self._compare(request, priced, overlap, prefills, decodes, now)
            slot, priced, choice = chosen
        else:
            why = "one token"
            if not decodes.any():
                why = "no decode worker"
            elif not prefills.any():
                why = "no prefill worker"
            slot, choice = self._chooser.choose(books, priced, overlap, among), SplitChoice(False, why)
        if choice.split:
            self.splits.split += 1
        else:
            self.splits.not_split[choice.why] += 1
        return replace(self._book(request, slot, priced, overlap, candidates, now), choice=choice)

    def take(self, request: str, now: float) -> str | None:
        """A split request's prompt is begun: the decode worker that is to go on with it. It is booked there
        from now on. None if there is none, or the request is not known."""
        flight = self._flights.get(request)
        if flight is None:
            return None
        slot = self._taker(flight.prompt_tokens, flight.room_tokens, now)
        if slot is None or self._roles.get(self._by_slot[slot].name) == "prefill":
            return None
        self._release(request, now)
        worker = self._by_slot[slot]
        ever = float("inf")
        reserved = InFlight(
            slot, flight.prompt_tokens, 0, 0.0, now, now, ever, ever, room_tokens=flight.room_tokens
        )
        self._books.reserve(reserved)
        self._flights[request + _RESERVED] = reserved
        worker.flights[request + _RESERVED] = None
        self._taken[request] = worker.name
        return worker.name

    def hand_over(self, request: str, now: float) -> str | None:
        """A split request's prompt is computed: from now on it is on the worker that this returns, that of
        `take` if it still takes requests. None if there is no worker; then the request is forgotten."""
        taken = self._taken.get(request)
        flight = self._forget(request, now)
        tokens, room_tokens = (1, 0) if flight is None else (flight.prompt_tokens + 1, flight.room_tokens)
        slot: int | None = None
        if taken is not None and taken in self._workers:
            slot = self._workers[taken].slot
            slot = slot if self._books.usable[slot] else None
        if slot is None:
            slot = self._taker(tokens, room_tokens, now)
        if slot is None:
            return None
        worker, config = self._by_slot[slot], self.config
        step = config.timing.chunk(config.timing.chunk_tokens) * float(self._books.slow[slot])
        patience = config.late_floor_s + config.late_factor * (step + self.transfer.start_s)
        # Its first step tells nothing of how quickly prompts are computed: no time is expected of it.
        taken_over = InFlight(
            slot,
            tokens,
            tokens % config.page_tokens,
            0.0,
            now,
            now,
            patience,
            now + patience,
            room_tokens=room_tokens,
        )
        self._books.dispatch(taken_over, now)
        self._flights[request] = taken_over
        worker.flights[request] = None
        self.counts.routed += 1
        return worker.name

    def remove_worker(self, worker: str) -> tuple[str, ...]:
        """As `Router.remove_worker`; requests that it was only to take over are not among them."""
        lost = super().remove_worker(worker)
        for request in lost:
            if request.endswith(_RESERVED):
                self._taken.pop(request.removesuffix(_RESERVED), None)
            else:
                self._release(request, 0.0)
        return tuple(request for request in lost if not request.endswith(_RESERVED))

    def role(self, worker: str) -> WorkerRole:
        """What a worker is for."""
        return self._roles.get(worker, "decode")

    def requests(self, worker: str) -> frozenset[str]:
        """As `Router.requests`."""
        return frozenset(one for one in super().requests(worker) if not one.endswith(_RESERVED))

    def _parts(self, room_tokens: int) -> tuple[Bools, Bools]:
        """Slots of the prefill workers and of the others that take requests and hold so many tokens."""
        prefills = np.zeros(self._books.size, bool)
        for worker in self._workers.values():
            prefills[worker.slot] = self._roles.get(worker.name) == "prefill"
        usable = self._books.usable & self._holds(room_tokens)
        return usable & prefills, usable & ~prefills

    def _compare(
        self,
        request: RouteRequest,
        priced: Costs,
        overlap: Ints,
        prefills: Bools,
        decodes: Bools,
        now: float,
    ) -> tuple[int, Costs, SplitChoice]:
        books, page_tokens = self._books, self.config.page_tokens
        tokens = request.prompt_tokens
        there = self._costs(tokens, overlap, 1.0, now)
        prefill = self._prefill_chooser.choose(books, there, overlap, prefills)
        # Together.
        priced = _dearer(priced, INTERRUPTION * books.decodes * priced.prefill)
        here = self._chooser.choose(books, priced, overlap, decodes)
        together = float(priced.total[here])
        # Apart: the pages are there when the decode worker's turn comes.
        until = float(there.wait[prefill] + there.prefill[prefill])
        after = self._after(tokens, now, until)
        taker = int(np.argmin(np.where(decodes, after, np.inf)))
        pages = tokens // page_tokens - int(overlap[taker]) // page_tokens
        moving = max(pages, 0) * self.transfer.page_s * (1 + INTERRUPTION * float(books.decodes[taker]))
        hand_over = self.transfer.start_s + moving + float(after[taker] + priced.displaced[taker])
        apart = float(there.total[prefill]) + hand_over
        if apart < together:
            return prefill, there, SplitChoice(True, "worth it", apart, together)
        missing = tokens - int(overlap[here])
        why = "short"
        if apart - float(there.wait[prefill]) < together:
            why = "prefill workers busy"
        elif not books.decodes[here]:
            why = "no streams to disturb"
        elif int(overlap[here]) >= missing:
            why = "cached"
        return here, priced, SplitChoice(False, why, apart, together)

    def _after(self, tokens: int, now: float, until: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[slots] what a request costs a decode worker that has all its full pages, from ``until`` on."""
        books, page_tokens = self._books, self.config.page_tokens
        full = np.full(books.size, (tokens - 1) // page_tokens * page_tokens, np.int64)
        costs = self._costs(tokens, full, self._output, now)
        tail = costs.prefill * (1 + INTERRUPTION * books.decodes)
        found: np.ndarray[tuple[int], np.dtype[np.float64]] = (
            np.maximum(costs.wait - until, 0.0) + tail + costs.shared + costs.streams
        )
        return found

    def _taker(self, tokens: int, room_tokens: int, now: float) -> int | None:
        """The slot that goes on with a prompt of so many tokens: a prefill worker's if there is no other."""
        prefills, decodes = self._parts(room_tokens)
        among = decodes if decodes.any() else prefills
        if not among.any():
            return None
        nothing = np.zeros(self._books.size)
        after = Costs(nothing, nothing, nothing, self._after(tokens, now, 0.0), nothing)
        return self._take_chooser.choose(self._books, after, np.zeros(self._books.size, np.int64), among)

    def _forget(self, request: str, now: float) -> InFlight | None:
        self._release(request, now)
        return super()._forget(request, now)

    def _release(self, request: str, now: float) -> None:
        """A decode worker is not to go on with it any more."""
        if self._taken.pop(request, None) is not None:
            super()._forget(request + _RESERVED, now)


def _dearer(priced: Costs, streams: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Costs:
    """With more for streams than `STREAM_WEIGHT` has counted of these seconds."""
    more = streams * (1 - STREAM_WEIGHT / INTERRUPTION)
    return Costs(priced.wait, priced.prefill, priced.shared, priced.streams + more, priced.displaced)
