"""The HTTP endpoints, as a bare ASGI application: what costs time once a token is written out here."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tenfold.protocol import EnginePlan, Request
from tenfold.server.errors import ApiError, broken, invalid
from tenfold.server.flights import ClientGone, Flight, Flights
from tenfold.server.metrics import Metrics
from tenfold.server.output import Output, Piece
from tenfold.server.requests import ApiRequest, parse_chat, parse_completion
from tenfold.server.shapes import DONE, ChatShape, CompletionShape, Shape, event, usage
from tenfold.server.text import Text

log = logging.getLogger("tenfold.requests")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

LONG_TEXT = 1 << 14
"""Characters; a longer prompt is tokenized in a thread, so that streams do not stand still meanwhile."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class App:
    """The application; one for each server."""

    def __init__(
        self,
        *,
        model: str,
        plan: EnginePlan,
        max_body_bytes: int,
        text: Text,
        flights: Flights,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._plan = plan
        self._max_body_bytes = max_body_bytes
        self._text = text
        self._flights = flights
        self._metrics = metrics
        self._created = int(time.time())
        self._models = msgspec.json.encode({"object": "list", "data": [self._model_object()]})
        self._gets: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": lambda: (200, b'{"status":"ok"}', "application/json"),
            "/ready": self._ready,
            "/metrics": lambda: (200, metrics.page(), "text/plain; version=0.0.4; charset=utf-8"),
            "/v1/models": lambda: (200, self._models, "application/json"),
        }
        self._posts = {"/v1/chat/completions": True, "/v1/completions": False}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP, not {scope['type']}")
        path, method = scope["path"], scope["method"]
        request_id = _request_id(scope)
        try:
            if path in self._posts:
                _check_method(method, ("POST",))
                await _Exchange(self, request_id, self._posts[path], receive, send).run(scope)
                return
            if path.startswith("/v1/models/"):
                _check_method(method, ("GET", "HEAD"))
                status, body, kind = self._one_model(path.removeprefix("/v1/models/"))
            elif path in self._gets:
                _check_method(method, ("GET", "HEAD"))
                status, body, kind = self._gets[path]()
            else:
                known = ", ".join([*self._posts, *self._gets])
                raise ApiError(404, f"there is nothing at {path}; there is: {known}", code="not_found")
        except ApiError as error:
            await _answer_error(send, request_id, error)
            return
        await _answer(send, request_id, status, body, kind)

    def _ready(self) -> tuple[int, bytes, str]:
        reason = self._flights.not_ready()
        if reason is None:
            return 200, b'{"status":"ready"}', "application/json"
        return 503, msgspec.json.encode({"status": "not ready", "reason": reason}), "application/json"

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "tenfold",
            "max_model_len": self._plan.max_context,
        }

    def _one_model(self, name: str) -> tuple[int, bytes, str]:
        if name != self._model:
            raise ApiError(
                404, f"there is no model {name} here; there is: {self._model}", code="model_not_found"
            )
        return 200, msgspec.json.encode(self._model_object()), "application/json"

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises ApiError (413) when it is too long, ClientGone."""
        limit = self._max_body_bytes
        too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_long
        parts = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_long
            if not message.get("more_body"):
                return b"".join(parts)

    def parse(self, chat: bool, body: bytes) -> ApiRequest:
        """Checks a body."""
        parse = parse_chat if chat else parse_completion
        return parse(body, (self._model,), self._plan.vocab_size)

    async def tokenize(self, parsed: ApiRequest) -> tuple[int, ...]:
        """The prompt's tokens. Raises ApiError when there are too many or none, or the template refuses."""
        if parsed.token_ids is not None:
            ids: tuple[int, ...] = parsed.token_ids
        else:
            try:
                ids = tuple(await self._encode(parsed))
            except ValueError as error:
                raise invalid("messages" if parsed.messages else "prompt", str(error)) from None
        if not ids:
            raise invalid("prompt", "the prompt has no tokens; it must have at least one")
        most = self._plan.max_context
        wanted = parsed.params.max_tokens
        if len(ids) >= most or len(ids) + (wanted or 0) > most:
            asked = f" and {wanted} tokens were asked for" if wanted else ""
            raise invalid(
                "messages" if parsed.messages else "prompt",
                f"the prompt has {len(ids)} tokens{asked}; the context of this model is {most} tokens",
                code="context_length_exceeded",
            )
        return ids

    async def _encode(self, parsed: ApiRequest) -> list[int]:
        loop = asyncio.get_running_loop()
        if parsed.messages is not None:
            if sum(len(message["content"]) for message in parsed.messages) > LONG_TEXT:
                return await loop.run_in_executor(None, self._text.encode_chat, parsed.messages)
            return self._text.encode_chat(parsed.messages)
        assert parsed.text is not None
        if len(parsed.text) > LONG_TEXT:
            return await loop.run_in_executor(None, self._text.encode_prompt, parsed.text)
        return self._text.encode_prompt(parsed.text)

    def submit(self, request: Request) -> Flight:
        """See `Flights.submit`."""
        return self._flights.submit(request)

    def open(self, chat: bool, parsed: ApiRequest, request_id: str) -> tuple[Output, Shape]:
        """What turns the engine's tokens into this request's answer."""
        kind, prefix = (ChatShape, "chatcmpl-") if chat else (CompletionShape, "cmpl-")
        shape: Shape = kind(
            prefix + request_id,
            int(time.time()),
            self._model,
            self._text.tokenizer,
            parsed.params.logprobs is not None,
            parsed.include_usage,
        )
        return Output(self._text.stream(parsed.params.stop)), shape

    def release(self, flight: Flight) -> None:
        """See `Flights.release`."""
        self._flights.release(flight)

    def cancel(self, flight: Flight) -> None:
        """See `Flights.cancel`."""
        self._flights.cancel(flight)

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self._text.tokenizer.eos_token_ids)


