"""OpenTelemetry traces: a span for each request, made of what the log is told of it.

All times of a request are known when it has ended, so its spans are made then, from its line in the log:
nothing is done while tokens flow. Needs the extra ``tenfold[otel]``.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import urlsplit

from tenfold.config import OptionError
from tenfold.server.access_log import RequestLine

FLUSH_S = 3.0
"""A server that stops waits so long for the collector to take the last spans."""


def check_endpoint(url: str) -> str:
    """Where spans are sent: with OTLP's own path if ``url`` has none. ValueError: it is no URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"otlp_endpoint is {url!r}; write it like http://127.0.0.1:4318", "otlp_endpoint")
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else url


class TraceHandler(logging.Handler):
    """A handler for the log of requests, that sends spans to a collector by OTLP over HTTP, from a thread."""

    def __init__(self, endpoint: str) -> None:
        """Raises ValueError when the extra is not installed, or ``endpoint`` is no URL."""
        url = check_endpoint(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise OptionError(
                "otlp_endpoint needs the extra: pip install 'tenfold[otel]'", "otlp_endpoint"
            ) from None
        # Last of what may fail: from here on logging closes the handler when the process ends.
        super().__init__()
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=FLUSH_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "tenfold"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("tenfold")

    def emit(self, record: logging.LogRecord) -> None:
        """Makes the spans of a request that has ended; other records are none of its business."""
        line: object = record.msg
        if isinstance(line, RequestLine):
            self._request(line, record.created)

    def _request(self, line: RequestLine, ended_s: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = int(ended_s * 1e9)
        start = end - _ns(line.total_ms)
        parent = {"traceparent": line.traceparent} if line.traceparent else {}
        span = self._tracer.start_span(
            f"{line.operation} {line.model}",
            context=TraceContextTextMapPropagator().extract(parent),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(line),
        )
        inside = set_span_in_context(span)
        if line.ttft_ms is not None:
            first = start + _ns(line.ttft_ms)
            prefill = first if line.prefill_ms is None else first - _ns(line.prefill_ms)
            queue = prefill if line.queue_ms is None else prefill - _ns(line.queue_ms)
            last = first + _ns(line.decode_ms or 0.0)
            for name, begin, stop in (
                ("queue", queue, prefill),
                ("prefill", prefill, first),
                ("decode", first, last),
            ):
                self._tracer.start_span(name, context=inside, start_time=begin).end(stop)
        if "error" in line.finish.split(","):
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Sends what is left, and waits for that a moment at most: a collector may be gone."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        self._exporter.shutdown()
        super().close()


def _attributes(line: RequestLine) -> dict[str, Any]:
    """OpenTelemetry's names for what models do, and a few of our own."""
    found = {
        "gen_ai.operation.name": line.operation,
        "gen_ai.provider.name": "tenfold",
        "gen_ai.request.model": line.model,
        "gen_ai.response.id": line.id,
        "gen_ai.response.finish_reasons": line.finish.split(","),
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": line.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": line.cached_tokens,
        "http.response.status_code": line.status,
        "tenfold.stream": line.stream,
        "tenfold.cancelled": line.cancelled,
        "tenfold.acceptance": line.acceptance,
        "tenfold.worker_deaths": line.deaths,
    }
    return {name: value for name, value in found.items() if value is not None}


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
