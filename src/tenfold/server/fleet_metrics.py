"""What the metrics page says of workers and of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tenfold.protocol import LoadSnapshot
from tenfold.router.base import RouterCounts
from tenfold.router.router import Router
from tenfold.router.timing import WorkerTiming
from tenfold.server.post import STATES, Post

COUNTS = {
    "routed": "Requests sent to a worker, each time one is sent",
    "prompt_tokens": "Tokens of their prompts",
    "overlap_tokens": "Of these, the ones that the chosen worker was known to have",
    "spilled": "Sent to a worker although another had more of the prompt",
    "event_batches": "Messages about pages",
    "gaps": "Streams of such messages found broken",
    "resyncs": "Snapshots of a worker's pages taken up",
    "overdue": "Requests that showed no progress in time",
    "silent": "Times that a worker said nothing for too long",
    "strays": "Messages about what is not known any more",
}


class FleetView(Protocol):
    """What is shown of a `tenfold.server.fleet.Fleet`."""

    @property
    def posts(self) -> Sequence[Post]: ...

    @property
    def router(self) -> Router: ...

    @property
    def many(self) -> bool: ...

    @property
    def timing(self) -> WorkerTiming: ...

    moved: int
    decision_s: float
    sent: dict[str, int]


class GateView(Protocol):
    """What is shown of a `tenfold.server.gate.Gate`."""

    joined: int
    turned_away: Counter[str]


def gate_families(gate: GateView) -> Iterator[Metric]:
    """What became of workers of other machines that came."""
    yield CounterMetricFamily("tenfold_worker_joins", "Workers let in, each time one is", value=gate.joined)
    away = CounterMetricFamily("tenfold_workers_turned_away", "Workers not let in", labels=["reason"])
    for reason, count in sorted(gate.turned_away.items()):
        away.add_metric([reason], count)
    yield away


def fleet_families(fleet: FleetView, loads: Mapping[str, LoadSnapshot]) -> Iterator[Metric]:
    """The families; a series for each worker."""
    if fleet.many:
        yield from _router_families(fleet)
    state = GaugeMetricFamily("tenfold_worker_state", "1 for the state it is in", labels=["worker", "state"])
    here = GaugeMetricFamily("tenfold_worker_requests", "Requests that are on it", labels=["worker"])
    for post in fleet.posts:
        for one in STATES:
            state.add_metric([post.name, one], int(post.state == one))
        here.add_metric([post.name], len(post.requests))
    yield state
    yield here
    joined = sum(post.address is not None for post in fleet.posts)
    yield GaugeMetricFamily("tenfold_workers_joined", "Workers of other machines that are here", value=joined)
    for name, help, field in (
        ("running", "Requests that its engine computes", "running"),
        ("waiting", "Requests that wait in its engine", "waiting"),
        ("kv_pages_total", "Its KV pages", "pages_total"),
        ("kv_pages_free", "Those that no running request needs", "pages_free"),
    ):
        family = GaugeMetricFamily(f"tenfold_worker_{name}", help, labels=["worker"])
        for worker, load in sorted(loads.items()):
            family.add_metric([worker], getattr(load, field))
        yield family


def _router_families(fleet: FleetView) -> Iterator[Metric]:
    counts: RouterCounts = fleet.router.counts
    for name, help in COUNTS.items():
        yield CounterMetricFamily(f"tenfold_router_{name}", help, value=getattr(counts, name))
    yield CounterMetricFamily(
        "tenfold_router_moved", "Requests taken from a worker, to go on elsewhere", value=fleet.moved
    )
    yield CounterMetricFamily(
        "tenfold_router_decision_seconds", "Spent on choosing workers", value=fleet.decision_s
    )
    timing = fleet.timing
    for name, help, value in (
        ("indexed_pages", "Different pages that workers are known to hold", len(fleet.router.index)),
        ("prefill_token_seconds", "Taken to need for a prompt token, in a full step", timing.token_seconds),
        ("decode_step_seconds", "Taken to need for a token of a lone stream", timing.decode(1, 0)),
    ):
        yield GaugeMetricFamily(f"tenfold_router_{name}", help, value=value)
    sent = CounterMetricFamily("tenfold_router_requests", "Requests sent to each worker", labels=["worker"])
    for worker, count in sorted(fleet.sent.items()):
        sent.add_metric([worker], count)
    yield sent
