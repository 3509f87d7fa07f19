"""What the front counts, and its Prometheus page.

Counting happens once a token, so it is done on plain numbers; Prometheus' objects are made when asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tenfold.protocol import LoadSnapshot
from tenfold.server.fleet_metrics import FleetView, GateView, fleet_families, gate_families
from tenfold.server.split import transferred

TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
ITL_BOUNDS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.08,
    0.15,
    0.3,
    0.6,
    1.2,
    5.0,
)
SPECULATION = (
    ("steps", "Steps of a request that decoded, with a draft or without"),
    ("committed_tokens", "Tokens that came of those steps"),
    ("drafted_tokens", "Drafted tokens that were verified"),
    ("accepted_tokens", "Drafted tokens that stood"),
    ("faults", "Calls of a drafter that failed; no request suffers from that"),
)
CONSTRAINTS = (
    ("compiled", "Constraints that the workers compiled", 1.0),
    ("compile_ms", "Time in that", 1e-3),
    ("masks", "Sets of allowed tokens, one for each row drawn under a constraint", 1.0),
    ("mask_ms", "Time in those", 1e-3),
    ("failures", "Requests that ended as their constraint exceeded a limit", 1.0),
)
"""Fields of ConstraintCounts, what they are, and how many of Prometheus' units (seconds) one of them is."""
TIER = (
    ("stored_pages", "KV pages written to disk"),
    ("dropped_pages", "KV pages that were not written: evicted before their turn, or refused by the disk"),
    ("restored_pages", "KV pages read from disk instead of computed"),
    ("stored_bytes", "Bytes of the pages written to disk"),
    ("restored_bytes", "Bytes of the pages read from disk"),
    ("corrupt", "Reads that found something else than what was written; its pages were computed"),
)
DURATION_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Histogram:
    """Counts of values by upper bound (seconds)."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, name: str, help: str) -> HistogramMetricFamily:
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, help)
        family.add_metric([], buckets, sum_value=self.sum)
        return family


class Metrics(Collector):
    """All counts of one server. They only grow, also over restarts of the worker."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Ended requests by finish reason: stop, length, abort, error."""
        self.rejected: Counter[str] = Counter()
        """Requests that never began, by HTTP status."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.embeddings = 0
        self.worker_restarts = 0
        self.in_flight = 0
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.duration = Histogram(DURATION_BOUNDS)
        self.loads: dict[str, LoadSnapshot] = {}
        """The latest of each worker, by its name."""
        self.fleet: FleetView | None = None
        self.gate: GateView | None = None
        """Where workers of other machines may join."""
        self._earlier_preemptions = 0
        self._earlier_speculation: Counter[str] = Counter()
        self._earlier_idle: Counter[str] = Counter()
        self._earlier_swaps: Counter[str] = Counter()
        self.refused_constraints: Counter[str] = Counter()
        """By one of `tenfold.constraints.checker.REASONS`."""
        self._earlier_constraints: Counter[str] = Counter()
        self._earlier_tier: Counter[str] = Counter()
        self._earlier_transfers: Counter[str] = Counter()

    def worker_gone(self, worker: str) -> None:
        """A worker's own counters end with it."""
        if (load := self.loads.pop(worker, None)) is not None:
            self._earlier_preemptions += load.preemptions
            _add_constraints(load, self._earlier_constraints)
            _add_tier(load, self._earlier_tier)
            self._earlier_transfers += transferred([load])
            earlier = (self._earlier_speculation, self._earlier_idle, self._earlier_swaps)
            _add_speculation(load, *earlier)

    def speculation_counts(self) -> Counter[str]:
        """What speculation did, over all workers so far; keys: those of `SPECULATION`."""
        return self._speculation()[0]

    def _speculation(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Counts of speculation, steps without a draft by reason, and what became of trained heads, over all
        workers so far."""
        counts, idle = self._earlier_speculation.copy(), self._earlier_idle.copy()
        swaps = self._earlier_swaps.copy()
        for load in self.loads.values():
            _add_speculation(load, counts, idle, swaps)
        return counts, idle, swaps

    def _constraints(self) -> Counter[str]:
        """What constraints cost, over all workers so far."""
        counts = self._earlier_constraints.copy()
        for load in self.loads.values():
            _add_constraints(load, counts)
        return counts

    def _tier(self) -> Counter[str]:
        """Counts of the disk tier over all workers so far; those by reason have ``:`` in their name."""
        counts = self._earlier_tier.copy()
        for load in self.loads.values():
            _add_tier(load, counts)
        return counts

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry."""
        loads = self.loads.values()
        yield _labelled("tenfold_requests", "Ended requests", "finish", self.finished)
        yield _labelled("tenfold_requests_rejected", "Requests that never began", "status", self.rejected)
        for name, help, count in (
            ("prompt_tokens", "Prompt tokens of requests that began", self.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that were in the cache", self.cached_tokens),
            ("generated_tokens", "Tokens received from workers", self.generated_tokens),
            ("embeddings", "Embeddings received from workers", self.embeddings),
            ("worker_restarts", "Times a worker had to be started again", self.worker_restarts),
            (
                "preemptions",
                "Requests put back to make room",
                self._earlier_preemptions + sum(load.preemptions for load in loads),
            ),
        ):
            yield CounterMetricFamily(f"tenfold_{name}", help, value=count)
        speculation, idle, swaps = self._speculation()
        for name, help in SPECULATION:
            yield CounterMetricFamily(f"tenfold_speculation_{name}", help, value=speculation[name])
        constraints = self._constraints()
        for name, help, unit in CONSTRAINTS:
            name_there = f"tenfold_constraint_{name.replace('_ms', '_seconds')}"
            yield CounterMetricFamily(name_there, help, value=constraints[name] * unit)
        yield _labelled(
            "tenfold_constraint_refused",
            "Constraints that were refused before any token",
            "reason",
            self.refused_constraints,
        )
        yield _labelled("tenfold_speculation_idle_steps", "Steps without a draft", "reason", idle)
        yield _labelled(
            "tenfold_speculation_head_swaps", "Heads that were trained while serving", "result", swaps
        )
        tier = self._tier()
        for name, help in TIER:
            yield CounterMetricFamily(f"tenfold_kv_disk_{name}", help, value=tier[name])
        yield _labelled(
            "tenfold_kv_disk_restores", "Prompts whose pages were on disk", "result", _by("restores:", tier)
        )
        yield _labelled("tenfold_kv_disk_errors", "Faults of the disk", "call", _by("errors:", tier))
        for name, help, value in (
            ("requests_in_flight", "Requests accepted and not ended", self.in_flight),
            ("requests_running", "Requests that engines compute", sum(load.running for load in loads)),
            ("requests_waiting", "Requests that wait in engines", sum(load.waiting for load in loads)),
            ("kv_pages_total", "KV pages", sum(load.pages_total for load in loads)),
            (
                "kv_pages_free",
                "KV pages that no running request needs",
                sum(load.pages_free for load in loads),
            ),
            # Workers share the folder, so each knows of about the same pages.
            (
                "kv_disk_pages",
                "KV pages on disk",
                max((load.tier.pages for load in loads if load.tier), default=0),
            ),
            (
                "worker_steps",
                "Steps of the present workers: forward progress",
                sum(load.steps for load in loads),
            ),
        ):
            yield GaugeMetricFamily(f"tenfold_{name}", help, value=value)
        if self.fleet is not None:
            yield from fleet_families(self.fleet, self.loads, self._earlier_transfers)
        if self.gate is not None:
            yield from gate_families(self.gate)
        yield self.ttft.family("tenfold_time_to_first_token_seconds", "From the request to its first token")
        yield self.itl.family(
            "tenfold_inter_token_latency_seconds", "From one token to the next of a request"
        )
        yield self.duration.family("tenfold_request_duration_seconds", "From a request to its end")


def _add_speculation(
    load: LoadSnapshot, counts: Counter[str], idle: Counter[str], swaps: Counter[str]
) -> None:
    if (now := load.speculation) is not None:
        counts.update({name: getattr(now, name) for name, _ in SPECULATION})
        idle.update(now.idle)
        swaps.update(now.head_swaps)


def _add_constraints(load: LoadSnapshot, counts: Counter[str]) -> None:
    if load.constraints is not None:
        for name, _, _ in CONSTRAINTS:
            counts[name] += getattr(load.constraints, name)


def _add_tier(load: LoadSnapshot, counts: Counter[str]) -> None:
    if (now := load.tier) is not None:
        counts.update({name: getattr(now, name) for name, _ in TIER if not name.endswith("_bytes")})
        counts["stored_bytes"] += now.stored_pages * now.page_bytes
        counts["restored_bytes"] += now.restored_pages * now.page_bytes
        counts.update({f"restores:{outcome}": count for outcome, count in now.restores.items()})
        counts.update({f"errors:{what}": count for what, count in now.errors.items()})


def _by(prefix: str, counts: Counter[str]) -> Counter[str]:
    return Counter({name[len(prefix) :]: n for name, n in counts.items() if name.startswith(prefix)})


def _labelled(name: str, help: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
