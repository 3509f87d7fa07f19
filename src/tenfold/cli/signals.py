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
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    sys.exit(0)
