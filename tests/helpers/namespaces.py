"""Two hosts on one machine: network namespaces that are joined by a veth pair.

Each has a loopback and one address of its own, and reaches the other and nothing else. Their processes share
all but the network: files, process ids, memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One end of the pair."""

    name: str
    """Of the namespace."""
    link: str
    """Its network device."""
    address: str

    def command(self, *command: str) -> list[str]:
        """What runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def connect(self, up: bool) -> None:
        """Joins it to the other host, or cuts it off."""
        _ip("-n", self.name, "link", "set", self.link, "up" if up else "down")


class NoNamespaces(Exception):
    """They cannot be made here; the message says why."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, which are gone afterwards; end their processes before. Raises NoNamespaces."""
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need ip (Debian: iproute2)")
    mark = secrets.token_hex(3)
    hosts = [Host(f"tenfold-{mark}-{n}", f"tf{mark}{n}", f"10.213.7.{n}") for n in (1, 2)]
    made = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host)
            one, two = hosts
            # Each end is made where it belongs: nothing of it is ever seen outside.
            pair = ("type", "veth", "peer", "name", two.link, "netns", two.name)
            _ip("-n", one.name, "link", "add", one.link, *pair)
            for host in hosts:
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
                _ip("-n", host.name, "link", "set", "lo", "up")
                host.connect(True)
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"network namespaces cannot be made here: {error.stderr.strip()}") from None
        yield one, two
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
