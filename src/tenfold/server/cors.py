"""Which web pages of other origins may use the server: none but those named when it was started."""

from __future__ import annotations

import re
from typing import Any

from tenfold.config import OptionError
from tenfold.server.asgi import Layer, Receive, Scope, Send, header, reply, request_id
from tenfold.server.endpoints import endpoint_at
from tenfold.server.errors import ApiError
from tenfold.server.exchange import answer_error

PREFLIGHT_AGE_S = 600
"""How long a browser need not ask again."""

_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:\d{1,5})?|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\](:\d{1,5})?"
)
_NO_PAGES = frozenset(("about", "blob", "data", "file", "ftp", "javascript", "mailto", "ws", "wss"))
"""Schemes of which no page's origin is."""
_HEADERS = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")


def check_origin(origin: str) -> str:
    """An origin as browsers send it. Raises OptionError for anything else, ``*`` among it."""
    if not _ORIGIN.fullmatch(origin) or origin.partition(":")[0] in _NO_PAGES:
        raise OptionError(
            f"cors_origins: {origin!r} is not an origin; write scheme://host[:port] in lower case, like "
            "https://chat.example.com, once for each one that may use the server",
            "cors_origins",
        )
    return origin


class Cors:
    """Says yes to pages of the origins given, by the rules of CORS, and no to all others.

    Browsers send simple requests without asking first, and only keep the answer from the page. So with
    ``strict`` a POST or DELETE that comes from a page of another origin is refused: no page that somebody
    visits may set a server at work that asks for no key.
    """

    def __init__(self, app: Layer, origins: tuple[str, ...], strict: bool) -> None:
        self._app = app
        self._strict = strict
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else None
        if origin in self._origins:
            assert origin is not None
            await self._allowed(origin, scope, receive, send)
        elif self._strict and origin is not None and _foreign(origin, scope):
            error = ApiError(
                403,
                _refusal(origin.decode("latin-1")),
                type="permission_error",
                code="origin_not_allowed",
                headers=(("vary", "origin"),),
            )
            await answer_error(send, request_id(scope), error, endpoint_at(scope["path"]))
        else:
            await self._app(
                scope, receive, send if not self._origins else _with(send, [(b"vary", b"origin")])
            )

    async def _allowed(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None:
            asked = header(scope, b"access-control-request-headers") or b""
            # The origin is trusted; which headers its client library sends is that library's affair.
            allowed = asked if _HEADERS.fullmatch(asked) else b"authorization, content-type, x-api-key"
            answer = [
                *headers,
                (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
                (b"access-control-allow-headers", allowed),
                (b"access-control-max-age", str(PREFLIGHT_AGE_S).encode()),
            ]
            await reply(send, 204, [(name.decode(), value.decode("latin-1")) for name, value in answer])
            return
        headers.append((b"access-control-expose-headers", b"x-request-id, request-id, retry-after"))
        await self._app(scope, receive, _with(send, headers))


def _foreign(origin: bytes, scope: Scope) -> bool:
    """Whether a page that is not this server's own asks for something to be done."""
    host = header(scope, b"host") or b""
    own = origin.lower().partition(b"://")[2] == host.lower()
    return scope["method"] in ("POST", "DELETE", "OPTIONS") and not own


def _refusal(origin: str) -> str:
    """Why a page of this origin is refused, with what can be done."""
    try:
        check_origin(origin)
    except OptionError:
        return (
            f"pages without an origin of their own (it is {origin:.100}: files, sandboxed frames and such) "
            "cannot be allowed to use this server; serve the page over http, or start the server with "
            "--api-key-file and send a key"
        )
    return f"pages of {origin:.100} may not use this server; start it with --cors-origin {origin:.100}"


def _with(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def more(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return more
