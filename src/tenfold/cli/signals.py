"""What signals do to a command that serves, until what serves has its own handlers."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ends_quietly(*ignored: signal.Signals) -> Iterator[None]:
    """SIGINT and SIGTERM end the process with exit code 0 (there is nothing to be finished yet), those
    ``ignored`` do nothing. For the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        sys.exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        yield
    except Exception:  # a module that is interrupted while it is imported may raise whatever it likes
        if not came:
            raise
        sys.exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
