"""One request for answers over HTTP, from its body to its last byte, whatever the API.

What costs time once a token is written out here and in the shapes: no framework stands between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing
from typing import Protocol

from tenfold.server.access_log import RefusalLine, RequestLine, milliseconds
from tenfold.server.answer_events import Delta, sum_of
from tenfold.server.asgi import Receive, Scope, Send, traceparent
from tenfold.server.choices import Choices, Tower
from tenfold.server.endpoints import Endpoint
from tenfold.server.errors import ApiError, unexpected
from tenfold.server.flights import ClientGone
from tenfold.server.inputs import Inputs
from tenfold.server.metrics import Metrics
from tenfold.server.prepare import Job
from tenfold.server.shapes import Shape

log = logging.getLogger("tenfold.requests")


class Desk(Protocol):
    """What an exchange needs of the application."""

    @property
    def model(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def tower(self) -> Tower: ...

    async def read_body(self, scope: Scope, receive: Receive) -> bytes: ...

    async def prepare(self, endpoint: Endpoint, body: bytes, id: str) -> Job: ...


class Exchange:
    """One request for answers, and these."""

    def __init__(self, app: Desk, id: str, endpoint: Endpoint, receive: Receive, send: Send) -> None:
        self._app = app
        self._id = id
        self._endpoint = endpoint
        self._receive = receive
        self._send = send
        self._began = time.monotonic()
        self._status: int | None = None
        """The HTTP status, once it is sent."""
        self._traceparent: str | None = None

    async def run(self, scope: Scope) -> None:
        """Answers, whatever happens; all flights are released on every way out."""
        app = self._app
        self._traceparent = traceparent(scope)
        try:
            body = await app.read_body(scope, self._receive)
            job = await app.prepare(self._endpoint, body, self._id)
            choices = (Choices if job.parsed.generates else Inputs)(app.tower, job.choices)
            choices.start()
        except ApiError as error:
            await self._refuse(error)
            return
        except ClientGone:
            return
        watcher = asyncio.create_task(self._watch(choices))
        failed: str | None = "error"
        try:
            try:
                if job.parsed.stream:
                    await self._stream(choices, job.shape)
                else:
                    await self._whole(choices, job.shape)
                failed = ""
            except ClientGone:
                failed = "abort"
            except ApiError as error:
                if self._never_began(choices, error):
                    failed = None
                    if error.param == "prompt":
                        error.param = job.parsed.prompt_field
                    await self._refuse(error)
                else:
                    log.error("%s failed: %s", self._id, error.message)
                    await self._fail(error, job.shape)
            except Exception:
                log.exception("%s failed", self._id)
                await self._fail(unexpected(), job.shape)
        finally:
            watcher.cancel()
            choices.release()
            if failed is not None:
                self._account(choices, failed, job.parsed.stream)

    def _never_began(self, choices: Choices, error: ApiError) -> bool:
        """The engine has checked what only it can know, or there was no room for a request's further
        choices."""
        if self._status is not None:
            return False
        flight = choices.all[0].flight
        return error.status == 429 or (error.status == 400 and (flight is None or flight.first_at is None))

    async def _refuse(self, error: ApiError) -> None:
        """The request never began: it counts as rejected, and as nothing else."""
        self._app.metrics.rejected[str(error.status)] += 1
        log.info(
            RefusalLine(
                id=self._id, status=error.status, error=error.message, param=error.param, code=error.code
            )
        )
        await answer_error(self._send, self._id, error, self._endpoint)

    async def _watch(self, choices: Choices) -> None:
        """Cancels everything as soon as the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        choices.cancel()

    async def _stream(self, choices: Choices, shape: Shape) -> None:
        opened: set[int] = set()
        async with aclosing(choices.news()) as news:
            async for choice, delta in news:
                # Only now, so that a request that fails before its first token gets a proper status.
                if self._status is None:
                    await self._begin_stream()
                data = b""
                if choice.index not in opened:
                    opened.add(choice.index)
                    data = shape.opening(choice.index, choices.usage())
                data += shape.delta(choice.index, delta)
                if choice.answer.finish is not None:
                    data += shape.closing(choice.index, choice.answer.finish)
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": shape.ending(choices.usage())})

    async def _begin_stream(self) -> None:
        self._status = 200
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), self._id.encode()) for name in self._endpoint.id_headers),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _whole(self, choices: Choices, shape: Shape) -> None:
        deltas: list[list[Delta]] = [[] for _ in choices.all]
        async with aclosing(choices.news()) as news:
            async for choice, delta in news:
                deltas[choice.index].append(delta)
        body = shape.whole([sum_of(each) for each in deltas], choices.usage())
        names = self._endpoint.id_headers
        self._status = 200
        await answer(self._send, self._id, 200, body, "application/json", id_headers=names)

    async def _fail(self, error: ApiError, shape: Shape) -> None:
        if self._status is not None:
            await self._send({"type": "http.response.body", "body": shape.failure(error)})
        else:
            self._status = error.status
            await answer_error(self._send, self._id, error, self._endpoint)

    def _account(self, choices: Choices, failed: str, stream: bool) -> None:
        """``failed``: how the choices ended that have not, empty if all have."""
        now = time.monotonic()
        usage = choices.usage()
        metrics = self._app.metrics
        finishes = []
        for choice in choices.all:
            finish = choice.answer.finish
            finishes.append(finish.reason if finish is not None and not failed else failed or "error")
            metrics.finished[finishes[-1]] += 1
        metrics.duration.observe(now - self._began)
        if choices.all[0].answer.cached_tokens is not None:
            metrics.prompt_tokens += usage.prompt_tokens
            metrics.cached_tokens += usage.cached_tokens
        steps = sum(choice.answer.steps for choice in choices.all)
        step_tokens = sum(choice.answer.step_tokens for choice in choices.all)
        log.info(
            RequestLine(
                id=self._id,
                endpoint=self._endpoint.name,
                model=self._app.model,
                status=self._status,
                finish=",".join(dict.fromkeys(finishes)),
                choices=len(choices.all),
                cancelled=failed == "abort",
                stream=stream,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                new_tokens=usage.prompt_tokens - usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                **self._times(choices),
                total_ms=round((now - self._began) * 1e3, 3),
                acceptance=round(step_tokens / steps, 3) if steps else None,
                deaths=sum(choice.flight.deaths for choice in choices.all if choice.flight is not None),
                traceparent=self._traceparent,
            )
        )

    def _times(self, choices: Choices) -> dict[str, float | None]:
        """What the log says of times; all are None where there was no token."""
        times = [
            (choice.flight.first_at, choice.flight.submitted_at, choice.answer.queue_ms)
            for choice in choices.all
            if choice.flight is not None
        ]
        first_at, submitted_at, queue_ms = min(times, key=lambda each: each[0] or math.inf)
        last_at = max(choice.flight.last_at for choice in choices.all if choice.flight is not None)
        began = None if first_at is None or queue_ms is None else submitted_at + queue_ms / 1e3
        return {
            "queue_ms": queue_ms,
            "prefill_ms": milliseconds(began, first_at),
            "decode_ms": milliseconds(first_at, last_at),
            "ttft_ms": milliseconds(self._began, first_at),
        }


async def answer(
    send: Send,
    id: str,
    status: int,
    body: bytes,
    kind: str,
    extra: tuple[tuple[str, str], ...] = (),
    id_headers: tuple[str, ...] = ("x-request-id",),
) -> None:
    """A whole response."""
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), id.encode()) for name in id_headers),
        *((name.encode(), value.encode()) for name, value in extra),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, id: str, error: ApiError, endpoint: Endpoint | None = None) -> None:
    """An error object with its status and headers, as the endpoint has them."""
    if endpoint is None:
        await answer(send, id, error.status, error.body(), "application/json", error.headers)
        return
    body = endpoint.error(error, id)
    await answer(send, id, error.status, body, "application/json", error.headers, endpoint.id_headers)
