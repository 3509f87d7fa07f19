"""500 requests against a real `tenfold serve`; clients hang up at random, workers are killed and stopped.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --model model.gguf --requests 2000 --seed 7
    python benchmarks/chaos.py --workers 2 --requests 1000 --every 5
    python benchmarks/chaos.py --prefill 1 --decode 1 --requests 1000 --every 5

One worker is killed twice, and 50 of the answers are compared. Of several workers one is killed, stopped for
good, or stopped for some seconds, each ``--every`` seconds as long as there are requests, but never the last
that gets on; then no request may end with an error, and every answer is compared. A request that is refused
with ``retry-after`` is sent again, and counted.

Checked: every request whose client stayed ends in exactly one way, with a finish reason or one error; the
answers compared are what the same request gives when it is sent alone afterwards; at the end nothing runs,
nothing waits, every page is free, all workers are up, and one worker was started again as often as it was
killed. Prints JSON; the exit code is 1 when something is violated. Linux only: workers are found in /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from refusals import Refusals

from tenfold.bench.prompts import questions
from tenfold.bench.script import run_script
from tenfold.bench.server import Server
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.models.registry import build_graph
from tenfold.worker.build import kv_page_bytes

KILLS = 2
CONCURRENCY = 32
SAMPLE = 50
RUNNING = 16
"""Fewer at once than there are clients, so that requests wait."""
PAGES = 100
"""Enough for the prompts of so many requests, but not for their answers: some are put back."""
SETTLE_S = 15.0
PAUSE_S = 5.0
"""A worker that was stopped for this long has lost its requests, and its life not yet."""
SETTLE_MANY_S = 90.0
"""One that was stopped while it started is killed late."""
SILENCE_S = 600.0
"""For so long a client hears nothing and waits: a busy machine is no violation."""
PATH = "/v1/chat/completions"


class Violation(Exception):
    """An answer that breaks a promise."""


class Refused(Exception):
    """The request may be sent again after ``wait_s``."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"come again in {wait_s:g} s")
        self.wait_s = wait_s


