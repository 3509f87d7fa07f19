"""Addresses and ports of this machine."""

from __future__ import annotations

import errno
import random
import socket


def free_or(address: str, wanted: list[int]) -> list[int]:
    """These ports, so that firewalls can name them; others where one of them is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in wanted:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            # As a server that was here a minute ago and comes again.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return free_ports(address, len(wanted))
    return wanted


def free_ports(address: str, count: int) -> list[int]:
    """So many ports that are free now, none of those that the system hands out by itself (and none above
    32,767: Dynamo keeps one of them in 16 bits with a sign). Raises OSError for an address that is not this
    machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    free: list[int] = []
    for port in random.sample(range(20_000, 32_768), 200):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise OSError(errno.EADDRINUSE, f"no free ports at {address}")


def bracketed(address: str) -> str:
    """As it stands before a port."""
    return f"[{address}]" if ":" in address else address
