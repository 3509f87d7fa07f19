"""Requests through Dynamo's front to the workers of a `tenfold cluster up`, which are killed or stand still.

    python benchmarks/chaos_cluster.py
    python benchmarks/chaos_cluster.py --requests 150 --every 5 --seed 7
    python benchmarks/chaos_cluster.py --prefill 1 --decode 1

Each ``--every`` seconds, as long as there are requests, one of these befalls a worker that is well: it is
killed, or its engine is; it is stopped for good, or its engine is; or it is stopped for five seconds.
Dynamo's front cannot keep a request that nobody is there to answer, so the last worker that answers is left
alone until there is another (with ``--spare-nobody`` it is not). A prefill worker is never spared.

Checked: no request is lost; each ends with one finish reason; each has the text that it has when it is sent
again afterwards, undisturbed; no stream pauses for longer than 5 s; all workers come back. Printed: what
befell whom, and how long streams paused. The exit code is 1 when something is violated. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from chaos import Violation, read_stream, read_whole, requests_of, send_signal

from tenfold.bench.cluster import ClusterServer, children
from tenfold.bench.figures import table
from tenfold.bench.script import run_script
from tenfold.cluster.runtime import SYSTEM_PORT

CONCURRENCY = 12
PAUSE_S = 5.0
"""A worker that was stopped for so long has lost its streams, and its life not yet."""
MOST_PAUSE_S = 5.0
SETTLE_S = 120.0
FAULTS = ("worker killed", "engine killed", "worker stopped", "engine stopped", "worker paused")
ROLES = ("mixed", "prefill", "decode")


class Storm:
    """All requests, what befell the workers meanwhile, and what came of it."""

    def __init__(self, cluster: ClusterServer, bodies: list[dict[str, Any]], seed: int) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._rng = random.Random(seed)
        self._hurt: set[int] = set()
        """Process ids of workers that are to be killed by others: stopped, or without an engine."""
        self._answering: set[int] = set()
        """Those that took requests when it was looked last: by now the front knows them."""
        self.faults: Counter[str] = Counter()
        self.spared = 0
        self.answers: dict[int, tuple[str, str]] = {}
        self.first_s: list[float] = []
        self.pauses_s: list[float] = []
        """Of each stream: until its first text, and the longest pause after that."""
        self.violations: list[str] = []

    async def run(self, every_s: float, spare: bool) -> None:
        """Sends everything, at most `CONCURRENCY` at once, with faults meanwhile."""
        gate = asyncio.Semaphore(CONCURRENCY)
        async with self._client() as http:
            disturbing = asyncio.create_task(self._disturb(every_s, spare))
            await asyncio.gather(*(self._one(http, gate, index) for index in range(len(self._bodies))))
            disturbing.cancel()

    async def again(self) -> None:
        """Sends what was answered again, undisturbed."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(http: httpx.AsyncClient, index: int) -> None:
            async with gate:
                try:
                    answer = await read_whole(http, {**self._bodies[index], "stream": False})
                except (httpx.HTTPError, Violation) as error:
                    answer = "", f"{type(error).__name__}: {error}"
            if answer != self.answers[index]:
                self.violations.append(
                    f"request {index}: {self.answers[index]!r} in the storm, {answer!r} after"
                )

        async with self._client() as http:
            await asyncio.gather(*(one(http, index) for index in sorted(self.answers)))

    def settle(self, workers: int) -> None:
        """Waits until all workers are there again."""
        deadline = time.monotonic() + SETTLE_S
        while (there := self._cluster.workers()) != workers or self._hurt & set(self._cluster.pids("worker")):
            if time.monotonic() > deadline:
                self.violations.append(f"{SETTLE_S:g} s after the end the front knows {there} workers")
                return
            time.sleep(0.2)

    async def _one(self, http: httpx.AsyncClient, gate: asyncio.Semaphore, index: int) -> None:
        body = self._bodies[index]
        times: list[float] = []
        async with gate:
            times.append(time.monotonic())
            try:
                if body["stream"]:
                    answer = await read_stream(http, body, came=lambda: times.append(time.monotonic()))
                else:
                    answer = await read_whole(http, body)
                if answer[1].startswith("error"):
                    raise Violation(f"it ended with {answer[1]}")
            except (httpx.HTTPError, Violation) as error:
                self.violations.append(f"request {index}: {type(error).__name__}: {error}")
                return
        self.answers[index] = answer
        waits = [after - before for before, after in itertools.pairwise(times)]
        if waits:
            self.first_s.append(waits[0])
            self.pauses_s.append(max(waits[1:], default=0.0))

    async def _disturb(self, every_s: float, spare: bool) -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self._fault, spare)

    def _fault(self, spare: bool) -> None:
        roles = {pid: role for role in ROLES for pid in self._cluster.pids("worker", role)}
        well = {pid: role for pid, role in roles.items() if pid not in self._hurt and children(pid)}
        if not well:
            return
        victim = self._rng.choice(sorted(well))
        answering = {pid for pid, role in well.items() if role != "prefill" and is_ready(pid)}
        known, self._answering = answering & self._answering, answering
        if spare and well[victim] != "prefill" and not known - {victim}:
            self.spared += 1
            return
        what = self._rng.choice(FAULTS)
        self.faults[what] += 1
        print(f"{time.strftime('%H:%M:%S')} {well[victim]} worker {victim}: {what}", file=sys.stderr)
        pid = children(victim)[0] if what.startswith("engine") else victim
        if what == "worker paused":
            send_signal(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            send_signal(pid, signal.SIGCONT)
            return
        self._hurt.add(victim)
        send_signal(pid, signal.SIGKILL if what.endswith("killed") else signal.SIGSTOP)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._cluster.url, timeout=300, trust_env=False)