class _Exchange:
    """One completion request and its answer."""

    def __init__(self, app: App, id: str, chat: bool, receive: Receive, send: Send) -> None:
        self._app = app
        self._id = id
        self._chat = chat
        self._receive = receive
        self._send = send
        self._began = time.monotonic()
        self._headers_sent = False

    async def run(self, scope: Scope) -> None:
        app = self._app
        try:
            parsed = app.parse(self._chat, await app.read_body(scope, self._receive))
            prompt = await app.tokenize(parsed)
            # The client's id may be used twice; the engine's must not be.
            request = Request(
                id=f"{self._id}-{secrets.token_hex(4)}",
                prompt=prompt,
                params=parsed.params,
                eos_token_ids=app.eos_token_ids,
            )
            flight = app.submit(request)
        except ApiError as error:
            app.metrics.rejected[str(error.status)] += 1
            log.info("%s refused: %d %s", self._id, error.status, error.message)
            await _answer_error(self._send, self._id, error)
            return
        except ClientGone:
            return
        output, shape = app.open(self._chat, parsed, self._id)
        watcher = asyncio.create_task(self._watch(flight))
        finish = "error"
        try:
            try:
                if parsed.stream:
                    await self._stream(flight, output, shape, parsed.include_usage)
                else:
                    await self._whole(flight, output, shape)
                finish = output.finish or "error"
            except ClientGone:
                finish = "abort"
            except ApiError as error:
                log.error("%s failed: %s", self._id, error.message)
                await self._fail(error)
        finally:
            watcher.cancel()
            app.release(flight)
            self._account(flight, output, finish)

    async def _watch(self, flight: Flight) -> None:
        """Cancels the flight as soon as the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._app.cancel(flight)

    async def _next(self, flight: Flight, output: Output) -> Piece:
        piece = output.push(await flight.next())
        if output.finish is None:
            return piece
        self._app.release(flight)  # after a stop string the engine is still at work
        if output.finish in ("error", "abort"):
            raise broken(output.error or f"the engine ended the request: {output.finish}")
        return piece

    async def _stream(self, flight: Flight, output: Output, shape: Shape, include_usage: bool) -> None:
        piece = await self._next(flight, output)
        # Only now, so that a request that fails before its first token gets a proper status.
        self._headers_sent = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = shape.opening() + shape.delta(piece)
        while output.finish is None:
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            data = shape.delta(await self._next(flight, output))
        data += shape.closing(output.finish)
        if include_usage:
            data += shape.usage_event(_usage(flight, output))
        await self._send({"type": "http.response.body", "body": data + DONE})

    async def _whole(self, flight: Flight, output: Output, shape: Shape) -> None:
        whole = Piece()
        texts = []
        while output.finish is None:
            piece = await self._next(flight, output)
            texts.append(piece.text)
            whole.tokens += piece.tokens
            whole.logprobs += piece.logprobs
        whole.text = "".join(texts)
        body = shape.whole(whole, output.finish, _usage(flight, output))
        await _answer(self._send, self._id, 200, body, "application/json")

    async def _fail(self, error: ApiError) -> None:
        if self._headers_sent:  # an error event, and no [DONE]: nobody must take it for a complete answer
            await self._send({"type": "http.response.body", "body": event(error.body())})
        else:
            await _answer_error(self._send, self._id, error)

    def _account(self, flight: Flight, output: Output, finish: str) -> None:
        now = time.monotonic()
        prompt = len(flight.request.prompt)
        cached = output.cached_tokens or 0
        metrics = self._app.metrics
        metrics.finished[finish] += 1
        metrics.duration.observe(now - self._began)
        if output.cached_tokens is not None:
            metrics.prompt_tokens += prompt
            metrics.cached_tokens += cached
        ttft = rate = "-"
        if flight.first_at is not None:
            ttft = f"{(flight.first_at - self._began) * 1e3:.0f}"
            if flight.last_at > flight.first_at:
                rate = f"{(len(flight.tokens) - 1) / (flight.last_at - flight.first_at):.1f}"
        log.info(
            "%s %s prompt=%d cached=%d new=%d queue_ms=%s ttft_ms=%s tokens=%d tok/s=%s deaths=%d finish=%s",
            self._id,
            "chat" if self._chat else "completion",
            prompt,
            cached,
            prompt - cached,
            "-" if output.queue_ms is None else f"{output.queue_ms:.0f}",
            ttft,
            output.completion_tokens,
            rate,
            flight.deaths,
            finish,
        )


def _usage(flight: Flight, output: Output) -> dict[str, Any]:
    return usage(len(flight.request.prompt), output.completion_tokens, output.cached_tokens or 0)


async def _answer(
    send: Send, id: str, status: int, body: bytes, kind: str, extra: tuple[tuple[str, str], ...] = ()
) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", id.encode()),
        *((name.encode(), value.encode()) for name, value in extra),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_error(send: Send, id: str, error: ApiError) -> None:
    await _answer(send, id, error.status, error.body(), "application/json", error.headers)


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        raise ApiError(
            405,
            f"the method must be {' or '.join(allowed)}, not {method}",
            code="method_not_allowed",
            headers=(("allow", ", ".join(allowed)),),
        )


def _request_id(scope: Scope) -> str:
    """The client's ``x-request-id`` if it can be used, else a new one."""
    given = _header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(text := given.decode("latin-1")):
        return text
    return secrets.token_hex(8)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
