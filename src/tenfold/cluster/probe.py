"""Whether a process answers: one that is stopped, or stands still, keeps its place and does nothing."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

EVERY_S = 2.0
TIMEOUT_S = 5.0


class Probe:
    """Asks a URL now and then, in a thread of its own, once it has answered for the first time. Any answer
    will do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._answered = False
        self.failures = 0
        """In a row, since it answered last."""
        threading.Thread(target=self._ask, name="probe", daemon=True).start()

    def close(self) -> None:
        """Asks no more."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                urllib.request.urlopen(self._url, timeout=TIMEOUT_S).close()
            except urllib.error.HTTPError:
                pass  # An answer.
            except OSError:
                self.failures += self._answered
                continue
            self._answered, self.failures = True, 0
