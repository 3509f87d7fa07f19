"""The HTTP endpoints, as a bare ASGI application: routes and bodies."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import msgspec

from tenfold.server.admin import PREFIX as ADMIN_PREFIX
from tenfold.server.admin import Admin
from tenfold.server.asgi import Receive, Scope, Send, header, key_owner, request_id
from tenfold.server.endpoints import (
    COUNT_TOKENS,
    COUNT_TOKENS_PATH,
    ENDPOINTS,
    RESPONSES_PATH,
    Endpoint,
    responses_endpoint,
)
from tenfold.server.errors import ApiError, unexpected
from tenfold.server.exchange import Exchange, answer, answer_error
from tenfold.server.fields import Fields
from tenfold.server.flights import ClientGone
from tenfold.server.models import Models
from tenfold.server.prepare import Job
from tenfold.server.query import read_query
from tenfold.server.requests import decode_body
from tenfold.server.responses_api.kept import PREFIX, kept_response, methods_of
from tenfold.server.responses_api.store import Shelf
from tenfold.server.served import ServedModel
from tenfold.server.server_metrics import ServerMetrics

LONG_BODY = 1 << 14
"""Bytes; a longer body is checked and tokenized in a thread, so that streams do not stand still meanwhile."""
_OF_A_MODEL = ("/ready", "/stats")
_FOR_PROBES = frozenset(("/health", "/metrics"))
"""Whoever watches over many servers may have the same query for all of them."""
"""Take ``?model=NAME``."""
_LONG_THREADS = 2
"""Each may hold Python's lock for some milliseconds when the event loop wants it: few, so others wait."""

_TOKENS: dict[str, Callable[[ServedModel, Fields], bytes]] = {
    "/tokenize": ServedModel.tokenize,
    "/detokenize": ServedModel.detokenize,
}

In = TypeVar("In")
Out = TypeVar("Out")

log = logging.getLogger(__name__)


