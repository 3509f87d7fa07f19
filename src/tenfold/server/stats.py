"""`GET /stats`: what a server does now, as one small JSON object. The page in the browser reads it.

Counters grow as those of ``/metrics`` do; who wants a rate takes two of them, and divides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from tenfold.protocol import EnginePlan, LoadSnapshot
from tenfold.server.metrics import Metrics


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as it last told: at most a tenth of a second ago while it works."""

    name: str
    running: int
    """Requests that its engine computes."""
    waiting: int
    """Requests that wait in its engine."""
    kv_used_bytes: int
    """KV memory that running requests need; what is only cached does not count."""
    kv_total_bytes: int
    address: str | None = None
    """Of a worker that joined from elsewhere; None: it is the server's own."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What a server does now with one of its models. Times are in seconds; counters are since that was
    loaded."""

    models: list[str]
    """The names of all models in the API."""
    model: str
    """The one that this is of."""
    max_context_tokens: int
    ready: bool
    not_ready_reason: str | None
    """Why ``/ready`` says no."""
    uptime_s: float
    """Since the model was loaded; also the clock of the counters."""
    requests_in_flight: int
    """Accepted and not ended."""
    requests_running: int
    requests_waiting: int
    requests_ended: int
    """In whatever way."""
    requests_rejected: int
    """Never begun: 4xx or 503."""
    prompt_tokens: int
    """Of requests that began."""
    cached_prompt_tokens: int
    """Of these, found in the cache."""
    generated_tokens: int
    first_tokens: int
    """Requests that had their first token."""
    first_token_wait_s: float
    """How long all of these waited for it, together."""
    decode_steps: int
    """Steps of requests that decoded, with a draft or without; 0 where the engine does not speculate."""
    decode_step_tokens: int
    """Tokens that came of them; divided by the steps: the acceptance length."""
    worker_restarts: int
    workers: list[WorkerStats]


class StatsSource:
    """Makes `Stats` of a model's metrics."""

    def __init__(
        self, model: str, plan: EnginePlan, metrics: Metrics, not_ready: Callable[[], str | None]
    ) -> None:
        self._model = model
        self._plan = plan
        self._metrics = metrics
        self._not_ready = not_ready
        self._began = time.monotonic()

    def now(self, models: Sequence[str]) -> Stats:
        """A new one; ``models``: the names of all."""
        metrics = self._metrics
        reason = self._not_ready()
        workers = self._workers()
        speculation = metrics.speculation_counts()
        return Stats(
            models=list(models),
            model=self._model,
            max_context_tokens=self._plan.max_context,
            ready=reason is None,
            not_ready_reason=reason,
            uptime_s=round(time.monotonic() - self._began, 3),
            requests_in_flight=metrics.in_flight,
            requests_running=sum(worker.running for worker in workers),
            requests_waiting=sum(worker.waiting for worker in workers),
            requests_ended=metrics.finished.total(),
            requests_rejected=metrics.rejected.total(),
            prompt_tokens=metrics.prompt_tokens,
            cached_prompt_tokens=metrics.cached_tokens,
            generated_tokens=metrics.generated_tokens,
            first_tokens=sum(metrics.ttft.counts),
            first_token_wait_s=metrics.ttft.sum,
            decode_steps=speculation["steps"],
            decode_step_tokens=speculation["committed_tokens"],
            worker_restarts=metrics.worker_restarts,
            workers=workers,
        )

    def _workers(self) -> list[WorkerStats]:
        fleet = self._metrics.fleet
        addresses = {} if fleet is None else {post.name: post.address for post in fleet.posts}
        return [
            _worker(name, load, self._plan.page_bytes, addresses.get(name))
            for name, load in self._metrics.loads.items()
        ]


def _worker(name: str, load: LoadSnapshot, page_bytes: int, address: str | None) -> WorkerStats:
    return WorkerStats(
        name=name,
        running=load.running,
        waiting=load.waiting,
        kv_used_bytes=(load.pages_total - load.pages_free) * page_bytes,
        kv_total_bytes=load.pages_total * page_bytes,
        address=address,
    )
