"""Spawning a worker: a fresh interpreter at the other end of a socket pair."""

from __future__ import annotations

import os
import socket
import subprocess

from tenfold.interpreter import python_command

_BOOT = """from tenfold.worker.main import main
sys.exit(main({fd}, {parent}, {builder!r}))"""

ENGINE_BUILDER = "tenfold.worker.build:build_engine"


def spawn_worker(builder: str = ENGINE_BUILDER) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a worker; returns the process and this side's socket, both the caller's to close.

    The worker is in a session of its own, so Ctrl-C in the terminal reaches the front alone. It ends when the
    socket closes, and on Linux when the calling thread ends.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            python_command(_BOOT.format(fd=theirs.fileno(), parent=os.getpid(), builder=builder)),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, ours
