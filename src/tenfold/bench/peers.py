"""A measuring process at the other end of a pipe: one JSON object a line each way, one answer for each order.

Sides of a comparison stay loaded in processes of their own and compute in turns; `idle_cpu_share` shows that
the one whose turn it is not really rests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SETTLE_S = 0.3
"""Between two turns: longer than threads of the usual runtimes spin before they sleep; Intel's OpenMP takes
0.2 s."""


class PeerError(RuntimeError):
    """A measuring process failed; the message has its last words."""


class Peer:
    """The process of ``command``. Owns it: use ``with``, or `close`."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for whoever gives the orders
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: str, **fields: Any) -> Any:
        """Sends one order and waits for its answer. Raises PeerError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"order": order, **fields}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended with code {self._process.wait(10)} instead of an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        """Ends the process; harmless when it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def answer_orders(orders: dict[str, Callable[..., Any]]) -> None:
    """The other end: answers orders from standard input until that ends. An expected error is an answer."""
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = {"answer": orders[fields.pop("order")](**fields)}
        except (ValueError, OSError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def family(pid: int) -> list[int]:
    """A process and all that it started, by /proc; empty where there is none."""
    pids = []
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:  # it has ended
            continue
        pids.append(pid)
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes have used so far; those that have ended count nothing."""
    total = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Turns:
    """Lets one side work at a time, and watches that the others rest meanwhile.

    ``pids`` has the root process of each side. A process that rests uses no CPU but for a tick now and then.
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.idle_cpu_share = dict.fromkeys(pids, 0.0)
        """Of one core, over all turns of others so far."""
        self._idle_cpu_s = dict.fromkeys(pids, 0.0)
        self._idle_s = dict.fromkeys(pids, 0.0)

    def turn(self, side: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, which only ``side`` does."""
        time.sleep(SETTLE_S)
        others = {name: family(pid) for name, pid in self._pids.items() if name != side}
        before = {name: cpu_seconds(pids) for name, pids in others.items()}
        began = time.perf_counter()
        result = work()
        spent = time.perf_counter() - began
        for name, pids in others.items():
            self._idle_cpu_s[name] += cpu_seconds(pids) - before[name]
            self._idle_s[name] += spent
            self.idle_cpu_share[name] = self._idle_cpu_s[name] / self._idle_s[name]
        return result

    def check(self, most: float = 0.02) -> None:
        """Raises PeerError when a side has used more than ``most`` of a core while another had its turn."""
        for name, share in self.idle_cpu_share.items():
            if share > most:
                raise PeerError(
                    f"{name} used {share:.0%} of a core while it was not its turn: not a fair run"
                )