def requests_of(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Bodies of so many requests, all different."""
    return [
        {
            "messages": messages,
            "seed": rng.randrange(2**31),
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "max_tokens": rng.randint(1, 128),
            "stream": rng.random() < 0.6,
        }
        for messages in questions(count, excerpt=150)
    ]


class Run:
    """All requests, how each ended, and the answers of those that were served."""

    def __init__(self, server: Server, requests: int, seed: int, workers: int, every_s: float) -> None:
        self._server = server
        self._workers = workers
        self._every_s = every_s
        self.faults: Counter[str] = Counter()
        self.spared = self.refusals = 0
        """Faults that would have hit the last worker that got on; requests that were sent again."""
        self._rng = random.Random(seed)
        self._bodies = requests_of(requests, self._rng)
        self.ends: Counter[str] = Counter()
        self.answers: dict[int, tuple[str, str]] = {}
        """Text and finish reason by request."""
        self.violations: list[str] = []
        self.killed_while_running: list[int] = []

    async def storm(self) -> None:
        """Sends everything, at most `CONCURRENCY` at once, and kills the worker on the way."""
        gate = asyncio.Semaphore(CONCURRENCY)
        async with _client(self._server) as http:
            killing = asyncio.create_task(self._kill() if self._workers == 1 else self._disturb())
            leaves = [self._rng.random() * 2 if self._rng.random() < 0.35 else None for _ in self._bodies]
            await asyncio.gather(*(self._one(http, gate, index, at) for index, at in enumerate(leaves)))
            killing.cancel()

    async def _one(
        self, http: httpx.AsyncClient, gate: asyncio.Semaphore, index: int, leaves_after: float | None
    ) -> None:
        async with gate:
            try:
                end = await asyncio.wait_for(self._send(http, index), leaves_after)
            except asyncio.TimeoutError:
                end = "left"
            except (httpx.HTTPError, Violation) as error:
                end = "violation"
                self.violations.append(f"request {index}: {type(error).__name__}: {error}")
            self.ends[end] += 1

    async def _send(self, http: httpx.AsyncClient, index: int) -> str:
        body, refusals = self._bodies[index], Refusals()
        while True:
            try:
                text, end = await (read_stream if body["stream"] else read_whole)(http, body, refusals)
                break
            except Refused as refused:
                self.refusals += 1
                await asyncio.sleep(refused.wait_s)
        if end.startswith("error"):
            if self._workers > 1:
                raise Violation(f"it ended with {end}")
            return end
        self.answers[index] = text, end
        return "served"

    async def _kill(self) -> None:
        """SIGKILL after a third and after two thirds of the requests, while the engine is at work."""
        for number in range(KILLS):
            while sum(self.ends.values()) < (number + 1) * len(self._bodies) // (KILLS + 1):
                await asyncio.sleep(0.02)
            while True:
                pid = self._server.worker_pid()
                running = (await asyncio.to_thread(self._server.metrics))["requests_running"]
                if pid is not None and running > 0:
                    break
                await asyncio.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            self.killed_while_running.append(int(running))

    async def _disturb(self) -> None:
        """Something befalls a worker, again and again, but one that is stopped already, and the last that
        gets on."""
        stopped: set[int] = set()
        while True:
            await asyncio.sleep(self._every_s)
            pids = set(self._server.worker_pids())
            # The server may not have noticed yet that one was stopped.
            if _up(await asyncio.to_thread(self._server.metrics)) - len(pids & stopped) < 2:
                self.spared += 1
                continue
            pid = self._rng.choice(sorted(pids - stopped))
            kind = self._rng.choice(("killed", "stopped", "paused"))
            self.faults[kind] += 1
            if kind == "killed":
                send_signal(pid, signal.SIGKILL)
                continue
            send_signal(pid, signal.SIGSTOP)
            stopped.add(pid)
            if kind == "paused":
                asyncio.get_running_loop().call_later(PAUSE_S, self._go_on, pid, stopped)

    @staticmethod
    def _go_on(pid: int, stopped: set[int]) -> None:
        send_signal(pid, signal.SIGCONT)
        stopped.discard(pid)

    async def repeat(self) -> int:
        """Sends served requests again, undisturbed, a sample or all; returns of how many."""
        sample = sorted(self.answers)
        if self._workers == 1:
            sample = self._rng.sample(sample, min(SAMPLE, len(sample)))
        gate = asyncio.Semaphore(1 if self._workers == 1 else CONCURRENCY)
        async with _client(self._server) as http:
            await asyncio.gather(*(self._again(http, gate, index) for index in sample))
        return len(sample)

    async def _again(self, http: httpx.AsyncClient, gate: asyncio.Semaphore, index: int) -> None:
        async with gate:
            again = await read_whole(http, {**self._bodies[index], "stream": False})
        if again != self.answers[index]:
            self.violations.append(f"request {index}: {self.answers[index]!r} in the storm, {again!r} after")

    def settle(self) -> dict[str, float]:
        """Waits until the server is at rest, and returns its metrics; what is left over is a violation."""
        settle_s = SETTLE_S if self._workers == 1 else SETTLE_MANY_S
        deadline = time.monotonic() + settle_s
        while True:
            metrics = self._server.metrics()
            left = {
                "requests_in_flight": metrics["requests_in_flight"],
                "requests_running": metrics["requests_running"],
                "requests_waiting": metrics["requests_waiting"],
                "kv_pages not free": metrics["kv_pages_total"] - metrics["kv_pages_free"],
                "workers not up": self._workers - _up(metrics),
            }
            # Between two workers there are no pages at all.
            if metrics["kv_pages_total"] and not any(left.values()):
                break
            if time.monotonic() > deadline:
                self.violations.append(f"{settle_s:g} s after the end there are {left}")
                break
            time.sleep(0.05)
        if self._workers > 1:
            if not 0 < metrics["worker_restarts_total"] <= self.faults.total():
                self.violations.append(
                    f"of {dict(self.faults)} came {metrics['worker_restarts_total']:g} restarts"
                )
        elif metrics["worker_restarts_total"] != KILLS or len(self.killed_while_running) != KILLS:
            self.violations.append(
                f"the worker was killed {len(self.killed_while_running)} times, "
                f"and started again {metrics['worker_restarts_total']:g} times"
            )
        return metrics


def _check_refused(response: httpx.Response, refusals: Refusals | None) -> None:
    """Raises Refused if the request may be sent again."""
    if refusals is not None:
        wait_s = refusals.wait_s(response.status_code, response.headers.get("retry-after"))
        if wait_s is not None:
            raise Refused(wait_s)


async def read_whole(
    http: httpx.AsyncClient, body: dict[str, Any], refusals: Refusals | None = None
) -> tuple[str, str]:
    """Text and end of an answer in one piece: its finish reason or ``error`` with the status. Raises
    Refused, if that is asked for."""
    response = await http.post(PATH, json=body)
    found = response.json()
    _check_refused(response, refusals)
    if response.status_code != 200:
        if set(found) != {"error"}:
            raise Violation(f"status {response.status_code} with {found}")
        return "", f"error {response.status_code}"
    (choice,) = found["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise Violation(f"finish reason {choice['finish_reason']}")
    # Of an answer without text the one front says "", the other null.
    return choice["message"]["content"] or "", choice["finish_reason"]


async def read_stream(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    refusals: Refusals | None = None,
    came: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """The same of a stream; ``came`` is called with each piece of text."""
    texts: list[str] = []
    ends: list[str] = []
    async with http.stream("POST", PATH, json=body) as response:
        _check_refused(response, refusals)
        if response.status_code != 200:
            await response.aread()
            if set(response.json()) != {"error"}:
                raise Violation(f"status {response.status_code} with {response.text[:200]}")
            return "", f"error {response.status_code}"
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                ends.append("done")
                continue
            if not line.startswith("data: {"):
                raise Violation(f"the stream has a line {line[:200]!r}")
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                ends.append(f"error event: {event['error']['message']}")
                continue
            for choice in event["choices"]:
                if ends:
                    raise Violation(f"text after {ends}")
                texts.append(choice["delta"].get("content") or "")
                if texts[-1]:
                    came()
                if choice["finish_reason"]:
                    ends.append(choice["finish_reason"])
    if len(ends) == 1 and ends[0].startswith("error"):
        return "".join(texts), ends[0]
    if ends not in (["stop", "done"], ["length", "done"]):
        raise Violation(f"the stream ended with {ends}")
    return "".join(texts), ends[0]


def small_memory(model: str) -> int:
    """KV memory of `PAGES` pages."""
    checkpoint = open_checkpoint(locate(model))
    try:
        return PAGES * kv_page_bytes(build_graph(checkpoint.config), "bf16")
    finally:
        checkpoint.close()


def send_signal(pid: int, number: int) -> None:
    """To a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _up(metrics: dict[str, float]) -> float:
    """Workers that get on."""
    return sum(value for name, value in metrics.items() if 'state="up"' in name)


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=SILENCE_S, trust_env=False)


