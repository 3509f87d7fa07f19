"""Which transport pages come by: what is measured to be faster, and what was asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import pytest

from tenfold.kv.choice import RETRY, Choice
from tenfold.kv.region import Contents, TransferError
from tenfold.kv.segment import token_bytes
from tenfold.kv.transfer import Handoff, NixlOffer, Source

FAR = Handoff(
    pages=4,
    expires=1e12,
    path="/proc/1/fd/1",
    host="10.0.0.2",
    port=1,
    nixl=NixlOffer(metadata="", address=0, proof=""),
)


class Fake:
    """A source of a given speed."""

    def __init__(self, speed: float, fails: str | None) -> None:
        self.contents = Contents(
            identity="", namespace=b"", tokens=token_bytes(range(64)), pages=4, page_bytes=8
        )
        self.seconds = self.complete_at = 0.0
        self.token = None
        self.ended = False
        self._speed = speed
        self._fails = fails

    def read(self, first: int, views: Sequence[memoryview]) -> int:
        """All of them, or none."""
        if self._fails is not None:
            raise TransferError("no", self._fails)  # type: ignore[arg-type]
        self.seconds += len(views) / self._speed
        return len(views)

    def cancel(self) -> None:
        """Nothing."""

    def take(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Network:
    """What each transport does now, and by which pages came."""

    def __init__(self) -> None:
        self.speeds = {"tcp": 1.0, "nixl": 1.0}
        self.fails: dict[str, str | None] = {"tcp": None, "nixl": None}
        self.used: list[str] = []

    def opener(self, name: str) -> Callable[[Handoff], Source]:
        """Of a transport."""

        def open(handoff: Handoff) -> Source:
            self.used.append(name)
            return Fake(self.speeds[name], self.fails[name])

        return open

    def imports(self, choice: Choice, count: int, handoff: Handoff = FAR) -> list[str]:
        """By what so many imports came, or would have."""
        self.used.clear()
        for _ in range(count):
            source = choice(handoff)
            with contextlib.suppress(TransferError):
                source.read(0, [memoryview(bytearray(8))] * 4)
            source.close()
        return list(self.used)


@pytest.fixture
def network() -> Network:
    """Both are as fast."""
    return Network()


@pytest.fixture
def choice(network: Network) -> Choice:
    """Between TCP and NIXL."""
    return Choice({"tcp": network.opener("tcp"), "nixl": network.opener("nixl")}, "10.0.0.1")


@pytest.mark.parametrize(("fast", "slow"), [("tcp", "nixl"), ("nixl", "tcp")])
def test_the_faster_one_is_used(
    network: Network, choice: Choice, fast: str, slow: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: each is tried once with an exporter's host, then the faster one is used, and the log says
    which and why; now and then the other is tried, and takes over when it has become faster."""
    network.speeds[fast] = 3.0
    with caplog.at_level(logging.INFO):
        used = network.imports(choice, RETRY)
    assert used == ["tcp", "nixl", *[fast] * (RETRY - 3), slow]
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"KV pages from 10.0.0.2 come by {fast} from now on"
    ]
    network.speeds[slow] = 30.0
    network.imports(choice, RETRY)
    assert network.imports(choice, 3) == [slow] * 3


@pytest.mark.parametrize("broken", ["tcp", "nixl"])
def test_what_fails_is_left_alone(network: Network, choice: Choice, broken: str) -> None:
    """Promise: a transport that fails where the other works is not used but for a trial now and then."""
    network.fails[broken] = "broken"
    network.speeds[broken] = 100.0
    used = network.imports(choice, 2 * RETRY)
    assert used.count(broken) == 3


def test_an_exporter_that_is_gone_says_nothing_of_its_network(network: Network, choice: Choice) -> None:
    """Promise: pages that are gone, late or of something else are not held against the transport."""
    network.speeds["nixl"] = 3.0
    network.imports(choice, 2)
    for reason in ("gone", "late", "foreign"):
        network.fails["nixl"] = reason
        network.imports(choice, 1)
    network.fails["nixl"] = None
    assert network.imports(choice, 3) == ["nixl"] * 3


def test_hosts_are_told_apart(network: Network, choice: Choice) -> None:
    """Promise: what is measured with one host decides for that host."""
    network.fails["nixl"] = "broken"
    network.imports(choice, 3)
    network.fails["nixl"] = None
    network.speeds["nixl"] = 2.0
    other = Handoff(pages=4, expires=1e12, host="10.0.0.3", port=1, nixl=FAR.nixl)
    assert network.imports(choice, 3, other) == ["tcp", "nixl", "nixl"]
    assert network.imports(choice, 1) == ["tcp"]


def test_what_is_not_on_offer_is_not_used(network: Network) -> None:
    """Promise: a transport is used if both sides have it; if they have none in common, the error says so."""
    both = Choice({"tcp": network.opener("tcp"), "nixl": network.opener("nixl")}, "10.0.0.1")
    by_tcp = Handoff(pages=4, expires=1e12, host="10.0.0.2", port=1)
    assert network.imports(both, 2, by_tcp) == ["tcp", "tcp"]
    with pytest.raises(TransferError, match="--kv-transport"):
        Choice({"nixl": network.opener("nixl")})(by_tcp)
