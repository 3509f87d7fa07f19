"""One client's connection: what uvicorn leaves unbounded is bounded here.

uvicorn reads HTTP (by httptools) and runs the application. This layer adds four limits: how long a request
may take to arrive, how large its head may be, how long a client may leave its answer unread, and that one
request follows another instead of overtaking it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tenfold.server.errors import ApiError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of request line and headers; what arrives in one read with their end is not held against them."""


class Patience(msgspec.Struct, frozen=True):
    """How long a client is waited for, in seconds."""

    arrive_s: float
    """From the first byte of a request (or from connecting) to the last one of its body."""
    read_s: float
    """From the time that an answer backs up to the next byte that the client takes."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, within limits."""

    def __init__(self, *, patience: Patience, **rest: Any) -> None:
        super().__init__(**rest)
        self._patience = patience
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._deaf = False
        """A request came before the answer to the one before it: what is read is dropped from there on, and
        the connection ends with that answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._overtaken()
            return
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._overtaken()  # by what came in one read with the request's own end
            return
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._arriving is None:
            self._expect()

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._deaf:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _overtaken(self) -> None:
        # Were it queued, as uvicorn does, a hang-up would not reach the request under way; and an error in it
        # would be answered in the middle of that one's answer.
        self._deaf = True
        self.cycle.keep_alive = False

    def _expect(self) -> None:
        self._arriving = self.loop.call_later(self._patience.arrive_s, self._late)

    def _late(self) -> None:
        self._arriving = None
        if self.cycle is None and not self._in_head:
            self.transport.close()  # connected, and never said a word
        elif self._in_head or not self.cycle.response_started:
            self._refuse(408, f"the request did not arrive within {self._patience.arrive_s:g} s")
        else:
            self.transport.abort()  # answered already (too long, say), and it still sends

    def _wait_for_reader(self, backlog: int) -> None:
        self._unread = self.loop.call_later(self._patience.read_s, self._look_at_reader, backlog)

    def _look_at_reader(self, backlog: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < backlog:
            self._wait_for_reader(left)
            return
        log.info("a client read nothing for %g s; hanging up on it", self._patience.read_s)
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        body = ApiError(status, message, code={408: "request_timeout", 431: "head_too_long"}[status]).body()
        reason = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        log.info("a connection is refused: %d %s", status, message)
        self.transport.write(head.encode() + body)
        self.transport.close()
