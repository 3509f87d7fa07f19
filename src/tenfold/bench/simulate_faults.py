"""Faults for the simulator: what may go wrong with workers, their events and the router, drawn from a
seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

FaultKind = Literal["kill", "stall", "slow", "lose-events", "lag-events", "restart-router"]
FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "stall", "slow", "lose-events", "lag-events", "restart-router")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    at: float
    """Seconds after the start."""
    kind: FaultKind
    worker: int = 0
    seconds: float = 0.0
    """How long a worker is away, stalled or slow, or its events lag or are lost."""
    amount: float = 0.0
    """slow: how many times slower; lag-events: seconds that each message is late."""


def random_faults(seed: int, count: int, workers: int, duration: float) -> list[Fault]:
    """``count`` faults at random times within ``duration`` seconds; the same seed gives the same."""
    draw = random.Random(seed)
    faults = []
    for _ in range(count):
        kind = draw.choice(FAULT_KINDS)
        faults.append(
            Fault(
                at=draw.uniform(0.0, duration),
                kind=kind,
                worker=draw.randrange(workers),
                seconds=draw.uniform(0.5, 20.0),
                amount=draw.uniform(2.0, 20.0) if kind == "slow" else draw.uniform(0.05, 2.0),
            )
        )
    return sorted(faults, key=lambda fault: fault.at)
