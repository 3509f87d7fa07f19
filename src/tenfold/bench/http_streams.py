"""Streams over HTTP, read with as little work as can be: the client shares the machine with the server.

While streams run, bytes are only put aside; what they say is looked at afterwards.
"""

from __future__ import annotations

import http.client
import io
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec


class StreamRecord(msgspec.Struct):
    """One stream as it arrived."""

    first_at: float = 0.0
    last_at: float = 0.0
    parts: list[bytes] = msgspec.field(default_factory=list)


class StreamAnswer(msgspec.Struct, frozen=True):
    """What a stream said."""

    text: str
    finish_reason: str
    completion_tokens: int
    events: int
    """``data:`` lines."""


def read_streams(
    address: tuple[str, int], path: str, bodies: Sequence[dict[str, Any]], silence_s: float = 60.0
) -> list[StreamRecord]:
    """Posts all bodies at once and reads every answer until the server hangs up; whether it was whole,
    `read_answer` finds. Raises TimeoutError when nothing comes for ``silence_s``."""
    with selectors.DefaultSelector() as selector:
        socks = []
        records = []
        try:
            for _ in bodies:
                sock = socket.create_connection(address, timeout=silence_s)
                socks.append(sock)
                records.append(StreamRecord())
                selector.register(sock, selectors.EVENT_READ, (sock, records[-1]))
            for sock, body in zip(socks, bodies, strict=True):
                data = json.dumps(body).encode()
                head = (
                    f"POST {path} HTTP/1.1\r\nhost: {address[0]}\r\nconnection: close\r\n"
                    f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                )
                sock.sendall(head.encode() + data)
                sock.setblocking(False)
            _drain(selector, silence_s)
        finally:
            for sock in socks:
                sock.close()
    return records


def _drain(selector: selectors.BaseSelector, silence_s: float) -> None:
    while selector.get_map():
        ready = selector.select(silence_s)
        if not ready:
            raise TimeoutError(f"no stream said anything for {silence_s:g} s")
        for key, _ in ready:
            sock, record = key.data
            data = sock.recv(1 << 16)
            if not data:
                selector.unregister(sock)
                continue
            record.last_at = time.perf_counter()
            if not record.parts:
                record.first_at = record.last_at
            record.parts.append(data)


class _Bytes:
    """What `http.client` needs of a socket, over bytes that are here already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def read_answer(raw: bytes) -> StreamAnswer:
    """What the bytes of a chat stream say. Raises ValueError unless it is one whole, good answer."""
    response = http.client.HTTPResponse(_Bytes(raw))  # type: ignore[arg-type]  # all that it uses
    try:
        response.begin()
        body = response.read().decode()
    except http.client.HTTPException as error:
        raise ValueError(f"the answer is not whole: {type(error).__name__} {error}") from None
    if response.status != 200:
        raise ValueError(f"status {response.status}: {body[:300]}")
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    if not events or events[-1] != "[DONE]":
        raise ValueError("the stream does not end with [DONE]")
    texts = []
    finishes = []
    tokens = 0
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise ValueError(f"the stream ends with an error: {event['error']}")
        for choice in event["choices"]:
            texts.append(choice["delta"].get("content") or "")
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if len(finishes) != 1:
        raise ValueError(f"the stream has {len(finishes)} finish reasons, not one")
    return StreamAnswer("".join(texts), finishes[0], tokens, len(events))
