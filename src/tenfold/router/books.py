"""What the router knows of each worker's work: columns over slots, so that a decision is a few vector
operations.

The books follow from what the router itself sent and heard back; a worker's own load is only held against
them (`Books.slow`, silence). Time is seconds, handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenfold.router.timing import WorkerTiming

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_SLOW_WEIGHT = 0.1


@dataclass(slots=True)
class InFlight:
    """A request on a worker."""

    slot: int
    prompt_tokens: int
    missing: int
    """Tokens of it that are to be computed there."""
    predicted: float
    """Seconds that its own prefill is expected to take."""
    begins: float
    """When that is expected to begin."""
    moved: float
    """When it was routed, or its newest token came."""
    patience: float
    """How long it may show no progress."""
    deadline: float
    decoding: bool = False
    drawn: int = 0
    room_tokens: int = 0
    """See `tenfold.router.base.RouteRequest`."""


class Books:
    """Columns of all slots. A slot that is not ``usable`` is never chosen."""

    def __init__(self) -> None:
        self.size = 0
        self.usable: Bools = np.zeros(0, bool)
        self.free_at: Floats = np.zeros(0)
        """When all prompts that were sent there are expected to be computed."""
        self.prefills: Floats = np.zeros(0)
        """Requests whose first token has not come."""
        self.decodes: Floats = np.zeros(0)
        self.context: Floats = np.zeros(0)
        """Rows that the requests there have, or will have once their prompts are computed."""
        self.last_begins: Floats = np.zeros(0)
        """When the prompt sent there last is expected to be begun,"""
        self.last_tokens: Floats = np.zeros(0)
        """and how many tokens of it are to be computed."""
        self.capacity: Floats = np.zeros(0)
        """Pages."""
        self.held: Floats = np.zeros(0)
        """Pages in the index."""
        self.slow: Floats = np.zeros(0)
        """Measured over expected seconds of prefill."""
        self.routed: Floats = np.zeros(0)
        """Requests sent there so far: breaks ties."""
        self.timings: list[WorkerTiming] = []

    def open(self, timing: WorkerTiming, capacity: int, now: float) -> int:
        """A slot for a worker."""
        slot = next((s for s in range(self.size) if not self.capacity[s]), self.size)
        if slot == self.size:
            self._grow(max(8, 2 * self.size))
        if slot < len(self.timings):
            self.timings[slot] = timing
        else:
            self.timings.append(timing)
        self.usable[slot] = True
        self.free_at[slot] = now
        self.capacity[slot] = capacity
        self.slow[slot] = 1.0
        for column in (self.prefills, self.decodes, self.context, self.held, self.routed):
            column[slot] = 0.0
        # A newcomer has been sent as much as the others: ties are no reason to flood it.
        others = self.routed[self.usable]
        self.routed[slot] = others.max()
        return slot

    def close(self, slot: int) -> None:
        """The worker is gone."""
        self.usable[slot] = False
        self.capacity[slot] = 0.0

    def expect(self, factor: float) -> None:
        """From now on steps are expected to take so many times as long."""
        self.slow = np.clip(self.slow / factor, 1.0, 100.0)

    def wait(self, now: float) -> Floats:
        """Seconds until a prompt sent now would be begun. Work that is late is taken to need as long again as
        it is late."""
        return np.where(self.prefills > 0, np.abs(self.free_at - now), 0.0)

    def dispatch(self, flight: InFlight, now: float) -> None:
        """A request is sent."""
        slot = flight.slot
        start = self.free_at[slot] if self.prefills[slot] else now
        flight.begins = max(now, start)
        self.free_at[slot] = flight.begins + flight.predicted
        shares = self.prefills[slot] and self.last_begins[slot] >= now
        self.last_tokens[slot] = flight.missing + (self.last_tokens[slot] if shares else 0.0)
        self.last_begins[slot] = flight.begins
        self.prefills[slot] += 1
        self.context[slot] += flight.prompt_tokens
        self.routed[slot] += 1

    def reserve(self, flight: InFlight) -> None:
        """A request will decode there, with its prompt computed by then."""
        flight.decoding, flight.drawn = True, 1
        self.decodes[flight.slot] += 1
        self.context[flight.slot] += flight.prompt_tokens

    def prefilled(self, flight: InFlight, now: float) -> None:
        """Its first token came."""
        slot = flight.slot
        self.prefills[slot] -= 1
        if not self.prefills[slot] or self.free_at[slot] < now:
            self.free_at[slot] = now
        flight.decoding = True
        flight.drawn = 1
        self.decodes[slot] += 1
        if flight.predicted > 0:
            ratio = min(max((now - flight.begins) / flight.predicted, 0.1), 100.0)
            # Neighbours in a step and a step that was running blur one measurement: only the mean counts.
            self.slow[slot] += _SLOW_WEIGHT * (ratio * self.slow[slot] - self.slow[slot])
            self.slow[slot] = min(max(self.slow[slot], 1.0), 100.0)

    def drew(self, flight: InFlight, tokens: int) -> None:
        """Tokens came."""
        flight.drawn += tokens
        self.context[flight.slot] += tokens

    def finished(self, flight: InFlight, now: float) -> None:
        """It is no longer there."""
        slot = flight.slot
        self.context[slot] -= flight.prompt_tokens
        if flight.decoding:
            self.decodes[slot] -= 1
            self.context[slot] -= flight.drawn - 1
        else:
            self.prefills[slot] -= 1
            self.free_at[slot] = max(now, self.free_at[slot] - flight.predicted)

    def _grow(self, size: int) -> None:
        for name in (
            "last_begins",
            "last_tokens",
            "usable",
            "free_at",
            "prefills",
            "decodes",
            "context",
            "capacity",
            "held",
            "slow",
            "routed",
        ):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: self.size] = old
            setattr(self, name, new)
        self.size = size
