"""Running a server: from a configuration to a listening socket, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import msgspec
import uvicorn
import uvloop

from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.config import ResolvedPlan, ServeConfig, check_kv_disk, check_kv_memory, total_memory
from tenfold.protocol import EnginePlan
from tenfold.server.app import App
from tenfold.server.asgi import Layer
from tenfold.server.chat_setup import choose_chat
from tenfold.server.connection import Connection, Patience
from tenfold.server.cors import Cors, check_origin
from tenfold.server.door import Door, Identify, door_of
from tenfold.server.embeddings import plan_line
from tenfold.server.flights import Flights
from tenfold.server.keys import Keys, RequireKey, load_keys
from tenfold.server.listening import bind
from tenfold.server.metrics import Metrics
from tenfold.server.openapi import document
from tenfold.server.page import FILES, Page
from tenfold.server.stats import StatsSource
from tenfold.server.text import Text
from tenfold.server.tracing import TraceHandler
from tenfold.server.until_ready import UntilReady
from tenfold.worker.process import ENGINE_BUILDER

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the usual load balancer's, so that it is not the server who hangs up on a request just sent."""

OPEN_PATHS = frozenset({*FILES, "/health", "/ready", "/openapi.json"})
"""What is answered without a key: what tells nothing of anybody's use, and what asks for the key."""

ReadyCallback = Callable[[ResolvedPlan, str], None]
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
    identify: Identify = fingerprint,
) -> None:
    """Serves the model at ``path`` until SIGINT or SIGTERM. SIGHUP replaces the workers one after another.

    Then it accepts nothing more, lets running requests go on for ``config.drain_s`` (a second signal cuts
    that short), and returns. Raises StartError (also later, when the supervision of the worker fails),
    OSError, OptionError for keys, origins, a disk folder, a secret, an address or a size that cannot be, or
    what ``load_text`` raises. ``identify`` tells a model's files from others', for workers that join.
    """
    traces = None if config.otlp_endpoint is None else TraceHandler(config.otlp_endpoint)
    keys = None if config.api_key_file is None else load_keys(config.api_key_file)
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
            uvloop.run(_serve(config, path, load_text, on_ready, builder, sock, keys, door))


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


def _layers(config: ServeConfig, app: Layer, keys: Keys | None, metrics: Metrics) -> Layer:
    """The application with what stands around it, outermost last."""
    layer: Layer = Page(app)
    if keys is not None:
        layer = RequireKey(layer, keys, OPEN_PATHS, metrics)
    return Cors(layer, config.cors_origins, strict=keys is None)


async def _serve(
    config: ServeConfig,
    path: str,
    load_text: Callable[[str], Text],
    on_ready: ReadyCallback,
    builder: str,
    sock: socket.socket,
    keys: Keys | None,
    door: Door | None,
) -> None:
    loop = asyncio.get_running_loop()
    metrics = Metrics()
    flights = Flights(
        config.engine_settings(path),
        metrics,
        max_queue=config.max_queue,
        stall_after_s=config.stall_after_s,
        builder=builder,
        routing=config.routing,
        drain_s=config.drain_s,
        accepts=door is not None,
    )
    until_ready = UntilReady(flights)
    server = _Server(
        uvicorn.Config(
            cast(Any, _layers(config, until_ready, keys, metrics)),
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
    loop.add_signal_handler(signal.SIGHUP, flights.roll)
    try:
        if not config.workers:
            # Nobody knows when the first will join: until then, requests are told so.
            serving = await _listen(server, sock)
            log.info("listening on %s; waiting for a worker to join at %s", _url(sock), config.accept_workers)
        opening = None if door is None else partial(door.open, config, path, flights, metrics)
        started = await _start(flights, path, load_text, stop_asked, opening)
        if started is None:
            return
        plan, text = started
        chat = choose_chat(text, config.tool_format, config.reasoning_format)
        stats = StatsSource(config.model_name, plan, metrics, flights.not_ready)
        until_ready.app = App(
            model=config.model_name,
            plan=plan,
            max_body_bytes=config.max_body_bytes,
            text=text,
            flights=flights,
            metrics=metrics,
            chat=chat,
            documents={
                "/stats": lambda: msgspec.json.encode(stats.now()),
                "/openapi.json": partial(document, plan.vocab_size, keys is not None),
            },
        )
        if serving is None:
            serving = await _listen(server, sock)
        gc.collect()
        gc.freeze()
        if server.started:
            on_ready(
                ResolvedPlan(
                    config=config, path=path, engine=plan, chat=(*chat.lines(), plan_line(text.pooling))
                ),
                _url(sock),
            )
        ends = [asyncio.create_task(stop_asked.wait()), asyncio.create_task(flights.ended()), serving]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends[:2]:
            task.cancel()
        await _drain(flights, server, serving, stop_asked, config.drain_s)
    finally:
        if door is not None:
            door.close()
        await flights.stop()
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


async def _start(
    flights: Flights,
    path: str,
    load_text: Callable[[str], Text],
    stop_asked: asyncio.Event,
    opening: Callable[[], Awaitable[None]] | None,
) -> tuple[EnginePlan, Text] | None:
    """Loads weights (in the worker) and text (here) at the same time. None: stopped meanwhile."""
    starting = asyncio.create_task(flights.start())
    loading = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, load_text, path))
    stopping = asyncio.create_task(stop_asked.wait())
    opened = () if opening is None else (opening(),)
    all_of_it = asyncio.gather(starting, loading, *opened)
    stopping.add_done_callback(lambda _: all_of_it.cancel())
    try:
        plan, text, *_ = await all_of_it
        return plan, text
    except asyncio.CancelledError:
        return None
    finally:
        stopping.cancel()


async def _drain(
    flights: Flights,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    stop_asked: asyncio.Event,
    drain_s: float,
) -> None:
    log.info("stopping: running requests may take %g s more", drain_s)
    reason = "the server is shutting down"
    flights.refuse_new(reason)
    server.should_exit = True
    stop_asked.clear()
    again = asyncio.create_task(stop_asked.wait())
    await asyncio.wait([serving, again], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    flights.abort_all(reason)
    await serving
