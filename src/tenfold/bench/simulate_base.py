"""What a simulation is made of and what it brings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from tenfold.bench.simulate_cache import Eviction
from tenfold.bench.simulate_faults import Fault
from tenfold.bench.simulate_worker import SimulatedWorker
from tenfold.protocol import LoadSnapshot, WorkerRole
from tenfold.router.policies import Policy
from tenfold.router.router import Router
from tenfold.router.split import TransferTiming
from tenfold.router.timing import WorkerTiming


class SimulationError(AssertionError):
    """A promise was broken: a request lost or ended twice, an index that is wrong, a wait beyond its
    deadline."""


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of equal workers, and its wires."""

    timing: WorkerTiming
    workers: int
    prefill: int = 0
    """Of these, so many prefill for the others; 0: all do both."""
    transfer: TransferTiming = TransferTiming(page_s=0.0, start_s=0.0)
    """What the router reckons with, and what handing over takes."""
    pages: int
    """Of each worker."""
    page_tokens: int
    policy: Policy = "cache-aware"
    eviction: Eviction = "lru"
    max_running: int = 256
    seed: int = 0
    event_lag_s: float = 0.0
    heartbeat_s: float = 1.0
    detect_s: float = 0.2
    """From a worker's death until the front knows."""
    deadline_s: float = 600.0
    """A request that has not ended after this long ends with an error."""
    faults: tuple[Fault, ...] = ()

    def name(self, number: int) -> str:
        """Of a worker."""
        if not self.prefill:
            return f"w{number}"
        return f"p{number}" if number < self.prefill else f"d{number - self.prefill}"

    def roles(self) -> dict[str, WorkerRole]:
        """Of all workers, where some prefill for others."""
        return {
            self.name(number): "prefill" if number < self.prefill else "decode"
            for number in range(self.workers)
        }


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    arrival: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached: int | None = None
    """Prompt tokens found at its first admission."""
    ended: str | None = None
    """"finished" or "deadline"."""
    resumed: int = 0
    worker: str | None = None
    """Where it is now."""
    split: bool = False
    """It is there for its prompt alone."""


@dataclass(slots=True)
class Process:
    """A worker's process: one life of it."""

    name: str
    number: int
    worker: SimulatedWorker
    sequence: int = 0
    lag: float = 0.0
    stalled_until: float = 0.0
    losing_until: float = 0.0
    steps_wanted: bool = False

    def load(self) -> LoadSnapshot:
        """What it says of itself."""
        worker = self.worker
        return LoadSnapshot(
            running=len(worker.prefilling) + len(worker.decoding),
            waiting=len(worker.waiting),
            pages_total=worker.cache.total,
            pages_free=worker.cache.available,
            steps=worker.steps,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            preemptions=worker.preemptions,
            kv_sequence=self.sequence,
        )


@dataclass(slots=True)
class Transfers:
    """Requests that decode workers took over."""

    requests: int = 0
    pages: int = 0
    """That moved; what the decode worker had is not among them."""
    seconds: float = 0.0
    """From the end of their prefill until the decode worker had them, together."""
    ahead: int = 0
    """Whose decode worker read along with the prefill."""


@dataclass(slots=True)
class Run:
    """What a simulation brought."""

    outcomes: list[Outcome]
    gaps: list[tuple[float, int]]
    """(seconds between tokens, how many such)."""
    busy: dict[str, float]
    routed: dict[str, int]
    decision_s: list[float]
    """Processor seconds of each decision."""
    router: Router
    seconds: float
    """Simulated, until the last request ended."""
    preemptions: int = 0
    resumed: int = 0
    said: dict[str, int] = field(default_factory=dict)
    """How often the router asked for what."""
    choices: Counter[str] = field(default_factory=Counter)
    """Why requests were split, or not."""
    transfers: Transfers = field(default_factory=lambda: Transfers())
