"""A worker that was started by hand, and works for a front elsewhere.

It connects, says who it is, builds its engine once the front wants it, and then is a worker like any other.
When the connection ends it gives up the requests that came by it, keeps its engine with all its pages, and
connects again, for ever. A thread tells the front every second that the process lives, also in a long step.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import random
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.config import OptionError
from tenfold.protocol import (
    Alive,
    EnginePlan,
    EngineSettings,
    Failed,
    FromWorker,
    FrontMessage,
    Join,
    Leaving,
    Ready,
    TurnedAway,
    Welcome,
)
from tenfold.worker.framing import Channel
from tenfold.worker.loop import JoinRefused, ServedEngine, WorkerLoop
from tenfold.worker.main import Builder, plan_of
from tenfold.worker.process import ENGINE_BUILDER
from tenfold.worker.sealed import HELLO, TAG, NotTrusted, SealedReader, Seals, WorkerGreeting
from tenfold.worker.secret import load_secret, parse_address
from tenfold.worker.version import code_digest, version

log = logging.getLogger(__name__)

GREETING_S = 10.0
"""Within this time a front must have answered."""
PULSE_S = 1.0
BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
REPEAT_S = 60.0
"""A front that stays away for the same reason is in the log this often."""
DEAD_AFTER_S = 20
"""A peer that acknowledges nothing for so long is gone: its machine, or the network between."""


@dataclass(frozen=True)
class Joining:
    """Whom to join, and as whom."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, address: str, secret_file: str, name: str | None) -> Joining:
        """As the command line says it. Raises OptionError, OSError."""
        host, port = parse_address(address, "join")
        name = socket.gethostname() if name is None else name
        check_name(name)
        return cls(host, port, load_secret(secret_file), name)


def check_name(name: str) -> None:
    """Raises OptionError for one that logs and metrics had better not have."""
    if not (0 < len(name) <= 64 and name.isascii() and name.isprintable() and " " not in name):
        raise OptionError(f"name is {name[:80]!r}; it must be 1 to 64 visible ASCII characters", "name")


def prepare(sock: socket.socket) -> None:
    """Sets what both ends of such a connection want: no waiting for more to send, and an end when nothing is
    acknowledged any more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


def work(
    settings: EngineSettings,
    joining: Joining,
    builder: str = ENGINE_BUILDER,
    identify: Callable[[Path], str] = fingerprint,
) -> None:
    """Works for the front until SIGINT or SIGTERM, or until it says Shutdown. ``identify`` tells a model's
    files from others'. To be called in the main thread.

    Raises JoinRefused when the front does not want this worker, what the ``builder`` raises when the engine
    cannot be built or breaks, and OSError for a model that cannot be read.
    """
    _Worker(settings, joining, builder, identify(Path(settings.model))).run()


class _Stopped(BaseException):
    """By a signal, while there was nothing to be finished."""


class _Broken(Exception):
    """The engine, not the connection; the cause says how."""


class SealedChannel(Channel):
    """A channel of sealed messages; any thread may send."""

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self._lock = threading.Lock()
        self._sealer = seals.sealer
        super().__init__(
            sock,
            SealedReader(seals.unsealer, msgspec.msgpack.Decoder(FrontMessage)),
            lambda message: self._sealer.seal(msgspec.msgpack.encode(message)),
        )

    def send(self, message: FromWorker) -> None:
        """See `Channel.send`."""
        with self._lock:
            super().send(message)


class _Pulse:
    """The thread that says that the process lives, and that it was asked to end."""

    def __init__(self, channel: SealedChannel) -> None:
        self._channel = channel
        self._wake = threading.Event()
        self._leaving = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """The front is told, at once. May be called in a signal handler."""
        self._leaving = True
        self._wake.set()

    def stop(self) -> None:
        """The connection has ended, and is closed."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # whoever reads sees the end too
            while not self._stopped:
                self._channel.send(Alive(cpu_seconds=time.process_time()))
                if self._wake.wait(PULSE_S):
                    self._wake.clear()
                    if self._leaving:
                        self._leaving = False
                        self._channel.send(Leaving())


