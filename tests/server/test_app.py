"""The application without a server around it: what it does with its event loop, and faults of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tenfold.config import ResolvedPlan, ServeConfig
from tenfold.protocol import Chunk, EnginePlan, EngineSettings, Request
from tenfold.server.app import LONG_BODY, App
from tenfold.server.chat_setup import choose_chat
from tenfold.server.flights import Flight, Flights
from tenfold.server.metrics import Metrics
from tenfold.server.models import Models, Sources
from tenfold.server.served import ServedModel
from tenfold.server.server_metrics import ServerMetrics
from tenfold.server.text import Text
from tests.helpers.fake_text import FakeStream, FakeTemplate, FakeTokenizer

PLAN = EnginePlan(
    backend="fake",
    threads=1,
    threads_why="",
    isa="none",
    isa_why="",
    vocab_size=512,
    max_context=1 << 16,
    kv_pages=1 << 16,
    kv_format="bf16",
    page_bytes=1,
    weight_bytes=1,
    format_bytes={},
    lossy_weights=0,
    weights=1,
    max_batch_tokens=512,
    max_running=4,
    load_ms=0.0,
)


class TellingTokenizer(FakeTokenizer):
    """Runs something whenever it is asked to encode."""

    def __init__(self, told: Callable[[], object]) -> None:
        self.told = told

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        self.told()
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)


class Waiting(Flights):
    """Flights whose worker never comes: requests are accepted and wait."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(EngineSettings(model="m"), metrics, max_queue=4, stall_after_s=30)
        self.metrics = metrics
        self.accepted: list[Flight] = []

    def submit(self, request: Request, admitted: bool = False, brief: bool = False) -> Flight:
        self.accepted.append(super().submit(request, admitted))
        return self.accepted[-1]


def app_of(told: Callable[[], object]) -> tuple[App, Waiting]:
    """An application that runs ``told`` when it tokenizes."""
    metrics = Metrics()
    flights = Waiting(metrics)
    text = Text(TellingTokenizer(told), FakeTemplate(), FakeStream)
    models = Models(Sources(locate=str, load_text=lambda path: text))
    resolved = ResolvedPlan(config=ServeConfig(model="fake"), path="", engine=PLAN)
    models.serve(ServedModel(resolved, text, choose_chat(text), flights, metrics))
    return App(models, ServerMetrics(lambda: ()), max_body_bytes=8 << 20), flights


class Call:
    """One HTTP request to an application."""

    def __init__(self, path: str, body: Any = None, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._scope = {
            "type": "http",
            "path": path,
            "method": "GET" if body is None else "POST",
            "headers": headers,
        }
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.status: list[int] = []
        self.body = b""

    async def run(self, app: App) -> Call:
        await app(self._scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        return await asyncio.Future()

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status.append(message["status"])
        self.body += message.get("body", b"")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x" * LONG_BODY}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * (LONG_BODY // 20)}),
    ],
)
def test_others_are_answered_while_a_long_prompt_is_tokenized(path: str, fields: Any) -> None:
    """One long text, or many short ones: while the tokenizer is at it, the event loop is free."""
    answered = threading.Event()
    entered = threading.Event()

    def told() -> None:
        entered.set()
        assert answered.wait(10), "nobody else was answered meanwhile"

    async def scenario() -> list[int]:
        app, flights = app_of(told)
        long = asyncio.create_task(Call(f"/v1/{path}", {**fields, "max_tokens": 1}).run(app))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        status = (await Call("/health").run(app)).status
        answered.set()
        while not flights.accepted:
            await asyncio.sleep(0.001)
        flights.abort_all("enough")
        return [*status, *(await long).status]

    assert asyncio.run(scenario()) == [200, 503]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x" * (PLAN.max_context * 5 + 1)}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * (PLAN.max_context * 5)}]}),
    ],
)
def test_a_prompt_that_cannot_fit_is_not_tokenized(path: str, fields: Any) -> None:
    """More bytes than the context's tokens could say are refused as they are, with both numbers."""

    def told() -> None:
        raise AssertionError("it was tokenized")

    async def scenario() -> Call:
        app, _ = app_of(told)
        return await Call(f"/v1/{path}", fields).run(app)

    call = asyncio.run(scenario())
    error = json.loads(call.body)["error"]
    assert (call.status, error["code"]) == ([400], "context_length_exceeded")
    assert error["param"] == next(iter(fields))
    assert str(PLAN.max_context * 5) in error["message"]


def test_a_fault_of_the_servers_own_is_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    """500 in OpenAI's shape before an answer began; what it was stands in the log alone."""

    def told() -> None:
        raise RuntimeError("a secret of the house")

    async def scenario() -> Call:
        app, _ = app_of(told)
        return await Call("/v1/completions", {"prompt": "x"}).run(app)

    call = asyncio.run(scenario())
    error = json.loads(call.body)["error"]
    assert (call.status, error["type"], error["code"]) == ([500], "server_error", "internal_error")
    assert "secret" not in error["message"]
    assert "a secret of the house" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_fault_after_acceptance_ends_the_request(stream: bool, first: bool) -> None:
    """Before the first token 500, in a stream an error event and no [DONE]; nothing remains in flight."""

    async def scenario() -> tuple[Call, int]:
        app, flights = app_of(lambda: None)
        call = Call("/v1/completions", {"prompt": "x", "stream": stream})
        task = asyncio.create_task(call.run(app))
        while not flights.accepted:
            await asyncio.sleep(0.001)
        (flight,) = flights.accepted
        if not first:
            flight.arrived(Chunk(id="", tokens=(40,), cached_tokens=0))
            await asyncio.sleep(0.01)
        flight.arrived(Chunk(id="", tokens=("no number",)))  # type: ignore[arg-type]
        await task
        return call, flights.metrics.in_flight

    call, left = asyncio.run(scenario())
    assert left == 0
    assert call.status == [200 if stream and not first else 500]
    last = call.body.decode().strip().rpartition("\n\n")[2].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "internal_error"