def main() -> int:
    """Runs the storm and prints what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of requests and of when clients leave")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=0, help="with --decode, instead of --workers")
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between faults of several workers")
    options = parser.parse_args()
    if options.requests < 1 or options.workers < 1:
        parser.error("--requests and --workers: must be positive")
    roles: tuple[str, ...] = ("--workers", str(options.workers))
    if options.prefill:
        roles = ("--prefill", str(options.prefill), "--decode", str(options.decode))
        options.workers = options.prefill + options.decode
    memory = options.workers * small_memory(options.model)
    limits = ("--max-running", str(RUNNING), "--kv-memory", str(memory), *roles)
    with Server(options.model, *limits, "--max-queue", str(options.requests)) as server:
        run = Run(server, options.requests, options.seed, options.workers, options.every)
        began = time.perf_counter()
        asyncio.run(run.storm())
        storm_s = time.perf_counter() - began
        if options.workers > 1:
            run.settle()
        compared = asyncio.run(run.repeat())
        metrics = run.settle()
    if sum(run.ends.values()) != options.requests:
        run.violations.append(f"{sum(run.ends.values())} requests ended")
    report = {
        "model": options.model,
        "requests": options.requests,
        "seed": options.seed,
        "storm_s": round(storm_s, 1),
        "ends": dict(run.ends),
        "workers": options.workers,
        "running_when_killed": run.killed_while_running,
        "faults": dict(run.faults),
        "spared": run.spared,
        "refused_and_sent_again": run.refusals,
        "moved": metrics.get("router_moved_total", 0),
        "split": metrics.get("router_split_total", 0),
        "compared_with_undisturbed": compared,
        "preemptions": metrics["preemptions_total"],
        "worker_restarts": metrics["worker_restarts_total"],
        "kv_pages_free": metrics["kv_pages_free"],
        "kv_pages_total": metrics["kv_pages_total"],
        "violations": run.violations,
    }
    print(json.dumps(report, indent=2))
    return int(bool(run.violations))


if __name__ == "__main__":
    run_script(main)
