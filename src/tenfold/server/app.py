"""The HTTP endpoints, as a bare ASGI application: routes and bodies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from tenfold.constraints.compiler import Compiler
from tenfold.limits import RequestError
from tenfold.protocol import Constraint, EnginePlan
from tenfold.server.asgi import Receive, Scope, Send, header, key_owner, request_id
from tenfold.server.chat_setup import ChatSetup, choose_chat
from tenfold.server.choices import Tower
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
from tenfold.server.flights import ClientGone, Flights
from tenfold.server.metrics import Metrics
from tenfold.server.prepare import Job, Preparer
from tenfold.server.responses_api.kept import PREFIX, kept_response, methods_of
from tenfold.server.responses_api.store import ResponseStore, Shelf
from tenfold.server.text import Text
from tenfold.server.tokenize import TokenEndpoints
from tenfold.server.tool_constraint import refusal

LONG_BODY = 1 << 14
"""Bytes; a longer body is checked and tokenized in a thread, so that streams do not stand still meanwhile."""
_LONG_THREADS = 2
"""Each may hold Python's lock for some milliseconds when the event loop wants it: few, so others wait."""

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        chat: ChatSetup | None = None,
        documents: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> None:
        """``chat``: how the model calls tools and reasons; None: as its chat template shows. ``documents``:
        further JSON to be got, by path."""
        self._model = model
        self._plan = plan
        self._max_body_bytes = max_body_bytes
        self._preparer = Preparer(model, plan, text, chat or choose_chat(text))
        self._flights = flights
        self._metrics = metrics
        tokens = TokenEndpoints(self._preparer)
        self._tools = {"/tokenize": tokens.tokenize, "/detokenize": tokens.detokenize}
        self._constraints = Compiler(lambda: text.tokenizer, plan.vocab_size)
        self._long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long-body")
        self._created = int(time.time())
        self._responses = ResponseStore()
        self._models = msgspec.json.encode({"object": "list", "data": [self._model_object()]})
        self._gets: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": lambda: (200, metrics.page(), "text/plain; version=0.0.4; charset=utf-8"),
            "/v1/models": lambda: (200, self._models, "application/json"),
            **{path: partial(_document, made) for path, made in documents.items()},
        }

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
            if path in self._tools:
                _check_method(method, ("POST",))
                data = await self._apart(self._tools[path], await self.read_body(scope, receive))
                await answer(send, id, 200, data, "application/json")
                return
            if path == COUNT_TOKENS_PATH:
                endpoint = COUNT_TOKENS
                _check_method(method, ("POST",))
                body = await self._apart(self._preparer.count, await self.read_body(scope, receive))
                status, kind = 200, "application/json"
            elif path.startswith(PREFIX):
                _check_method(method, methods_of(path))
                status, kind = 200, "application/json"
                body = kept_response(self._shelf(scope), method, path, scope.get("query_string", b""))
            elif path.startswith("/v1/models/"):
                _check_method(method, ("GET", "HEAD"))
                status, body, kind = self._one_model(path.removeprefix("/v1/models/"))
            elif path in self._gets:
                _check_method(method, ("GET", "HEAD"))
                status, body, kind = self._gets[path]()
            else:
                known = ", ".join([*ENDPOINTS, RESPONSES_PATH, COUNT_TOKENS_PATH, *self._tools, *self._gets])
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
        body = {"status": "ok", "workers": self._flights.workers()}
        return 200, msgspec.json.encode(body), "application/json"

    def _ready(self) -> tuple[int, bytes, str]:
        reason = self._flights.not_ready()
        if reason is None:
            return 200, b'{"status":"ready"}', "application/json"
        return 503, msgspec.json.encode({"status": "not ready", "reason": reason}), "application/json"

    def _shelf(self, scope: Scope) -> Shelf:
        return self._responses.shelf(key_owner(scope))

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

    async def prepare(self, endpoint: Endpoint, body: bytes, id: str) -> Job:
        """See `Preparer.job`."""
        job = await self._apart(lambda body: self._preparer.job(endpoint, body, id), body)
        constraint = job.choices[0].request.params.constraint
        if constraint is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._long, self._check_constraint, constraint)
        return job

    async def _apart(self, work: Callable[[bytes], T], body: bytes) -> T:
        """``work`` on a body, in a thread if that takes long."""
        if len(body) <= LONG_BODY:
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(self._long, work, body)

    def _check_constraint(self, constraint: Constraint) -> None:
        """Compiles it, as the worker will: what cannot be enforced never gets there."""
        try:
            self._constraints.check(constraint)
        except RequestError as error:
            raise refusal(error) from None

    @property
    def tower(self) -> Tower:
        return self._flights

    @property
    def model(self) -> str:
        """Its name in the API."""
        return self._model

    @property
    def metrics(self) -> Metrics:
        return self._metrics


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        raise ApiError(
            405,
            f"the method must be {' or '.join(allowed)}, not {method}",
            code="method_not_allowed",
            headers=(("allow", ", ".join(allowed)),),
        )


def _document(made: Callable[[], bytes]) -> tuple[int, bytes, str]:
    return 200, made(), "application/json"