class App:
    """The application; one for each server."""

    def __init__(
        self,
        models: Models,
        metrics: ServerMetrics,
        *,
        max_body_bytes: int,
        admin: Admin | None = None,
        documents: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> None:
        """``admin``: what answers below ``/admin/``; None: nothing does. ``documents``: further JSON to be
        got, by path."""
        self._models = models
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._admin = admin
        self._long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long-body")
        self._documents = frozenset(documents)
        self._gets: dict[str, Callable[[str | None], tuple[int, bytes, str]]] = {
            "/health": lambda _: self._health(),
            "/ready": self._ready,
            "/metrics": lambda _: (200, metrics.page(), "text/plain; version=0.0.4; charset=utf-8"),
            "/stats": self._stats,
            "/v1/models": lambda _: self._list(),
            **{path: partial(_document, made) for path, made in documents.items()},
        }
        """By path; given the model that the query names."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP, not {scope['type']}")
        path, method = scope["path"], scope["method"]
        id = request_id(scope)
        endpoint: Endpoint | None = None
        try:
            if path in ENDPOINTS or path == RESPONSES_PATH:
                endpoint = ENDPOINTS.get(path) or responses_endpoint(self._shelf(scope))
                _check_method(method, ("POST",))
                await Exchange(self, id, endpoint, receive, send).run(scope)
                return
            status, kind = 200, "application/json"
            if path in _TOKENS or path == COUNT_TOKENS_PATH:
                endpoint = COUNT_TOKENS if path == COUNT_TOKENS_PATH else None
                _check_method(method, ("POST",))
                model, fields = await self.model_of(await self.read_body(scope, receive))
                work = model.preparer.count if endpoint else partial(_TOKENS[path], model)
                body = await self._apart(work, fields, fields.size)
            elif path.startswith(PREFIX):
                _check_method(method, methods_of(path))
                body = kept_response(self._shelf(scope), method, path, scope.get("query_string", b""))
            elif path.startswith("/v1/models/"):
                _check_method(method, ("GET", "HEAD"))
                body = msgspec.json.encode(self._models.find(path.removeprefix("/v1/models/")).entry())
            elif path in self._gets:
                _check_method(method, ("GET", "HEAD"))
                asked = None
                # Links to documents may have whatever their sites hang on to them.
                if path not in self._documents and path not in _FOR_PROBES:
                    takes = ("model",) if path in _OF_A_MODEL else ()
                    asked = read_query(scope.get("query_string", b""), takes).get("model")
                status, body, kind = self._gets[path](asked)
            elif path.startswith(ADMIN_PREFIX) and self._admin is not None:
                _check_method(method, self._admin.methods_of(path))
                data = await self.read_body(scope, receive) if method == "POST" else b""
                body = await self._admin.answer(method, path, data)
            else:
                known = ", ".join([*ENDPOINTS, RESPONSES_PATH, COUNT_TOKENS_PATH, *_TOKENS, *self._gets])
                raise ApiError(404, f"there is nothing at {path}; there is: {known}", code="not_found")
        except ApiError as error:
            await answer_error(send, id, error, endpoint)
            return
        except ClientGone:
            return
        except Exception:
            log.exception("%s %s failed", method, path)
            await answer_error(send, id, unexpected(), endpoint)
            return
        await answer(send, id, status, body, kind)

    def _health(self) -> tuple[int, bytes, str]:
        workers: dict[str, str] = {}
        for model in self._models.all:
            workers |= model.flights.workers()
        return 200, msgspec.json.encode({"status": "ok", "workers": workers}), "application/json"

    def _ready(self, name: str | None) -> tuple[int, bytes, str]:
        """Of one model, or of all: then one that gets on is enough, and the others are named."""
        if name is not None:
            self._models.find(name)
        states = self._models.not_ready()
        asked = states if name is None else {name: states[name]}
        stuck = {each: why for each, why in asked.items() if why is not None}
        body: dict[str, object] = {"status": "ready"}
        if len(stuck) == len(asked):
            reason = "no model is loaded"
            if stuck:
                reason = "; ".join(
                    why if len(states) == 1 else f"{each}: {why}" for each, why in stuck.items()
                )
            body = {"status": "not ready", "reason": reason}
        elif stuck:
            body["not_ready"] = stuck
        return 503 if "reason" in body else 200, msgspec.json.encode(body), "application/json"

    def _stats(self, name: str | None) -> tuple[int, bytes, str]:
        """Of one model, or of the first."""
        names = self._models.names
        model = self._models.find(name if name is not None or not names else names[0])
        return 200, msgspec.json.encode(model.stats.now(names)), "application/json"

    def _list(self) -> tuple[int, bytes, str]:
        found = {"object": "list", "data": [model.entry() for model in self._models.all]}
        return 200, msgspec.json.encode(found), "application/json"

    def _shelf(self, scope: Scope) -> Shelf:
        return self._models.responses.shelf(key_owner(scope))

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises ApiError when it is too long (413) or encoded (415), ClientGone."""
        encoding = (header(scope, b"content-encoding") or b"identity").decode("latin-1").strip().lower()
        if encoding != "identity":
            raise ApiError(
                415,
                f"the body's content-encoding is {encoding:.80}; send it as it is",
                code="unsupported_content_encoding",
                headers=(("accept-encoding", "identity"),),
            )
        limit = self._max_body_bytes
        too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
        length = header(scope, b"content-length")
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

    async def model_of(self, body: bytes) -> tuple[ServedModel, Fields]:
        """The model that a body is for, and its fields. Raises ApiError."""
        fields = await self._apart(decode_body, body, len(body))
        return self._models.find(fields.string("model")), fields

    async def prepare(self, model: ServedModel, endpoint: Endpoint, body: Fields, id: str) -> Job:
        """See `Preparer.job`."""
        job = await self._apart(lambda body: model.preparer.job(endpoint, body, id), body, body.size)
        constraint = job.choices[0].request.params.constraint
        if constraint is not None:
            await model.check_constraint(constraint)
        return job

    async def _apart(self, work: Callable[[In], Out], body: In, size: int) -> Out:
        """``work`` on a body of so many bytes, in a thread if that takes long."""
        if size <= LONG_BODY:
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(self._long, work, body)

    @property
    def rejected(self) -> Counter[str]:
        return self._metrics.rejected


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        raise ApiError(
            405,
            f"the method must be {' or '.join(allowed)}, not {method}",
            code="method_not_allowed",
            headers=(("allow", ", ".join(allowed)),),
        )


def _document(made: Callable[[], bytes], model: str | None) -> tuple[int, bytes, str]:
    return 200, made(), "application/json"