def is_ready(worker: int) -> bool:
    """Whether a worker takes requests, by its own word."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{worker}/environ").read_text().split("\0")
        found = dict(variable.partition("=")[::2] for variable in variables)
        with urllib.request.urlopen(f"http://127.0.0.1:{found.get(SYSTEM_PORT)}/health", timeout=2):
            return True
    return False


def main() -> int:
    """Runs the storm and prints what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=0, help="with --decode, instead of --workers")
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between faults")
    parser.add_argument("--spare-nobody", action="store_true", help="not even the last that answers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.requests < 1 or args.workers < 1 or bool(args.prefill) != bool(args.decode):
        parser.error("--requests and --workers must be positive; --prefill and --decode belong together")
    roles: tuple[str, ...] = ("--workers", str(args.workers))
    if args.prefill:
        roles = ("--prefill", str(args.prefill), "--decode", str(args.decode))
    workers = args.prefill + args.decode if args.prefill else args.workers
    bodies = [{"model": "model", **body} for body in requests_of(args.requests, random.Random(args.seed))]
    with ClusterServer(args.model, "--name", "model", "--threads", "1", *roles) as cluster:
        storm = Storm(cluster, bodies, args.seed)
        began = time.monotonic()
        asyncio.run(storm.run(args.every, not args.spare_nobody))
        storm_s = time.monotonic() - began
        storm.settle(workers)
        lost = args.requests - len(storm.answers)
        before = len(storm.violations)
        asyncio.run(storm.again())
    different = len(storm.violations) - before
    late = sum(pause > MOST_PAUSE_S for pause in storm.pauses_s)
    if late:
        storm.violations.append(f"{late} streams paused for more than {MOST_PAUSE_S:g} s")
    report = {
        "requests": args.requests,
        "streams": len(storm.pauses_s),
        "workers": " ".join(roles).replace("--", ""),
        "storm_s": round(storm_s, 1),
        "faults": dict(storm.faults),
        "spared": storm.spared,
        "lost": lost,
        "different": different,
        "longest_pause_s": round(max(storm.pauses_s, default=0.0), 2),
        "streams_with_pauses_over_1_s": sum(pause > 1 for pause in storm.pauses_s),
        "streams_with_pauses_over_5_s": late,
        "longest_wait_for_first_text_s": round(max(storm.first_s, default=0.0), 2),
    }
    if args.json:
        print(json.dumps({**report, "violations": storm.violations}))
    else:
        print(table(["", ""], [[name.replace("_", " "), str(value)] for name, value in report.items()]))
        print(*storm.violations, sep="\n")
    return int(bool(storm.violations))


if __name__ == "__main__":
    run_script(main)
