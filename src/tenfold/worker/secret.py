"""What a worker and a front on two machines must both have been given: an address and a secret."""

from __future__ import annotations

import os
import stat

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import open_regular
from tenfold.config import OptionError

LEAST_CHARACTERS = 32
"""Whoever hears two machines greet each other can try secrets against what he heard: none that can be
guessed."""


def load_secret(path: str) -> bytes:
    """The secret in a file, without the white space around it. Raises OptionError for a file that cannot be
    read, or that others may read or change, or a secret that is too short."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            secret = file.read(1 << 16).strip()
    except (CheckpointError, OSError) as error:
        raise OptionError(f"secret_file {error}", "secret_file") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"secret_file: {path} is open to others than its owner; chmod 600 {path}", "secret_file"
        )
    if len(secret) < LEAST_CHARACTERS:
        raise OptionError(
            f"secret_file: the secret in {path} has {len(secret)} characters; it must have "
            f"{LEAST_CHARACTERS} or more. A good one: openssl rand -hex 32 > {path}",
            "secret_file",
        )
    return secret


def parse_address(text: str, field: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[IPv6]:PORT``. Raises OptionError naming the field."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise OptionError(f"{field} is {text!r}; write it like 10.0.0.1:7001 or [fd00::1]:7001", field)
    return host, int(port)
