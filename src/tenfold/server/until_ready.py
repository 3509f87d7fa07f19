"""What a server answers before its first worker is there: that it is not ready, and why."""

from __future__ import annotations

from typing import Protocol

import msgspec

from tenfold.server.asgi import Layer, Receive, Scope, Send, request_id
from tenfold.server.endpoints import endpoint_at
from tenfold.server.errors import unavailable
from tenfold.server.exchange import answer, answer_error

RETRY_AFTER_S = 5


class Waiting(Protocol):
    """Who knows."""

    def before_first(self) -> tuple[str | None, dict[str, str]]: ...


class UntilReady:
    """Passes everything on to ``app`` as soon as there is one."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.app: Layer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        id, path = request_id(scope), scope["path"]
        why, workers = self._waiting.before_first()
        reason = why or "the server is starting"
        if path == "/health":
            body = {"status": "ok", "workers": workers}
            await answer(send, id, 200, msgspec.json.encode(body), "application/json")
        elif path == "/ready":
            no = msgspec.json.encode({"status": "not ready", "reason": reason})
            await answer(send, id, 503, no, "application/json")
        else:
            await answer_error(send, id, unavailable(reason, RETRY_AFTER_S), endpoint_at(path))
