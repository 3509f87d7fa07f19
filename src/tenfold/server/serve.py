"""Running a server: from a configuration to a listening socket, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop

from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.checkpoint.locate import locate as locate_model
from tenfold.config import (
    OptionError,
    ServeConfig,
    ServerPlan,
    check_kv_disk,
    check_kv_memory,
    total_memory,
)
from tenfold.server.admin import Admin, RequireAdmin
from tenfold.server.app import App
from tenfold.server.asgi import Layer
from tenfold.server.connection import Connection, Patience
from tenfold.server.cors import Cors, check_origin
from tenfold.server.door import Door, Identify, door_of
from tenfold.server.keys import Keys, RequireKey, load_keys
from tenfold.server.listening import bind
from tenfold.server.memory import settle
from tenfold.server.models import Models, Sources
from tenfold.server.openapi import document
from tenfold.server.page import FILES, Page
from tenfold.server.server_metrics import ServerMetrics
from tenfold.server.text import Text
from tenfold.server.tracing import TraceHandler
from tenfold.server.until_ready import UntilReady
from tenfold.worker.process import ENGINE_BUILDER

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the usual load balancer's, so that it is not the server who hangs up on a request just sent."""

OPEN_PATHS = frozenset({*FILES, "/health", "/ready", "/openapi.json"})
"""What is answered without a key: what tells nothing of anybody's use, and what asks for the key."""

