"""The page in the browser: a few static files, read once, each with a strict policy for what it may load.

A page, its style and its script are all there is: no build, and nothing from any other host. What is shown
live comes from ``/stats``, and what is said from the same API that everybody uses.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from tenfold.server.asgi import Layer, Receive, Scope, Send, header, reply

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing inline, nothing from elsewhere, in nobody's frame, and no text that becomes markup."""

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""By path: the file in this package, and its content type."""


class Page:
    """Answers for the page's files, and passes on whatever else is asked for."""

    def __init__(self, app: Layer) -> None:
        self._app = app
        folder = files(__name__)
        self._files = {
            path: (
                data := folder.joinpath(name).read_bytes(),
                kind,
                f'"{hashlib.sha256(data).hexdigest()[:16]}"',
            )
            for path, (name, kind) in FILES.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        data, kind, tag = found
        headers = [
            ("content-type", kind),
            ("etag", tag),
            # Asked about each time: an old script must not meet a new server.
            ("cache-control", "no-cache"),
            ("content-security-policy", POLICY),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
        ]
        if header(scope, b"if-none-match") == tag.encode():
            await reply(send, 304, headers)
        else:
            await reply(send, 200, headers, data)
