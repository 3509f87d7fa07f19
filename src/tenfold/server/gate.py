"""Where workers of other machines come in: `tenfold serve --accept-workers`.

Who owns what: the gate owns the listening socket and every connection from its first byte to its end; a
connection whose worker was let in feeds a `JoinedHost`, which belongs to the worker's post.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from typing import Protocol, cast

import msgspec

from tenfold.protocol import EnginePlan, FrontMessage, Join, JoinedMessage, TurnedAway, Welcome
from tenfold.server.joined import JoinedHost, identity_objection, plan_objection
from tenfold.server.post import Post
from tenfold.worker.join import GREETING_S, check_name, prepare
from tenfold.worker.sealed import ANSWER, WRONG_SECRET, FrontGreeting, NotTrusted, Seals

log = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Connections of which nobody knows yet whether they have the secret;"""
MOST_OF_ADDRESS = 8
"""so many of one address. Where there are more, the one that has said nothing for longest is closed: a worker
says who it is at once."""
TELL_S = 60.0
"""Of those without the secret a line is in the log once in so long."""
PART_S = 3.0
"""So long a worker that is turned away may take to read why, and hang up. (If we did, it might never read
it.)"""


class Muster(Protocol):
    """Who takes workers in; `tenfold.server.flights.Flights` does."""

    def join(self, name: str, address: str) -> Post:
        """A post for a worker that joins, by this name or one like it; it is there until its worker is
        lost."""
        ...

    async def retire(self, post: Post) -> None:
        """Takes the requests away, after some time."""
        ...

    @property
    def plan(self) -> EnginePlan | None:
        """Of any worker that takes requests."""
        ...


class Gate:
    """Lets workers in that have the ``secret`` and are as this front is."""

    def __init__(self, sock: socket.socket, secret: bytes, muster: Muster) -> None:
        """Takes over the bound socket."""
        self._socket = sock
        self._secret = secret
        self._muster = muster
        self._server: asyncio.AbstractServer | None = None
        self._strangers: dict[_Link, None] = {}
        """In the order in which they came."""
        self._untold = 0
        self._tell_at = 0.0
        self._links: set[_Link] = set()
        self._instances: dict[str, JoinedHost] = {}
        self.joined = 0
        """Workers let in so far, each time one is."""
        self.turned_away: Counter[str] = Counter()
        """Connections that came to nothing, by reason: ``secret``, ``identity``, ``broken``."""
        self.ours: Join | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def open(self, ours: Join) -> None:
        """From now on workers may come; they must be as ``ours`` says. Raises OSError."""
        self.ours = ours
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), sock=self._socket)

    def close(self) -> None:
        """Nobody else comes in; those that are in are left to the fleet."""
        if self._server is not None:
            self._server.close()
        else:
            self._socket.close()
        for link in list(self._links):
            if link.host is None:
                link.close()

    # For links

    def came(self, link: _Link) -> FrontGreeting:
        """Somebody connected."""
        alike = [other for other in self._strangers if other.host_address == link.host_address]
        if len(alike) >= MOST_OF_ADDRESS:
            self._hang_up(alike[0])
        elif len(self._strangers) >= MOST_STRANGERS:
            self._hang_up(next(iter(self._strangers)))
        self._strangers[link] = None
        self._links.add(link)
        return FrontGreeting(self._secret)

    def _hang_up(self, link: _Link) -> None:
        self.refuse(link, "secret", "it has not said who it is, and others wait to")
        link.close()
        self.known(link)

    def known(self, link: _Link) -> None:
        """It is no stranger any more, or gone."""
        self._strangers.pop(link, None)

    def gone(self, link: _Link) -> None:
        """Its connection has ended."""
        self._links.discard(link)

    def refuse(self, link: _Link, kind: str, why: str) -> None:
        """A connection is closed from here."""
        self.turned_away[kind] += 1
        more = ""
        if kind == "secret":
            now = asyncio.get_running_loop().time()
            if now < self._tell_at:
                self._untold += 1
                return
            if self._untold:
                more = f"; so were {self._untold} since this was said last"
            self._tell_at, self._untold = now + TELL_S, 0
        log.warning("a worker at %s is turned away: %s%s", link.address, why, more)

    def let_in(self, link: _Link, join: Join) -> JoinedHost | None:
        """Gives a worker its post, or says why not."""
        assert self.ours is not None
        if (why := identity_objection(join, self.ours)) is not None:
            self.refuse(link, "identity", why)
            link.send(TurnedAway(reason=why))
            return None
        if (earlier := self._instances.get(join.instance)) is not None:
            earlier.kill("it comes anew")  # The same process: that connection is dead, unnoticed so far.
        post = self._muster.join(join.name, link.address)
        host = JoinedHost(
            link, post.name, post, lambda: self._muster.retire(post), lambda plan: self._objection(link, plan)
        )
        post.host = host
        self._instances[join.instance] = host
        self.joined += 1
        log.info("worker %s at %s joins", post.name, link.address)
        link.send(Welcome(name=post.name))
        return host

    def forget(self, instance: str, host: JoinedHost) -> None:
        """A worker that was let in is gone."""
        if self._instances.get(instance) is host:
            del self._instances[instance]

    def _objection(self, link: _Link, plan: EnginePlan) -> str | None:
        if (ours := self._muster.plan) is None or (why := plan_objection(plan, ours)) is None:
            return None
        self.refuse(link, "identity", why)
        return why


