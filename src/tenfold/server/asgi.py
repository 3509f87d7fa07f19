"""What the layers around the application share: ASGI's types, headers and request ids, a small answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Layer = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application, or a layer around one."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name (lower case), or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id(scope: Scope) -> str:
    """The client's ``x-request-id`` if it can be used, else a new one: the same for all layers."""
    state: dict[str, Any] = scope.setdefault("state", {})
    id = state.get("request_id")
    if id is None:
        given = (header(scope, b"x-request-id") or b"").decode("latin-1")
        id = state["request_id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    return str(id)


def key_owner(scope: Scope) -> str:
    """Who asks: a digest of the API key that let the request in; empty where no keys are asked for."""
    return str(scope.get("state", {}).get("key_owner", ""))


def traceparent(scope: Scope) -> str | None:
    """The client's W3C trace context, if it is one."""
    given = (header(scope, b"traceparent") or b"").decode("latin-1")
    return given if _TRACEPARENT.fullmatch(given) else None


async def reply(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
    """A whole response; 204 and 304 have no body and no length."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    if status not in (204, 304):
        raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