ReadyCallback = Callable[[ServerPlan, str], None]
"""Told the plan and the server's URL once requests are welcome."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process with a signal after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig,
    path: str,
    load_text: Callable[[str], Text],
    on_ready: ReadyCallback,
    builder: str = ENGINE_BUILDER,
    *,
    others: Sequence[tuple[ServeConfig, str]] = (),
    locate: Callable[[str], str] = lambda model: str(locate_model(model)),
    identify: Identify = fingerprint,
) -> None:
    """Serves the model at ``path`` until SIGINT or SIGTERM. SIGHUP replaces the workers one after another.

    ``others``: further models, the configuration and the path of each; what is the server's and no model's
    (address, keys, limits of connections) counts in ``config`` alone. ``locate``: from the name of a model to
    its path, for those that are loaded while the server runs.

    Then it accepts nothing more, lets running requests go on for ``config.drain_s`` (a second signal cuts
    that short), and returns. Raises StartError (also later, when the supervision of the worker fails),
    OSError, OptionError for keys, origins, a disk folder, a secret, an address or a size that cannot be, or
    what ``load_text`` raises. ``identify`` tells a model's files from others', for workers that join.
    """
    traces = None if config.otlp_endpoint is None else TraceHandler(config.otlp_endpoint)
    keys = None if config.api_key_file is None else load_keys(config.api_key_file)
    admins = None if config.admin_key_file is None else load_keys(config.admin_key_file, "admin_key_file")
    if keys is not None and admins is not None and admins.shares(keys):
        raise OptionError(
            f"admin_key_file {config.admin_key_file} and api_key_file {config.api_key_file} have a key in "
            "common; an admin's key must be no user's",
            *("admin_key_file", "api_key_file"),
        )
    for origin in config.cors_origins:
        check_origin(origin)
    check_kv_memory(config.kv_memory_bytes, total_memory())
    check_kv_disk(config.kv_disk)
    door = door_of(config, identify)
    sock = bind(config.host, config.port)
    with sock:
        if keys is None and not _is_loopback(sock):
            log.warning(
                "listening on %s without --api-key-file: whoever reaches the port may use the model",
                config.host,
            )
        with _told(traces):
            sources = Sources(locate, load_text, builder)
            uvloop.run(_serve([(config, path), *others], sources, on_ready, sock, keys, admins, door))


@contextlib.contextmanager
def _told(traces: TraceHandler | None) -> Iterator[None]:
    """The handler hears of requests meanwhile."""
    if traces is None:
        yield
        return
    requests = logging.getLogger("tenfold.requests")
    requests.addHandler(traces)
    try:
        yield
    finally:
        requests.removeHandler(traces)
        traces.close()


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _layers(
    config: ServeConfig, app: Layer, keys: Keys | None, admins: Keys | None, metrics: ServerMetrics
) -> Layer:
    """The application with what stands around it, outermost last."""
    layer: Layer = Page(app)
    if keys is not None:
        layer = RequireKey(layer, keys, OPEN_PATHS, metrics)
    layer = RequireAdmin(layer, app, admins, metrics)
    return Cors(layer, config.cors_origins, strict=keys is None)


async def _serve(
    wanted: Sequence[tuple[ServeConfig, str]],
    sources: Sources,
    on_ready: ReadyCallback,
    sock: socket.socket,
    keys: Keys | None,
    admins: Keys | None,
    door: Door | None,
) -> None:
    loop = asyncio.get_running_loop()
    config = wanted[0][0]
    models = Models(sources, alone=len(wanted) == 1 and admins is None, door=door)
    metrics = ServerMetrics(lambda: [(model.name, model.metrics) for model in models.all])
    until_ready = UntilReady(models)
    server = _Server(
        uvicorn.Config(
            cast(Any, _layers(config, until_ready, keys, admins, metrics)),
            loop="none",
            http=cast(Any, partial(Connection, patience=Patience(config.arrive_s, config.unread_s))),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.drain_s) + 2,
        )
    )
    serving: asyncio.Task[None] | None = None
    stop_asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_asked.set)
    loop.add_signal_handler(signal.SIGHUP, models.roll)
    try:
        if not config.workers:
            # Nobody knows when the first will join: until then, requests are told so.
            serving = await _listen(server, sock)
            log.info("listening on %s; waiting for a worker to join at %s", _url(sock), config.accept_workers)
        if not await _start(models, wanted, stop_asked):
            return
        until_ready.app = App(
            models,
            metrics,
            max_body_bytes=config.max_body_bytes,
            admin=None if admins is None else Admin(models, config),
            documents={"/openapi.json": lambda: _document(models, keys is not None, admins is not None)},
        )
        if serving is None:
            serving = await _listen(server, sock)
        settle()
        if server.started:
            on_ready(ServerPlan(tuple(model.resolved for model in models.all)), _url(sock))
        ends = [asyncio.create_task(stop_asked.wait()), asyncio.create_task(models.failed()), serving]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends[:2]:
            task.cancel()
        await _drain(models, server, serving, stop_asked, config.drain_s)
    finally:
        if door is not None:
            door.close()
        await models.stop()
        if serving is not None and not serving.done():  # stopped while nobody had joined, or failed
            server.should_exit = True
            await serving


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _listen(server: _Server, sock: socket.socket) -> asyncio.Task[None]:
    """Begins to answer."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    return serving


def _document(models: Models, keys: bool, admin: bool) -> bytes:
    # Without a model no body is answered, and any token may become one again.
    vocab_size = max((model.plan.vocab_size for model in models.all), default=1 << 18)
    return document(vocab_size, keys, admin=admin, several=len(models.all) > 1)


async def _start(
    models: Models, wanted: Sequence[tuple[ServeConfig, str]], stop_asked: asyncio.Event
) -> bool:
    """Loads all of them. False: stopped meanwhile."""
    starting = asyncio.create_task(models.start(wanted))
    stopping = asyncio.create_task(stop_asked.wait())
    stopping.add_done_callback(lambda _: starting.cancel())
    try:
        await starting
    except asyncio.CancelledError:
        return False
    finally:
        stopping.cancel()
    return True


async def _drain(
    models: Models,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    stop_asked: asyncio.Event,
    drain_s: float,
) -> None:
    log.info("stopping: running requests may take %g s more", drain_s)
    reason = "the server is shutting down"
    models.refuse_new(reason)
    server.should_exit = True
    stop_asked.clear()
    again = asyncio.create_task(stop_asked.wait())
    await asyncio.wait([serving, again], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    models.abort_all(reason)
    await serving
