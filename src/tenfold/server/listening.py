"""Sockets that are bound before anything else is done."""

from __future__ import annotations

import errno
import socket


def bind(
    host: str, port: int, option: str = "--host or --port", free: str = " (0: any free one)"
) -> socket.socket:
    """A bound socket; the port is taken before anything is loaded. Raises OSError that says what to do; the
    ``option`` says where it was asked for, and ``free`` how to ask for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        # With one argument OSError is its message: no [Errno ...] in front of it.
        if error.errno == errno.EADDRINUSE:
            which = option.rpartition(" ")[2]
            raise OSError(f"port {port} of {host} is in use; choose another with {which}{free}") from None
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}:{port}: {reason}; choose another {option}") from None
    return sock
