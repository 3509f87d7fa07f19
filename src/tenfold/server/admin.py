"""Loading and unloading models at run time: ``/admin/models``, for who has an admin key.

Admin keys are a file of their own (``--admin-keys``); a user's key opens nothing here, and an admin's nothing
else. Without the file nobody may do any of this.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from tenfold.config import OptionError, ServeConfig, parse_size
from tenfold.limits import Range
from tenfold.server.asgi import Layer, Receive, Scope, Send, request_id
from tenfold.server.errors import ApiError, invalid
from tenfold.server.exchange import answer_error
from tenfold.server.fields import Fields, show
from tenfold.server.keys import Keys, Refusals
from tenfold.server.models import Models
from tenfold.server.requests import decode_body
from tenfold.server.served import ServedModel

log = logging.getLogger(__name__)

PREFIX = "/admin/"
MODELS = "/admin/models"
MAX_NAME = 256
_FIELDS = {"served_name": "name", "kv_memory_bytes": "kv_memory"}
"""What settings are called here that are called otherwise in `ServeConfig`."""
THREADS = Range(0, 1024)
WORKERS = Range(1, 256)


class Admin:
    """What the admin API does."""

    def __init__(self, models: Models, config: ServeConfig) -> None:
        """``config``: the server's options, which a model gets unless it is told otherwise."""
        self._models = models
        self._config = config

    def methods_of(self, path: str) -> tuple[str, ...]:
        """What may be done with a path. Raises ApiError (404) for one that is not there."""
        if path == MODELS:
            return ("GET", "HEAD", "POST")
        if path.startswith(f"{MODELS}/"):
            return ("DELETE",)
        raise ApiError(404, f"there is nothing at {path}; there is: {MODELS}", code="not_found")

    async def answer(self, method: str, path: str, body: bytes) -> bytes:
        """The body that answers. Raises ApiError."""
        if method == "POST":
            config = parse_load(decode_body(body), self._config)
            try:
                model = await self._models.load(config)
            except ApiError as error:
                # Only whoever loads it can know how much is too little.
                if (text := _in_fields(error.message)) != error.message and "kv_memory" in text:
                    error.param = "kv_memory"
                error.message = text
                raise
            return msgspec.json.encode(_entry(model))
        if method == "DELETE":
            name = path.removeprefix(f"{MODELS}/")
            await self._models.unload(name, self._config.drain_s)
            return msgspec.json.encode({"id": name, "object": "model", "deleted": True})
        models = self._models
        entries = [_entry(model) for model in models.all]
        entries += [{"id": name, "object": "model", "state": "loading"} for name in models.loading]
        entries += [{"id": name, "object": "model", "state": "unloading"} for name in models.leaving]
        return msgspec.json.encode({"object": "list", "data": entries})


def parse_load(fields: Fields, config: ServeConfig) -> ServeConfig:
    """What to load, as a body says it; what it does not say is as in ``config``. Raises ApiError."""
    model = fields.string("model")
    if not model:
        raise invalid("model", "model is missing; give a path or a name", code="missing_parameter")
    name = fields.string("name")
    threads, workers = fields.integer("threads", THREADS), fields.integer("workers", WORKERS)
    kv_memory = _size(fields.take("kv_memory"))
    fields.finish()
    try:
        return replace(
            config,
            model=model,
            served_name=name,
            threads=config.threads if threads is None else threads,
            workers=workers or config.workers or 1,
            # Who says how many workers wants them all alike.
            prefill=0 if workers else config.prefill,
            decode=0 if workers else config.decode,
            # Of the model that the server began with alone.
            accept_workers=None,
            secret_file=None,
            kv_events=None,
            kv_events_replay=None,
            kv_memory_bytes=config.kv_memory_bytes if kv_memory is None else kv_memory,
            # Made for one model, which this is not.
            drafter=None,
            learn=False,
        )
    except OptionError as error:
        raise invalid(_FIELDS.get(error.fields[0], error.fields[0]), _in_fields(str(error))) from None


def _in_fields(text: str) -> str:
    """What a message calls by the names of `ServeConfig`, or those with their options, by the fields of a
    body."""
    for own, field in _FIELDS.items():
        text = re.sub(rf"\b{own}\b(?: \(--[a-z-]+\))?", field, text)
    return text


def _size(value: Any) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return parse_size(value if isinstance(value, str) else show(value))
    except ValueError as error:
        raise invalid("kv_memory", f"kv_memory: {error}") from None


def _entry(model: ServedModel) -> dict[str, Any]:
    """A model that is served, for who looks after it."""
    plan, reason = model.plan, model.flights.not_ready()
    return {
        **model.entry(),
        "state": "serving" if reason is None else "not ready",
        "not_ready_reason": reason,
        "path": model.resolved.path,
        "workers": model.flights.workers(),
        "threads": plan.threads,
        "requests": model.users,
        "weight_bytes": sum(plan.format_bytes.values()),
        "kv_bytes": plan.kv_pages * plan.page_bytes,
    }


class RequireAdmin:
    """What is below ``/admin/`` is for who has an admin key; all else goes on to ``others``."""

    def __init__(self, others: Layer, admin: Layer, keys: Keys | None, refusals: Refusals) -> None:
        self._others = others
        self._admin = admin
        self._keys = keys
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._others(scope, receive, send)
            return
        if self._keys is None:
            error = ApiError(
                403,
                "models cannot be loaded or unloaded here: start the server with --admin-keys FILE, and send "
                "a key of that file",
                type="permission_error",
                code="admin_disabled",
            )
        elif self._keys.owner(scope) is None:
            error = ApiError(
                401,
                "this needs an admin key, one of the server's --admin-keys: send it as Authorization: Bearer "
                "KEY, or as x-api-key: KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )
        else:
            await self._admin(scope, receive, send)
            return
        self._refusals.rejected[str(error.status)] += 1
        log.info("%s refused: %d for %.80s: no admin key", request_id(scope), error.status, scope["path"])
        await answer_error(send, request_id(scope), error)
