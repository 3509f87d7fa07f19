"""Spans, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.server.tracing import check_endpoint
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import running_server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """An OTLP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        bodies, paths = self.bodies, self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                paths.add(self.path)
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs tenfold[otel]")
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.05,))
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()


def test_a_request_is_a_span_with_its_parts(tmp_path: Path, collector: Collector) -> None:
    """Its parent is the client's; its parts lie in it, one after the other; nothing said is in it."""
    body = {"prompt": "secret" * 5, "max_tokens": 6, "ignore_eos": True}
    with running_server(
        tmp_path / "log", FakeConfig(delay_s=0.01), otlp_endpoint=f"{collector.url}/"
    ) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    spans = collector.spans()
    assert collector.paths == {"/v1/traces"}
    assert len(spans) == 8
    mine = {span.name: span for span in spans if span.trace_id.hex() == TRACE}
    assert set(mine) == {"text_completion fake", "queue", "prefill", "decode"}
    root = mine["text_completion fake"]
    assert root.parent_span_id.hex() == PARENT
    parts = [mine[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == root.span_id for part in parts)
    times = [time for part in parts for time in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert times == sorted(times) and times[1] == times[2] and times[3] == times[4]
    assert root.start_time_unix_nano <= times[0] and times[-1] <= root.end_time_unix_nano
    attributes = {item.key: item.value for item in root.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 30
    assert attributes["gen_ai.usage.output_tokens"].int_value == 6
    assert attributes["http.response.status_code"].int_value == 200
    assert b"secret" not in b"".join(collector.bodies)


def test_a_collector_that_is_gone_costs_nothing(tmp_path: Path, collector: Collector) -> None:
    """Requests are answered, and the server stops in time."""
    gone = Collector()
    gone.server.server_close()
    with running_server(tmp_path / "log", otlp_endpoint=gone.url) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 200
        assert server.stop() == 0


@pytest.mark.parametrize("url", ["collector:4318", "", "ftp://a/b", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    """At the start, with how to write one."""
    with pytest.raises(ValueError, match="4318"):
        check_endpoint(url)


def test_a_path_is_left_as_it_is() -> None:
    """Only a bare host gets OTLP's own."""
    assert check_endpoint("http://a:1") == check_endpoint("http://a:1/") == "http://a:1/v1/traces"
    assert check_endpoint("https://a/x?y=1") == "https://a/x?y=1"
