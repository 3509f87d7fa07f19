"""Pages between machines: regions (`tenfold.kv.region`) served over TCP.

Both sides prove that they know the secret before anything else is said: HMAC-SHA-256 over the other's nonce.
What follows is neither secret nor proof against someone who changes it on the way (checksums find accidents
alone), so this belongs on a network of one's own. Frames are four bytes of length and a body; all numbers
little-endian::

    server                                           client
    nonce (32)                                 ->
                                               <-    nonce (32), proof (32), key of the region
    proof (32), contents as msgpack            ->
                                               <-    first page, pages (or TAKEN, 0)
    checksums, when the pages are ready        ->
    the pages, not framed                      ->
    behind the last page, when it is drawn:
    one more than the first token, 0: none     ->    ...
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import msgspec

from tenfold.kv.region import Contents, FileReach, Mapped, Region, TransferError, right
from tenfold.kv.transfer import LEASE_S, STALL_S, Handoff, await_pages, await_token

log = logging.getLogger(__name__)

LEAST_SECRET = 16
"""Bytes of a secret."""
MOST_CONNECTIONS = 64
CONNECT_S = 3.0
"""A host that is there answers sooner."""
_LENGTH = Struct("<I")
_ASK = Struct("<II")
_TOKEN = Struct("<I")
_TAKEN = 0xFFFFFFFF
_NONCE = 32
_PROOF = 32
_MOST_FRAME = 64 << 20


def proof(secret: bytes, who: bytes, *said: bytes) -> bytes:
    """That ``who`` knows the secret, and says this."""
    return hmac.new(secret, who + b"".join(said), hashlib.sha256).digest()


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _send_file(sock: socket.socket, file: int, at: int, count: int) -> int:
    """Sends part of a file; returns how much. Raises TransferError when nothing can be sent for long."""
    while True:
        try:
            return os.sendfile(sock.fileno(), file, at, count)
        except BlockingIOError:
            # A socket with a timeout does not wait by itself: over a real network its buffer is soon full.
            if not select.select((), (sock,), (), sock.gettimeout())[1]:
                raise TransferError("a client takes nothing") from None


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise TransferError("the other side closed the connection", "gone")
        view = view[count:]


def _receive(sock: socket.socket) -> bytes:
    length = bytearray(_LENGTH.size)
    _fill(sock, memoryview(length))
    (size,) = _LENGTH.unpack(length)
    if size > _MOST_FRAME:
        raise TransferError(f"a frame of {size} bytes was announced; the limit is {_MOST_FRAME}")
    body = bytearray(size)
    _fill(sock, memoryview(body))
    return bytes(body)


def check_secret(secret: bytes) -> bytes:
    """The secret. Raises ValueError if it is too short."""
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"the secret has {len(secret)} bytes; it must have {LEAST_SECRET} or more")
    return secret


class PageServer:
    """Serves the regions of one engine to importers elsewhere. Owns its socket and threads."""

    def __init__(self, secret: bytes, host: str, port: int = 0) -> None:
        """Raises OSError, and ValueError for a secret that is too short."""
        self._secret = check_secret(secret)
        self._socket = socket.create_server((host, port))
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._regions: dict[str, FileReach] = {}
        """By key; the files are our own."""
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-server", daemon=True).start()

    def offer(self, region: Region) -> tuple[dict[str, Any], Callable[[], None]]:
        """A `tenfold.kv.transfer.Offer`."""
        key = secrets.token_hex(16)
        with self._lock:
            self._regions[key] = FileReach(os.dup(region.file), region.at)

        def retract() -> None:
            with self._lock:
                os.close(self._regions.pop(key).file)

        return {"host": self.host, "port": self.port, "key": key}, retract

    def close(self) -> None:
        """Takes no more connections; those there are end with their regions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="kv-serving", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(STALL_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._talk(sock)
        except (TransferError, OSError) as error:
            log.info("serving pages ended: %s", error)
        finally:
            self._room.release()

    def _talk(self, sock: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE)
        _send(sock, nonce)
        hello = _receive(sock)
        theirs, said, key = hello[:_NONCE], hello[_NONCE : _NONCE + _PROOF], hello[_NONCE + _PROOF :]
        if not hmac.compare_digest(said, proof(self._secret, b"client", nonce, theirs, key)):
            raise TransferError("a client does not know the secret")
        with self._lock:
            held = self._regions.get(key.decode(errors="replace"))
            reach = None if held is None else FileReach(os.dup(held.file), held.at)
        answer = proof(self._secret, b"server", theirs, nonce)
        if reach is None:
            _send(sock, answer)
            raise TransferError("a client asked for a region that is not there")
        try:
            region = Mapped(reach)
            _send(sock, answer + msgspec.msgpack.encode(region.contents))
            sock.settimeout(LEASE_S)
            while True:
                first, count = _ASK.unpack(_receive(sock))
                if first == _TAKEN:
                    region.take()
                    return
                if first + count > region.contents.pages:
                    raise TransferError("a client asked for pages that are not there")
                await_pages(region.progress, first + count, time.time() + LEASE_S)
                _send(sock, region.sums(first, count))
                at = reach.at + region.contents.page_at(first)
                end = at + count * region.contents.page_bytes
                while at < end:
                    at += _send_file(sock, reach.file, at, end - at)
                if first + count == region.contents.pages:
                    token = await_token(region, time.time() + LEASE_S)
                    _send(sock, _TOKEN.pack(0 if token is None else token + 1))
        finally:
            os.close(reach.file)


class TcpSource:
    """Reads a region of another machine; see `tenfold.kv.transfer.Source`."""

    def __init__(self, handoff: Handoff, secret: bytes) -> None:
        """Raises TransferError, OSError."""
        self._expires = handoff.expires
        self.seconds = self.complete_at = 0.0
        self.token: int | None = None
        self._socket = socket.create_connection((handoff.host, handoff.port), timeout=CONNECT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.contents = self._greet(handoff.key.encode(), check_secret(secret))
        except BaseException:
            self._socket.close()
            raise

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `tenfold.kv.transfer.Source`."""
        left = self._expires - time.time()
        if left <= 0:
            raise TransferError("the exporter is late", "late")
        self._socket.settimeout(min(left, STALL_S))
        self._socket.sendall(_LENGTH.pack(_ASK.size) + _ASK.pack(first, len(views)))
        sums = _receive(self._socket)
        began = time.perf_counter()
        for view in views:
            _fill(self._socket, view)
        good = right(views, sums)
        self.seconds += time.perf_counter() - began
        if first + len(views) == self.contents.pages:
            self.token = self._token()
        return good

    @property
    def ended(self) -> bool:
        """See `tenfold.kv.transfer.Source`."""
        return False

    def cancel(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def take(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        _send(self._socket, _ASK.pack(_TAKEN, 0))

    def close(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        self._socket.close()

    def _token(self) -> int | None:
        said = _receive(self._socket)
        if len(said) != _TOKEN.size:
            raise TransferError("the server says what is no token")
        (token,) = _TOKEN.unpack(said)
        return int(token) - 1 if token else None

    def _greet(self, key: bytes, secret: bytes) -> Contents:
        theirs, nonce = _receive(self._socket), secrets.token_bytes(_NONCE)
        _send(self._socket, nonce + proof(secret, b"client", theirs, nonce, key) + key)
        answer = _receive(self._socket)
        if not hmac.compare_digest(answer[:_PROOF], proof(secret, b"server", nonce, theirs)):
            raise TransferError("the server does not know the secret")
        if len(answer) == _PROOF:
            raise TransferError("the exporter has given the region up", "gone")
        try:
            return msgspec.msgpack.decode(answer[_PROOF:], type=Contents)
        except msgspec.DecodeError as error:
            raise TransferError(f"the server says what is no region: {error}") from None
