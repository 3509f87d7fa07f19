"""What the metrics page says of workers and of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tenfold.protocol import LoadSnapshot
from tenfold.router.base import RouterCounts
from tenfold.router.router import Router
from tenfold.router.split import SplitRouter
from tenfold.router.timing import WorkerTiming
from tenfold.server.post import STATES, Post
from tenfold.server.split import Splits, transferred

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

TRANSFERS = {
    "exported_pages": "KV pages that prefill workers made ready for others",
    "exported_bytes": "Their bytes",
    "imported_pages": "KV pages that decode workers took over",
    "imported_bytes": "Their bytes",
    "declined": "Requests whose pages could not be made ready for want of room",
    "starts": "Requests that decode workers went on with, all pages there",
}
TRANSFER_SECONDS = {
    "export": "Spent on writing pages for others",
    "import": "Spent on reading pages that were ready",
    "start": "From last pages' being ready to the steps that went on with them, together",
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
    splits: Splits | None


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


def fleet_families(
    fleet: FleetView, loads: Mapping[str, LoadSnapshot], earlier: Counter[str]
) -> Iterator[Metric]:
    """The families; a series for each worker. ``earlier``: what workers that are gone transferred."""
    if fleet.many:
        yield from _router_families(fleet)
    if fleet.splits is not None and isinstance(fleet.router, SplitRouter):
        yield from _split_families(fleet.router, fleet.splits, earlier + transferred(loads.values()))
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


def _split_families(router: SplitRouter, splits: Splits, transfers: Counter[str]) -> Iterator[Metric]:
    """Of a fleet with prefill and decode workers."""
    yield CounterMetricFamily(
        "tenfold_router_split", "Requests whose prompt went to a prefill worker", value=router.splits.split
    )
    reasons = CounterMetricFamily("tenfold_router_not_split", "Requests that were not", labels=["reason"])
    for reason, count in sorted(router.splits.not_split.items()):
        reasons.add_metric([reason], count)
    yield reasons
    for name, help in TRANSFERS.items():
        yield CounterMetricFamily(f"tenfold_transfer_{name}", help, value=transfers[name])
    for name, help in TRANSFER_SECONDS.items():
        yield CounterMetricFamily(
            f"tenfold_transfer_{name}_seconds", help, value=transfers[f"{name}_us"] / 1e6
        )
    for name, label, help in (
        ("imports", "result", "Requests that came with pages, by what became of those"),
        ("fallbacks", "reason", "Requests some of whose pages did not come, and were computed"),
    ):
        family = CounterMetricFamily(f"tenfold_transfer_{name}", help, labels=[label])
        found = {key.partition(":")[2]: n for key, n in transfers.items() if key.startswith(f"{name}:")}
        if name == "fallbacks" and splits.not_exported:
            found["not exported"] = splits.not_exported
        for reason, count in sorted(found.items()):
            family.add_metric([reason], count)
        yield family
    for name, help, value in (
        ("page_seconds", "Taken to need for reading a page", router.transfer.page_s),
        ("handover_seconds", "From a last page's being ready to the next step", router.transfer.start_s),
    ):
        yield GaugeMetricFamily(f"tenfold_transfer_{name}", help, value=value)
