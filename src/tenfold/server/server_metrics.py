"""The metrics page of a server: the counts of all its models, told apart by a label ``model``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tenfold.server.metrics import Metrics

REJECTED = "tenfold_requests_rejected"
"""The one family that also counts what is of no model."""


class ServerMetrics(Collector):
    """All counts of one server. Those of a model begin when it is loaded and end when it is unloaded."""

    def __init__(self, models: Callable[[], Iterable[tuple[str, Metrics]]]) -> None:
        """``models``: the names of all models at the moment, and their counts."""
        self._models = models
        self.rejected: Counter[str] = Counter()
        """Requests that were refused before their model was known, by HTTP status."""

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry: each family once, with the series of all models."""
        families: dict[str, Metric] = {}
        for name, metrics in self._models():
            for family in metrics.collect():
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels={"model": name, **sample.labels}) for sample in family.samples
                ]
        own = CounterMetricFamily(REJECTED, "Requests that never began", labels=["status"])
        for status, count in sorted(self.rejected.items()):
            own.add_metric([status], count)
        if REJECTED in families:
            families[REJECTED].samples += own.samples
        yield from {REJECTED: own, **families}.values()
