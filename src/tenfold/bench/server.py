"""A real `tenfold serve` in a process of its own, on a free loopback port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from types import TracebackType
from typing import Any

from tenfold.bench.peers import PeerError, family

# Not `-m`: that would put the working directory first among the places where modules are looked for.
_BOOT = "import sys; sys.path[:] = {path!r}; from tenfold.cli import main; main()"
_LABEL = re.compile(r'\w+="(?:[^"\\]|\\.)*"')


class Server:
    """Starts serving ``model`` and waits until it is ready. Owns the process: use ``with``, or `stop`.

    ``options`` are those of the command line. Raises PeerError, with the server's last words.
    """

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-c", _BOOT.format(path=sys.path)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "serve", model, "--port", "0", "--json", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                self._process.wait(10)
                raise PeerError(f"tenfold serve ended at once: {self._last_words()}")
            self.plan: dict[str, Any] = json.loads(line)
            self.url: str = self.plan["url"]
            self.get("/ready")
            self.ready_s = time.perf_counter() - began
            """From the start of the process to a good answer of /ready."""
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def get(self, path: str) -> str:
        """The body at ``path``. Raises OSError when the answer is not 200."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            body: bytes = response.read()
        return body.decode()

    def metrics(self) -> dict[str, float]:
        """All of /metrics, by name with labels, without the prefix ``tenfold_`` and the label of the one
        model."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if line[:1] != "#")
        return {_without_model(name): float(value) for name, _, value in lines}

    def worker_pid(self) -> int | None:
        """The process with the engine; None between two. Linux only."""
        return next(iter(self.worker_pids()), None)

    def worker_pids(self) -> list[int]:
        """The processes with engines. Linux only."""
        return [pid for pid in family(self.pid) if pid != self.pid]

    def stop(self) -> None:
        """Ends it, kindly at first; harmless when it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-500:].strip()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _without_model(series: str) -> str:
    name, _, rest = series.removeprefix("tenfold_").partition("{")
    labels = [label for label in _LABEL.findall(rest) if not label.startswith("model=")]
    return f"{name}{{{','.join(labels)}}}" if labels else name