class _Link(asyncio.Protocol):
    """One connection."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._decoder: msgspec.msgpack.Decoder[JoinedMessage] = msgspec.msgpack.Decoder(JoinedMessage)
        self._transport: asyncio.Transport | None = None
        self._greeting: FrontGreeting | None = None
        self._heard = bytearray()
        """Before it is known to have the secret."""
        self._seals: Seals | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._instance = ""
        self._closed = False
        self.host: JoinedHost | None = None
        self.address = self.host_address = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (peer := transport.get_extra_info("peername")) is not None:  # else it is gone already
            self.host_address = peer[0]
            self.address = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
        with contextlib.suppress(OSError):
            prepare(transport.get_extra_info("socket"))
        self._greeting = self._gate.came(self)
        self._transport.write(self._greeting.hello)
        self._patience = asyncio.get_running_loop().call_later(GREETING_S, self._late)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            if self._seals is None:
                data = self._greeted(data)
            if self._seals is not None:
                for body in self._seals.unsealer.feed(data):
                    self._said(self._decoder.decode(body))
                    if self._closed:
                        return
        except (ValueError, msgspec.DecodeError) as error:
            if self.host is not None:
                self.host.kill(f"what it says cannot be trusted: {error}")
            elif self._seals is not None:
                self._gate.refuse(self, "broken", str(error))
                self.close()
            else:
                self._gate.refuse(self, "secret", str(error))
                self.part()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._known()
        self._gate.gone(self)
        if self.host is not None:
            self._gate.forget(self._instance, self.host)
            self.host.lost()

    def send(self, message: FrontMessage) -> None:
        """See `tenfold.server.joined.Link`."""
        if not self._closed:
            assert self._transport is not None and self._seals is not None
            self._transport.write(self._seals.sealer.seal(msgspec.msgpack.encode(message)))

    def close(self) -> None:
        """See `tenfold.server.joined.Link`."""
        self._closed = True
        assert self._transport is not None
        self._transport.abort()

    def part(self) -> None:
        """See `tenfold.server.joined.Link`."""
        self._closed = True
        asyncio.get_running_loop().call_later(PART_S, self.close)

    def _greeted(self, data: bytes) -> bytes:
        """Takes the worker's answer; returns what comes after it."""
        self._heard += data
        if len(self._heard) < ANSWER:
            return b""
        assert self._greeting is not None and self._transport is not None
        answer, rest = bytes(self._heard[:ANSWER]), bytes(self._heard[ANSWER:])
        self._heard.clear()
        try:
            proof, self._seals = self._greeting.check(answer)
        except NotTrusted:
            self._transport.write(WRONG_SECRET)
            raise
        self._transport.write(proof)
        return rest

    def _said(self, message: JoinedMessage) -> None:
        if self.host is not None:
            self.host.received(message)
            return
        if not isinstance(message, Join):
            raise ValueError(f"it said {type(message).__name__} before Join")
        check_name(message.name)
        self._known()
        self._instance = message.instance
        self.host = self._gate.let_in(self, message)
        if self.host is None:
            self.part()

    def _known(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            self._gate.known(self)

    def _late(self) -> None:
        self._gate.refuse(self, "secret", f"it did not say who it is within {GREETING_S:g} s")
        self.close()
