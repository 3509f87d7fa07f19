"""Whether a process answers: one that is stopped, or stands still, keeps its place and does nothing. And
whether a front knows its workers."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

EVERY_S = 2.0
TIMEOUT_S = 5.0
START_S = 60.0
"""By then a process has answered for the first time: it does so before it loads a model."""


class Probe:
    """Asks a URL now and then, in a thread of its own. Any answer is a sign of life; until the first one
    there is patience."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._patient_until = time.monotonic() + START_S
        self.failures = 0
        """In a row, since it answered last."""
        self.up = False
        """Whether it has ever answered that it is well (2xx)."""
        threading.Thread(target=self._ask, name="probe", daemon=True).start()

    def close(self) -> None:
        """Asks no more."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                urllib.request.urlopen(self._url, timeout=TIMEOUT_S).close()
                self.up = True
            except urllib.error.HTTPError:
                pass  # An answer.
            except OSError:
                self.failures += time.monotonic() > self._patient_until
                continue
            self._patient_until, self.failures = 0.0, 0


def known_workers(url: str) -> int:
    """How many workers the front at ``url`` knows, prefill workers too; 0: it does not answer, or serves
    nothing yet."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S) as answer:
            instances = json.load(answer).get("instances", [])
        with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as answer:
            served = json.load(answer)["data"]
    except (OSError, ValueError):
        return 0
    return sum(each.get("endpoint") == "generate" for each in instances) if served else 0
