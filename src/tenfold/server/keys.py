"""API keys: who may use the server at all."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import open_regular
from tenfold.config import OptionError
from tenfold.server.asgi import Layer, Receive, Scope, Send, header, request_id
from tenfold.server.endpoints import endpoint_at
from tenfold.server.errors import ApiError
from tenfold.server.exchange import answer_error
from tenfold.server.metrics import Metrics

log = logging.getLogger(__name__)

_KEY = re.compile(r"[!-~]{1,1024}")
_BEARER = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)


class Keys:
    """The keys that are let in, as digests: comparing takes the same time whatever is sent."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner(self, scope: Scope) -> str | None:
        """The digest of the request's key, sent as OpenAI's clients do or as Anthropic's; None: it is let in
        by none."""
        bearer = _BEARER.fullmatch(header(scope, b"authorization") or b"")
        given = bearer[1] if bearer else header(scope, b"x-api-key")
        digest = hashlib.sha256(given or b"").digest()
        # All are compared, so that the time does not tell which one it was.
        known = sum(hmac.compare_digest(digest, known) for known in self._digests) > 0
        return digest.hex() if known else None


def load_keys(path: str) -> Keys:
    """The keys of a file: one a line; empty lines, and lines that begin with ``#``, do not count.

    Warns when others than the file's owner can read it. Raises OptionError naming file and line, or why it
    cannot be read.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.decode("utf-8", errors="surrogateescape").strip() for line in file]
    except CheckpointError as error:
        raise OptionError(f"api_key_file {error}", "api_key_file") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s can be read by others; chmod 600 %s", path, path)
    keys = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise OptionError(
                f"api_key_file {path}, line {number}: a key is 1 to 1024 visible ASCII characters without "
                "spaces",
                "api_key_file",
            )
        keys.append(line)
    if not keys:
        raise OptionError(
            f"api_key_file {path} has no key; write one a line, or leave it out", "api_key_file"
        )
    return Keys(keys)


class RequireKey:
    """Lets through what has a key, and what anybody may ask for; the rest is 401."""

    def __init__(self, app: Layer, keys: Keys, open_paths: frozenset[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = self._keys.owner(scope)
        if owner is not None or scope["path"] in self._open:
            scope.setdefault("state", {})["key_owner"] = owner or ""
            await self._app(scope, receive, send)
            return
        id = request_id(scope)
        self._metrics.rejected["401"] += 1
        log.info("%s refused: 401 for %.80s: no key, or not one of this server's", id, scope["path"])
        await answer_error(
            send,
            id,
            ApiError(
                401,
                "this server asks for an API key: send it as Authorization: Bearer KEY, or as x-api-key: KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            ),
            endpoint_at(scope["path"]),
        )
