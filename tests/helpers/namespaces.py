"""Two hosts on one machine: network namespaces that are joined by a veth pair.

Each has a loopback and one address of its own, and reaches the other and nothing else, unless the first is to
be reached from here too. Their processes share all but the network: files, process ids, memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """One end of the pair."""

    name: str
    """Of the namespace."""
    link: str
    """Its network device."""
    address: str
    reached: str = ""
    """Its address for this process, which has none for it otherwise."""

    def command(self, *command: str) -> list[str]:
        """What runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def connect(self, up: bool) -> None:
        """Joins it to the other host, or cuts it off."""
        _ip("-n", self.name, "link", "set", self.link, "up" if up else "down")


class NoNamespaces(Exception):
    """They cannot be made here; the message says why."""


@contextlib.contextmanager
def two_hosts(reached: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts, which are gone afterwards; end their processes before. ``reached``: this process reaches the
    first, by a link of its own. Raises NoNamespaces."""
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need ip (Debian: iproute2)")
    mark = secrets.token_hex(3)
    home = f"10.214.{os.getpid() % 250}"
    one, two = (Host(f"tenfold-{mark}-{n}", f"tf{mark}{n}", f"10.213.7.{n}") for n in (1, 2))
    if reached:
        one = Host(one.name, one.link, one.address, f"{home}.2")
    made = []
    try:
        try:
            for host in (one, two):
                _ip("netns", "add", host.name)
                made.append(host)
            # Each end is made where it belongs: nothing of it is ever seen outside.
            pair = ("type", "veth", "peer", "name", two.link, "netns", two.name)
            _ip("-n", one.name, "link", "add", one.link, *pair)
            for host in (one, two):
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
                _ip("-n", host.name, "link", "set", "lo", "up")
                host.connect(True)
            if reached:
                here = f"tf{mark}h"
                _ip("link", "add", here, "type", "veth", "peer", "name", "home", "netns", one.name)
                _ip("address", "add", f"{home}.1/24", "dev", here)
                _ip("link", "set", here, "up")
                _ip("-n", one.name, "address", "add", f"{one.reached}/24", "dev", "home")
                _ip("-n", one.name, "link", "set", "home", "up")
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"network namespaces cannot be made here: {error.stderr.strip()}") from None
        yield one, two
    finally:
        # With a namespace goes its end of each link, and with that the other end.
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


@contextlib.contextmanager
def two_hosts_or_skip(reached: bool = False) -> Iterator[tuple[Host, Host]]:
    """`two_hosts` for a test, which is skipped where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(reached))
        except NoNamespaces as reason:
            pytest.skip(str(reason))
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
