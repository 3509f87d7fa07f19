"""Which transport a handoff's pages come by.

Within a machine it is memory, which beats the others several times over (docs/benchmarks.md). From another
machine, where both TCP and NIXL are on offer, what decides is how fast each has brought pages from that
exporter's host: the first import is TCP's, the second NIXL's, the further ones the faster one's, and every
`RETRY`-th the other's, as networks change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from tenfold.kv.arena import Arena
from tenfold.kv.imports import Transfer
from tenfold.kv.nixl import NixlAgent, NixlMissing
from tenfold.kv.region import Contents, TransferError
from tenfold.kv.tcp import PageServer, TcpSource
from tenfold.kv.transfer import Exports, Handoff, MemorySource, Offer, Opener, Source, offer_memory
from tenfold.protocol import KVTransport

log = logging.getLogger(__name__)

Name = Literal["memory", "tcp", "nixl"]
"""Of a transport."""
RETRY = 64
MOST_HOSTS = 1024
"""Remembered."""
NEW_WEIGHT = 0.25
"""Of a further measurement."""


def transfer_between_machines(
    transport: KVTransport, identity: str, page_bytes: int, most_bytes: int, secret: bytes, host: str
) -> Transfer:
    """With workers of other machines too: pages are offered at address ``host`` until the process ends.
    Raises OSError for an address that is not this machine's, ValueError for a secret that is too short, or if
    NIXL is asked for and cannot be used."""
    arena = Arena(most_bytes)
    offers: list[Offer] = []
    openers: dict[Name, Opener] = {}
    if transport in ("auto", "memory"):
        offers.append(offer_memory)
        openers["memory"] = MemorySource
    if transport in ("auto", "tcp"):
        offers.append(PageServer(secret, host).offer)
        openers["tcp"] = lambda handoff: TcpSource(handoff, secret)
    if transport in ("auto", "nixl"):
        try:
            agent = NixlAgent(arena, page_bytes, secret)
        except (NixlMissing, OSError) as error:
            if transport == "nixl":
                raise ValueError(f"--kv-transport nixl: {error}") from None
            log.info("KV pages do not come by NIXL: %s", error)
        else:
            offers.append(agent.offer)
            openers["nixl"] = agent.open
    log.info("KV pages come by %s (--kv-transport %s)", " or ".join(openers), transport)
    exports = Exports(identity, page_bytes, arena, offers)
    choice = Choice(openers, host if transport == "auto" else None)
    return Transfer(identity=identity, exports=exports, open=choice, near=choice.near)


class _Host(msgspec.Struct):
    """What is known of the exporters at an address."""

    imports: int = 0
    speeds: dict[Name, float] = {}
    """Bytes a second; 0: it failed."""
    said: Name | None = None

    @property
    def best(self) -> Name:
        """The fastest."""
        return max(self.speeds, key=lambda name: self.speeds[name])


class Choice:
    """Opens handoffs; an `Opener`. ``openers``: the transports that are to be used."""

    def __init__(self, openers: dict[Name, Opener], host: str | None = None) -> None:
        """``host``: this machine's address; None: all handoffs are from this machine."""
        self._openers = openers
        self._host = host
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()

    def __call__(self, handoff: Handoff) -> Source:
        """Raises TransferError, OSError."""
        offered: dict[Name, bool] = {
            "memory": self.near(handoff),
            "tcp": bool(handoff.port),
            "nixl": handoff.nixl is not None,
        }
        usable = [name for name in self._openers if offered[name]]
        if "memory" in usable:
            try:
                return MemorySource(handoff)
            except TransferError:
                # The same address and another memory (a container's) is no fault if there is something else.
                usable.remove("memory")
                if not usable:
                    raise
        if not usable:
            raise TransferError(
                f"the exporter offers nothing that is used here ({', '.join(self._openers)}); is "
                "--kv-transport the same on both sides?"
            )
        if len(usable) == 1:
            return self._openers[usable[0]](handoff)
        name = self._next(handoff.host, usable)
        try:
            return _Timed(self._openers[name](handoff), lambda speed: self._heard(handoff.host, name, speed))
        except (TransferError, OSError) as error:
            if getattr(error, "reason", "broken") == "broken":
                self._heard(handoff.host, name, 0.0)
            raise

    def near(self, handoff: Handoff) -> bool:
        """Whether a handoff's pages are looked for in this machine's memory."""
        return "memory" in self._openers and bool(handoff.path) and self._host in (None, handoff.host)

    def _next(self, address: str, usable: Sequence[Name]) -> Name:
        with self._lock:
            host = self._hosts.setdefault(address, _Host())
            while len(self._hosts) > MOST_HOSTS:
                del self._hosts[next(iter(self._hosts))]
            host.imports += 1
            for name in usable:
                if name not in host.speeds:
                    return name
            others = [name for name in usable if name != host.best]
            return others[0] if host.imports % RETRY == 0 else host.best

    def _heard(self, address: str, name: Name, speed: float) -> None:
        """How fast pages came from there; 0: they did not."""
        with self._lock:
            host = self._hosts.setdefault(address, _Host())
            known = host.speeds.get(name, 0.0)
            host.speeds[name] = known + NEW_WEIGHT * (speed - known) if known and speed else speed
            if len(host.speeds) > 1 and host.said != host.best:
                host.said = host.best
                speeds = ", ".join(f"{each}: {value / 1e9:.2f} GB/s" for each, value in host.speeds.items())
                log.info("KV pages from %s come by %s from now on (%s)", address, host.best, speeds)


class _Timed:
    """A source that says how fast it was."""

    def __init__(self, source: Source, heard: Callable[[float], None]) -> None:
        self._source = source
        self._heard = heard
        self._bytes = 0
        self._failed = False
        self.contents: Contents = source.contents

    @property
    def seconds(self) -> float:
        """See `tenfold.kv.transfer.Source`."""
        return self._source.seconds

    @property
    def complete_at(self) -> float:
        """See `tenfold.kv.transfer.Source`."""
        return self._source.complete_at

    @property
    def token(self) -> int | None:
        """See `tenfold.kv.transfer.Source`."""
        return self._source.token

    @property
    def ended(self) -> bool:
        """See `tenfold.kv.transfer.Source`."""
        return self._source.ended

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """See `tenfold.kv.transfer.Source`."""
        try:
            good = self._source.read(first, views)
        except (TransferError, OSError) as error:
            self._failed = getattr(error, "reason", "broken") == "broken"
            raise
        self._failed = good < len(views)
        self._bytes += sum(len(view) for view in views[:good])
        return good

    def cancel(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        self._source.cancel()

    def take(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        self._source.take()

    def close(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        self._source.close()
        if self._failed:
            self._heard(0.0)
        elif self._bytes and self.seconds > 0:
            self._heard(self._bytes / self.seconds)
