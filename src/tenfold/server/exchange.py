"""One completion request over HTTP, from its body to its last byte.

What costs time once a token is written out here and in `shapes`: no framework stands between.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, Protocol

from tenfold.protocol import Request
from tenfold.server.access_log import RefusalLine, RequestLine, milliseconds
from tenfold.server.asgi import Receive, Scope, Send, traceparent
from tenfold.server.errors import ApiError, broken, unexpected
from tenfold.server.flights import ClientGone, Flight
from tenfold.server.metrics import Metrics
from tenfold.server.output import Output, Piece
from tenfold.server.requests import ApiRequest
from tenfold.server.shapes import DONE, Shape, event, usage

log = logging.getLogger("tenfold.requests")


class Desk(Protocol):
    """What an exchange needs of the application."""

    @property
    def model(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    async def read_body(self, scope: Scope, receive: Receive) -> bytes: ...

    async def prepare(self, chat: bool, body: bytes) -> tuple[ApiRequest, tuple[int, ...]]: ...

    def submit(self, request: Request) -> Flight: ...

    def open(self, chat: bool, parsed: ApiRequest, request_id: str) -> tuple[Output, Shape]: ...

    def release(self, flight: Flight, keep: int | None = None) -> None: ...

    def cancel(self, flight: Flight) -> None: ...


class Exchange:
    """One completion request and its answer."""

    def __init__(self, app: Desk, id: str, chat: bool, receive: Receive, send: Send) -> None:
        self._app = app
        self._id = id
        self._chat = chat
        self._receive = receive
        self._send = send
        self._began = time.monotonic()
        self._status: int | None = None
        """The HTTP status, once it is sent."""
        self._traceparent: str | None = None

    async def run(self, scope: Scope) -> None:
        """Answers, whatever happens; the flight is released on every way out."""
        app = self._app
        self._traceparent = traceparent(scope)
        try:
            body = await app.read_body(scope, self._receive)
            parsed, prompt = await app.prepare(self._chat, body)
            # The client's id may be used twice; the engine's must not be.
            request = Request(
                id=f"{self._id}-{secrets.token_hex(4)}",
                prompt=prompt,
                params=parsed.params,
                eos_token_ids=app.eos_token_ids,
            )
            flight = app.submit(request)
        except ApiError as error:
            await self._refuse(error)
            return
        except ClientGone:
            return
        output, shape = app.open(self._chat, parsed, self._id)
        watcher = asyncio.create_task(self._watch(flight))
        finish: str | None = "error"
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
                if error.status == 400 and flight.first_at is None:
                    # The engine has checked what only it can know.
                    finish = None
                    if error.param == "prompt":
                        error.param = parsed.prompt_field
                    await self._refuse(error)
                else:
                    log.error("%s failed: %s", self._id, error.message)
                    await self._fail(error)
            except Exception:
                finish = "error"
                log.exception("%s failed", self._id)
                await self._fail(unexpected())
        finally:
            watcher.cancel()
            app.release(flight)
            if finish is not None:
                self._account(flight, output, finish, parsed.stream)

    async def _refuse(self, error: ApiError) -> None:
        """The request never began: it counts as rejected, and as nothing else."""
        self._app.metrics.rejected[str(error.status)] += 1
        log.info(
            RefusalLine(
                id=self._id, status=error.status, error=error.message, param=error.param, code=error.code
            )
        )
        await answer_error(self._send, self._id, error)

    async def _watch(self, flight: Flight) -> None:
        """Cancels the flight as soon as the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._app.cancel(flight)

    async def _next(self, flight: Flight, output: Output) -> Piece:
        piece = output.push(await flight.next())
        if output.finish is None:
            return piece
        # After a stop string the engine is still at work.
        self._app.release(flight, output.completion_tokens if output.finish == "stop" else None)
        if output.finish in ("error", "abort"):
            raise broken(output.error or f"the engine ended the request: {output.finish}")
        return piece

    async def _stream(self, flight: Flight, output: Output, shape: Shape, include_usage: bool) -> None:
        piece = await self._next(flight, output)
        # Only now, so that a request that fails before its first token gets a proper status.
        self._status = 200
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
        self._status = 200
        await answer(self._send, self._id, 200, body, "application/json")

    async def _fail(self, error: ApiError) -> None:
        if (
            self._status is not None
        ):  # an error event, and no [DONE]: nobody must take it for a complete answer
            await self._send({"type": "http.response.body", "body": event(error.body())})
        else:
            self._status = error.status
            await answer_error(self._send, self._id, error)

    def _account(self, flight: Flight, output: Output, finish: str, stream: bool) -> None:
        now = time.monotonic()
        prompt = len(flight.request.prompt)
        cached = output.cached_tokens or 0
        metrics = self._app.metrics
        metrics.finished[finish] += 1
        metrics.duration.observe(now - self._began)
        if output.cached_tokens is not None:
            metrics.prompt_tokens += prompt
            metrics.cached_tokens += cached
        began = None
        if flight.first_at is not None and output.queue_ms is not None:
            began = flight.submitted_at + output.queue_ms / 1e3
        log.info(
            RequestLine(
                id=self._id,
                endpoint="chat" if self._chat else "completion",
                model=self._app.model,
                status=self._status,
                finish=finish,
                cancelled=finish == "abort",
                stream=stream,
                prompt_tokens=prompt,
                cached_tokens=cached,
                new_tokens=prompt - cached,
                completion_tokens=output.completion_tokens,
                queue_ms=output.queue_ms,
                prefill_ms=milliseconds(began, flight.first_at),
                decode_ms=milliseconds(flight.first_at, flight.last_at),
                ttft_ms=milliseconds(self._began, flight.first_at),
                total_ms=round((now - self._began) * 1e3, 3),
                acceptance=output.acceptance,
                deaths=flight.deaths,
                traceparent=self._traceparent,
            )
        )


def _usage(flight: Flight, output: Output) -> dict[str, Any]:
    return usage(len(flight.request.prompt), output.completion_tokens, output.cached_tokens or 0)


async def answer(
    send: Send, id: str, status: int, body: bytes, kind: str, extra: tuple[tuple[str, str], ...] = ()
) -> None:
    """A whole response."""
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", id.encode()),
        *((name.encode(), value.encode()) for name, value in extra),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, id: str, error: ApiError) -> None:
    """An error object with its status and headers."""
    await answer(send, id, error.status, error.body(), "application/json", error.headers)
