"""Telling other routers of pages over ZeroMQ, as vLLM does.

A PUB socket sends ``[topic, number, batch]``: an empty topic, eight bytes (big-endian, from 0, without gaps)
and a `tenfold.kv.wire_news.KVEventBatch` as msgpack. Who finds a gap connects a REQ or DEALER to the ROUTER
socket and sends the first number that it misses; what comes back is ``[number, batch]`` for each batch from
there on that is still kept, and ``[-1, b""]`` as the end. Nobody is asked who he is, and prompts can be read
from it all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from tenfold.kv.wire_news import KVEventBatch, WireEvent

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

KEPT = 10_000
"""Batches for replay; as many as vLLM keeps."""
MOST_UNSENT = 100_000
"""Batches that wait for one slow subscriber; what comes then, it misses, and may have replayed."""
MOST_UNREAD = 2 * (KEPT + 1)
"""Of replayed batches, for one asker: all that is kept, and once more what he asks for before he has read it.
Who reads still less is not sent the end, by which he knows that there is more."""
END = (-1).to_bytes(8, "big", signed=True)


def address_of_rank(address: str, rank: int) -> str:
    """The address of a further worker: ``rank`` ports higher."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


class KVEventPublisher:
    """Owns the sockets and the thread that sends. One thread calls its methods."""

    def __init__(self, address: str, replay: str | None, rank: int = 0) -> None:
        """Takes the addresses, those of rank 0, for this ``rank``. Raises OSError for one that cannot be had,
        ValueError where pyzmq is missing."""
        try:
            import zmq
        except ImportError:
            raise ValueError(
                "kv_events (--kv-events) needs pyzmq, which is not installed: "
                "pip install 'tenfold[kv-events]'"
            ) from None
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        out = self._context.socket(zmq.PUB)
        out.set_hwm(MOST_UNSENT)
        self._bind(out, "kv_events (--kv-events)", address)
        router = None
        if replay is not None:
            router = self._context.socket(zmq.ROUTER)
            router.set_hwm(MOST_UNREAD)
            router.router_mandatory = True  # else what does not fit is dropped without a word
            self._bind(router, "kv_events_replay (--kv-events-replay)", replay)
        inside = self._context.socket(zmq.PULL)
        self._in = self._context.socket(zmq.PUSH)
        for end in (inside, self._in):
            end.set_hwm(0)
        inside.bind("inproc://batches")
        self._in.connect("inproc://batches")
        self._thread = threading.Thread(
            target=self._run, args=(inside, out, router), name="kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: list[WireEvent]) -> None:
        """One batch."""
        self._in.send(self._encoder.encode(KVEventBatch(time.time(), events, self._rank)))

    def close(self) -> None:
        """Sends what there is to whoever takes it at once, and gives the addresses back."""
        self._in.send(b"")
        self._thread.join()
        self._context.destroy(linger=200)

    def _bind(self, sock: zmq.Socket[bytes], option: str, address: str) -> None:
        import zmq

        where = address_of_rank(address, self._rank)
        try:
            sock.bind(where)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"{option}: cannot use {where}: {error.strerror}; choose another") from None

    def _run(
        self, inside: zmq.Socket[bytes], out: zmq.Socket[bytes], router: zmq.Socket[bytes] | None
    ) -> None:
        import zmq

        poller = zmq.Poller()
        for sock in (inside, router):
            if sock is not None:
                poller.register(sock, zmq.POLLIN)
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        number = 0
        while True:
            ready = dict(poller.poll())
            if inside in ready:
                batch = inside.recv()
                if not batch:
                    return
                numbered = number.to_bytes(8, "big"), batch
                out.send_multipart((b"", *numbered))
                kept.append(numbered)
                number += 1
            if router is not None and router in ready:
                _replay(router, kept)


def _replay(router: zmq.Socket[bytes], kept: deque[tuple[bytes, bytes]]) -> None:
    import zmq

    asked = router.recv_multipart()
    if len(asked) != 3 or len(asked[2]) != 8:
        log.warning("a request for events is not understood: %d parts", len(asked))
        return
    who, empty, first = asked
    try:
        for number, batch in kept:
            if number >= first:  # big-endian: bytes are in the order of numbers
                router.send_multipart((who, empty, number, batch), zmq.NOBLOCK)
        router.send_multipart((who, empty, END, b""), zmq.NOBLOCK)
    except zmq.ZMQError as error:
        why = "does not read them" if isinstance(error, zmq.Again) else "is gone"
        log.warning("events that were asked for again are not all sent: who asked for them %s", why)