class _Worker:
    def __init__(self, settings: EngineSettings, joining: Joining, builder: str, model: str) -> None:
        self._settings = settings
        self._joining = joining
        module, _, function = builder.partition(":")
        self._build: Builder = getattr(importlib.import_module(module), function)
        self._join = Join(
            name=joining.name,
            instance=secrets.token_hex(16),
            version=version(),
            code=code_digest(),
            model=model,
            format=settings.format,
            kv_format=settings.kv_format,
        )
        self._engine: ServedEngine | None = None
        self._plan: EnginePlan | None = None
        self._pulse: _Pulse | None = None
        """While the engine works for a front: then there are requests to be finished."""
        self._asked_to_end = False
        self._welcome_at: float | None = None
        """When the front wanted it last."""

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        delay_s, told, told_at = BACKOFF_S, "", 0.0
        try:
            while True:
                since = self._welcome_at
                try:
                    self._visit()
                    break
                except (EOFError, OSError, NotTrusted, msgspec.DecodeError) as error:
                    if isinstance(error, NotTrusted) and self._welcome_at is None:
                        raise JoinRefused(f"{self._where}: {error}") from None
                    why = str(error) or type(error).__name__
                if self._asked_to_end:
                    log.warning("%s: %s; ending without it, as asked", self._where, why)
                    break
                if self._welcome_at != since:
                    delay_s = BACKOFF_S
                if why != told or time.monotonic() > told_at + REPEAT_S:
                    log.warning("%s: %s; trying again for as long as it takes", self._where, why)
                    told, told_at = why, time.monotonic()
                # Not all at once, when a front that many had joined comes back.
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, MAX_BACKOFF_S)
        except _Stopped:
            pass
        except _Broken as broken:
            self._engine = None  # in what state it is, nobody knows
            assert broken.__cause__ is not None
            raise broken.__cause__ from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if self._engine is not None:
                self._engine.close()

    @property
    def _where(self) -> str:
        return f"the front at {self._joining.host}:{self._joining.port}"

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._pulse is None or self._asked_to_end:
            raise _Stopped
        log.info("asked to end: requests here may end, or go on elsewhere")
        self._asked_to_end = True
        self._pulse.leave()

    def _visit(self) -> None:
        """One connection, from its beginning to Shutdown. Raises EOFError, OSError, NotTrusted or
        msgspec.DecodeError for a connection that ended otherwise; JoinRefused, _Broken."""
        address = (self._joining.host, self._joining.port)
        with socket.create_connection(address, timeout=GREETING_S) as sock:
            prepare(sock)
            greeting = WorkerGreeting(self._joining.secret, _receive(sock, HELLO))
            sock.sendall(greeting.answer)
            channel = SealedChannel(sock, greeting.check(_receive(sock, TAG)))
            channel.send(self._join)
            answers = channel.wait(GREETING_S)
            if not answers:
                raise EOFError("it does not answer")
            if isinstance(answers[0], TurnedAway):
                raise JoinRefused(f"{self._where} does not want this worker: {answers[0].reason}")
            if not isinstance(answers[0], Welcome):
                raise EOFError("it says what is no answer")
            self._welcome_at = time.monotonic()
            log.info("joined %s, as %s", self._where, answers[0].name)
            pulse = _Pulse(channel)
            try:
                self._serve(channel, pulse)
            finally:
                self._pulse = None
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                pulse.stop()

    def _serve(self, channel: SealedChannel, pulse: _Pulse) -> None:
        warm = self._engine is not None
        engine, plan = self._built(channel)
        channel.send(Ready(plan=plan, warm=warm))
        loop = WorkerLoop(engine, channel)
        self._pulse = pulse
        try:
            loop.run()
        except JoinRefused as error:
            raise JoinRefused(f"{self._where} does not want this worker: {error}") from None
        except (EOFError, OSError, NotTrusted, msgspec.DecodeError):
            loop.abandon()
            raise
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(EOFError):
                channel.send(Failed(error=f"{type(error).__name__}: {error}"))
            raise _Broken from error

    def _built(self, channel: SealedChannel) -> tuple[ServedEngine, EnginePlan]:
        if self._engine is None or self._plan is None:
            began = time.monotonic()
            try:
                self._engine, info = self._build(self._settings)
            except Exception as error:
                with contextlib.suppress(EOFError):
                    channel.send(Failed(error=str(error)))
                raise _Broken from error
            # As in a worker of the front's own: what lives now lives for good.
            gc.collect()
            gc.freeze()
            tier = self._engine.load().tier
            load_ms = (time.monotonic() - began) * 1e3
            self._plan = plan_of(self._settings, info, load_ms, 0 if tier is None else tier.size_bytes)
        return self._engine, self._plan


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data
