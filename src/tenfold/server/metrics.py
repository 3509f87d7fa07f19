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
        self.worker_restarts = 0
        self.in_flight = 0
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.duration = Histogram(DURATION_BOUNDS)
        self.load: LoadSnapshot | None = None
        self._earlier_preemptions = 0
        self._earlier_speculation: Counter[str] = Counter()
        self._earlier_idle: Counter[str] = Counter()
        self._earlier_swaps: Counter[str] = Counter()
        self._earlier_constraints: Counter[str] = Counter()

    def worker_gone(self) -> None:
        """A worker's own counters end with it."""
        if self.load is not None:
            self._earlier_preemptions += self.load.preemptions
            self._earlier_constraints = self._constraints()
            self._earlier_speculation, self._earlier_idle, self._earlier_swaps = self._speculation()
        self.load = None

    def speculation_counts(self) -> Counter[str]:
        """What speculation did, over all workers so far; keys: those of `SPECULATION`."""
        return self._speculation()[0]

    def _speculation(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Counts of speculation, steps without a draft by reason, and what became of trained heads, over all
        workers so far."""
        counts, idle = self._earlier_speculation.copy(), self._earlier_idle.copy()
        swaps = self._earlier_swaps.copy()
        if self.load is not None and (now := self.load.speculation) is not None:
            counts.update({name: getattr(now, name) for name, _ in SPECULATION})
            idle.update(now.idle)
            swaps.update(now.head_swaps)
        return counts, idle, swaps

    def _constraints(self) -> Counter[str]:
        """What constraints cost, over all workers so far."""
        counts = self._earlier_constraints.copy()
        if self.load is not None and self.load.constraints is not None:
            for name, _, _ in CONSTRAINTS:
                counts[name] += getattr(self.load.constraints, name)
        return counts

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry."""
        load = self.load
        yield _labelled("tenfold_requests", "Ended requests", "finish", self.finished)
        yield _labelled("tenfold_requests_rejected", "Requests that never began", "status", self.rejected)
        for name, help, count in (
            ("prompt_tokens", "Prompt tokens of requests that began", self.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that were in the cache", self.cached_tokens),
            ("generated_tokens", "Tokens received from the worker", self.generated_tokens),
            ("worker_restarts", "Times the worker had to be started again", self.worker_restarts),
            (
                "preemptions",
                "Requests put back to make room",
                self._earlier_preemptions + (load.preemptions if load else 0),
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
        yield _labelled("tenfold_speculation_idle_steps", "Steps without a draft", "reason", idle)
        yield _labelled(
            "tenfold_speculation_head_swaps", "Heads that were trained while serving", "result", swaps
        )
        for name, help, value in (
            ("requests_in_flight", "Requests accepted and not ended", self.in_flight),
            ("requests_running", "Requests that the engine computes", load.running if load else 0),
            ("requests_waiting", "Requests that wait in the engine", load.waiting if load else 0),
            ("kv_pages_total", "KV pages", load.pages_total if load else 0),
            ("kv_pages_free", "KV pages that no running request needs", load.pages_free if load else 0),
            ("worker_steps", "Steps of the present worker: forward progress", load.steps if load else 0),
        ):
            yield GaugeMetricFamily(f"tenfold_{name}", help, value=value)
        yield self.ttft.family("tenfold_time_to_first_token_seconds", "From the request to its first token")
        yield self.itl.family(
            "tenfold_inter_token_latency_seconds", "From one token to the next of a request"
        )
        yield self.duration.family("tenfold_request_duration_seconds", "From a request to its end")


def _labelled(name: str, help: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
