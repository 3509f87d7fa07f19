"""The HTTP endpoints, as a bare ASGI application: routes, bodies, prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from tenfold.config import PAGE_ROWS
from tenfold.limits import PromptTooLong, check_prompt
from tenfold.protocol import EnginePlan, Request
from tenfold.server.asgi import Receive, Scope, Send, header, request_id
from tenfold.server.errors import ApiError, invalid, unexpected
from tenfold.server.exchange import Exchange, answer, answer_error
from tenfold.server.flights import ClientGone, Flight, Flights
from tenfold.server.metrics import Metrics
from tenfold.server.output import Output
from tenfold.server.requests import ApiRequest, parse_chat, parse_completion
from tenfold.server.shapes import ChatShape, CompletionShape, Shape
from tenfold.server.text import Text

LONG_BODY = 1 << 14
"""Bytes; a longer body is checked and tokenized in a thread, so that streams do not stand still meanwhile."""
_LONG_THREADS = 2
"""Each may hold Python's lock for some milliseconds when the event loop wants it: few, so others wait."""

log = logging.getLogger(__name__)


class App:
    """The application; one for each server. ``documents``: further JSON to be got, by path."""

    def __init__(
        self,
        *,
        model: str,
        plan: EnginePlan,
        max_body_bytes: int,
        text: Text,
        flights: Flights,
        metrics: Metrics,
        documents: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._plan = plan
        self._max_body_bytes = max_body_bytes
        self._text = text
        self._flights = flights
        self._metrics = metrics
        self._long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long-body")
        self._created = int(time.time())
        self._models = msgspec.json.encode({"object": "list", "data": [self._model_object()]})
        self._gets: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": lambda: (200, b'{"status":"ok"}', "application/json"),
            "/ready": self._ready,
            "/metrics": lambda: (200, metrics.page(), "text/plain; version=0.0.4; charset=utf-8"),
            "/v1/models": lambda: (200, self._models, "application/json"),
            **{path: partial(_document, made) for path, made in documents.items()},
        }
        self._posts = {"/v1/chat/completions": True, "/v1/completions": False}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP, not {scope['type']}")
        path, method = scope["path"], scope["method"]
        id = request_id(scope)
        try:
            if path in self._posts:
                _check_method(method, ("POST",))
                await Exchange(self, id, self._posts[path], receive, send).run(scope)
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
            await answer_error(send, id, error)
            return
        except Exception:
            log.exception("%s %s failed", method, path)
            await answer_error(send, id, unexpected())
            return
        await answer(send, id, status, body, kind)

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

    async def prepare(self, chat: bool, body: bytes) -> tuple[ApiRequest, tuple[int, ...]]:
        """A body, checked, and its prompt's tokens.

        Raises ApiError: a field is wrong, there are too many tokens or none, or the template refuses.
        """
        if len(body) <= LONG_BODY:
            return self._prepare(chat, body)
        return await asyncio.get_running_loop().run_in_executor(self._long, self._prepare, chat, body)

    def _prepare(self, chat: bool, body: bytes) -> tuple[ApiRequest, tuple[int, ...]]:
        plan = self._plan
        parsed = (parse_chat if chat else parse_completion)(body, (self._model,), plan.vocab_size)
        try:
            ids = self._encode(parsed)
            check_prompt(ids, 0, plan.vocab_size, plan.max_context, plan.kv_pages * PAGE_ROWS)
            wanted = parsed.params.max_tokens or 0
            if len(ids) + wanted > plan.max_context:
                raise PromptTooLong(
                    "prompt",
                    f"has {len(ids)} tokens and {wanted} were asked for; the model's context is "
                    f"{plan.max_context}. Shorten the prompt, or lower max_tokens",
                )
        except PromptTooLong as error:
            raise invalid(parsed.prompt_field, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(parsed.prompt_field, str(error)) from None
        return parsed, ids

    def _encode(self, parsed: ApiRequest) -> tuple[int, ...]:
        if parsed.token_ids is not None:
            return parsed.token_ids
        context = self._plan.max_context
        if parsed.messages is not None:
            return tuple(self._text.encode_chat(parsed.messages, context))
        assert parsed.text is not None
        return tuple(self._text.encode_prompt(parsed.text, context))

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

    def release(self, flight: Flight, keep: int | None = None) -> None:
        """See `Flights.release`."""
        self._flights.release(flight, keep)

    def cancel(self, flight: Flight) -> None:
        """See `Flights.cancel`."""
        self._flights.cancel(flight)

    @property
    def model(self) -> str:
        """Its name in the API."""
        return self._model

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self._text.tokenizer.eos_token_ids)


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
