"""Messages on a stream socket: four bytes of length (little-endian), then msgpack."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from tenfold.protocol import FromWorker, FrontMessage, ToWorker

T = TypeVar("T")

MAX_FRAME_BYTES = 256 << 20
"""A longer frame means that the peer is broken."""


def frame(message: ToWorker | FromWorker) -> bytes:
    """The bytes of one message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Cuts a byte stream into frames, wherever the reads happened to end. Each may have a ``tail`` of so many
    bytes behind it, which its length does not count."""

    def __init__(self, tail: int = 0) -> None:
        self._tail = tail
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Bodies and tails that ``data`` completes, in order. Raises ValueError for an impossible length."""
        pending = self._pending
        pending += data
        frames = []
        start = 0
        while len(pending) - start >= 4:
            size = int.from_bytes(pending[start : start + 4], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes announced; the limit is {MAX_FRAME_BYTES}")
            end = start + 4 + size
            if len(pending) < end + self._tail:
                break
            frames.append((bytes(pending[start + 4 : end]), bytes(pending[end : end + self._tail])))
            start = end + self._tail
        del pending[:start]
        return frames


class FrameReader(Generic[T]):
    """Makes messages of a byte stream.

    ``decoder`` decides which messages are welcome; anything else raises msgspec.DecodeError.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._frames = Frames()

    def feed(self, data: bytes) -> list[T]:
        """The messages that ``data`` completes, in order. Raises ValueError for an impossible length."""
        return [self._decoder.decode(body) for body, _ in self._frames.feed(data)]


class Reader(Protocol):
    """Makes messages of a byte stream."""

    def feed(self, data: bytes) -> list[FrontMessage]: ...


class Channel:
    """The worker's end: blocking sends, and reads that wait or do not. Owns the socket.

    ``reader`` and ``pack`` make messages of bytes and bytes of messages; None: as in this file.
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: Reader | None = None,
        pack: Callable[[FromWorker], bytes] = frame,
    ) -> None:
        self._socket = sock
        self._reader = reader or FrameReader(msgspec.msgpack.Decoder(FrontMessage))
        self._pack = pack
        sock.setblocking(True)

    def send(self, message: FromWorker) -> None:
        """Waits while the front is behind: that is the back-pressure. Raises EOFError when it is gone."""
        try:
            self._socket.sendall(self._pack(message))
        except (ConnectionError, TimeoutError):
            raise EOFError("the front closed the connection") from None

    def poll(self) -> list[FrontMessage]:
        """What has arrived, without waiting. Raises EOFError when the front is gone."""
        return self._receive(socket.MSG_DONTWAIT)

    def wait(self, timeout_s: float | None = None) -> list[FrontMessage]:
        """Waits for at least one message, but not much longer than ``timeout_s``; then there is none. Raises
        EOFError when the front is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not select.select([self._socket], (), (), left_s)[0]:
                    return []
            messages = self._receive(0)
            if messages:
                return messages

    def _receive(self, flags: int) -> list[FrontMessage]:
        messages: list[FrontMessage] = []
        while True:
            try:
                data = self._socket.recv(1 << 18, flags)
            except BlockingIOError:
                return messages
            except (ConnectionError, TimeoutError):
                data = b""
            if not data:
                raise EOFError("the front closed the connection")
            messages += self._reader.feed(data)
            if len(data) < 1 << 18:
                return messages
