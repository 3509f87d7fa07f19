"""Two hosts on one machine: network namespaces, with veth pairs between them and to this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def needs_namespaces() -> pytest.MarkDecorator:
    """For tests that use `two_hosts`."""
    missing = ""
    if os.geteuid() != 0:
        missing = "only root makes network namespaces"
    elif shutil.which("ip") is None:
        missing = "iproute2 is not installed"
    else:
        name = f"tf-try-{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if made.returncode == 0:
            made = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if made.returncode != 0:
            missing = f"no network namespaces here: {made.stderr.strip()}"
    return pytest.mark.skipif(bool(missing), reason=missing)


class TwoHosts:
    """``near``, which this process reaches at `reached`, and ``far``, which only ``near`` reaches."""

    def __init__(self, number: int) -> None:
        self._near, self._far = f"tf-near-{number}", f"tf-far-{number}"
        third = number % 250
        self.reached = f"10.213.{third}.2"
        """Address of ``near`` for this process."""
        self.near, self.far = f"10.214.{third}.1", f"10.214.{third}.2"
        """Their addresses for each other."""
        _ip("netns", "add", self._near)
        _ip("netns", "add", self._far)
        _ip(
            "link", "add", "name", f"tfh{number}", "type", "veth", "peer", "name", "home", "netns", self._near
        )
        _ip("address", "add", f"10.213.{third}.1/24", "dev", f"tfh{number}")
        _ip("link", "set", f"tfh{number}", "up")
        _ip(
            *("-n", self._near, "link", "add", "name", "wire", "type", "veth"),
            *("peer", "name", "wire", "netns", self._far),
        )
        for name, device, address in (
            (self._near, "home", self.reached),
            (self._near, "wire", self.near),
            (self._far, "wire", self.far),
        ):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
        for name in (self._near, self._far):
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """The link between the two goes down."""
        _ip("-n", self._near, "link", "set", "wire", "down")

    def mend(self) -> None:
        """It comes up again."""
        _ip("-n", self._near, "link", "set", "wire", "up")

    def within(self, near: bool) -> list[str]:
        """What stands before a command that is to run on one of them."""
        return ["ip", "netns", "exec", self._near if near else self._far]


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """They are removed in the end, whatever happens."""
    number = os.getpid() % 100_000
    try:
        yield TwoHosts(number)
    finally:
        # With a namespace goes its end of each link, and with that the other end. Its processes have ended.
        for name in (f"tf-near-{number}", f"tf-far-{number}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
