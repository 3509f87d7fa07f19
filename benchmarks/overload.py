"""Overload: four times the clients that a server has room for, beside just as many as it has.

Run in the repository's root: ``python benchmarks/overload.py``. At capacity as many clients as ``--running``
send one request after another; under overload so many times more (``--factor``) do, and one that is refused
comes again a little later, whatever the server says. Bars: the 99th percentile of the latencies of requests
that were taken is at most 1.5 times that at capacity; a refusal (429) takes at most 50 ms. The engine is one
without a model whose step takes 10 ms, so that what is measured is what the server does with its queue;
``--model`` serves a real one, and then it should be alone on its machine, the clients included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import running_server
from tests.helpers.soak import real_server

P99_BAR = 1.5
REFUSAL_BAR_MS = 50.0


class Load:
    """Clients of one server: latencies of what was taken, in seconds, and how long refusals took."""

    def __init__(self, url: str, tokens: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._tokens = tokens
        self._stop = False
        self._counting = False
        self.taken: list[float] = []
        self.refused: list[float] = []
        self.wrong: list[str] = []

    async def run(self, clients: int, warm_s: float, seconds: float) -> None:
        """Counts what is sent after ``warm_s``."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]
        await asyncio.sleep(warm_s)
        self._counting = True
        await asyncio.sleep(seconds)
        self._stop = True
        await asyncio.gather(*tasks)
        await self._http.aclose()

    async def _client(self, number: int) -> None:
        dice = random.Random(number)
        while not self._stop:
            counted = self._counting
            # Lengths vary, as they do: nobody ends together with all others.
            length = dice.randint(self._tokens // 2, self._tokens * 3 // 2)
            body = {"prompt": f"{number} {dice.random()}", "max_tokens": length, "ignore_eos": True}
            began = time.perf_counter()
            response = await self._http.post("/v1/completions", json=body)
            took = time.perf_counter() - began
            if response.status_code == 200 and counted:
                self.taken.append(took)
            elif response.status_code == 429:
                if counted:
                    self.refused.append(took)
                if "retry-after" not in response.headers:
                    self.wrong.append("a refusal without retry-after")
                await asyncio.sleep(dice.uniform(0.5, 1.0) * self._tokens * 0.01)
            elif response.status_code != 200:
                self.wrong.append(f"{response.status_code}: {response.text[:100]}")


def percentile(values: list[float], share: float) -> float:
    """The value that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def measure(url: str, clients: int, options: argparse.Namespace) -> Load:
    """One load on one server."""

    async def run() -> Load:
        load = Load(url, options.tokens)
        await load.run(clients, options.warm_s, options.seconds)
        return load

    return asyncio.run(run())


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[str]:
    """The server to be measured; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if options.model is not None:
            limits = ("--max-running", str(options.running))
            with real_server(log, options.model, *limits) as process:
                yield process.url
            return
        fake = FakeConfig(delay_s=0.01, max_context=1 << 20)
        with running_server(log, fake, max_running=options.running) as server:
            yield server.url


def main() -> int:
    """Prints the figures; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: an engine without one")
    parser.add_argument("--running", type=int, default=16, help="requests that the server computes at once")
    parser.add_argument("--factor", type=int, default=4, help="so many times more clients")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, on average")
    parser.add_argument("--warm-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server_of(options) as url:
        calm = measure(url, options.running, options)
        storm = measure(url, options.running * options.factor, options)
    ratio = percentile(storm.taken, 0.99) / percentile(calm.taken, 0.99)
    refusal_ms = percentile(storm.refused, 0.99) * 1e3
    found = {
        "at_capacity": {"taken": len(calm.taken), "p50_s": percentile(calm.taken, 0.5)},
        "overload": {"taken": len(storm.taken), "p50_s": percentile(storm.taken, 0.5)},
        "p99_s": [percentile(calm.taken, 0.99), percentile(storm.taken, 0.99)],
        "p99_ratio": ratio,
        "refused": len(storm.refused),
        "refusal_p50_ms": percentile(storm.refused, 0.5) * 1e3,
        "refusal_p99_ms": refusal_ms,
        "wrong": calm.wrong + storm.wrong,
    }
    if options.json:
        print(json.dumps(found))
    else:
        print("| load | taken | refused | p50, s | p99, s |\n|---|---|---|---|---|")
        for name, load in (("at capacity", calm), (f"{options.factor} times that", storm)):
            p50, p99 = percentile(load.taken, 0.5), percentile(load.taken, 0.99)
            print(f"| {name} | {len(load.taken)} | {len(load.refused)} | {p50:.3f} | {p99:.3f} |")
        print(f"\np99 over that at capacity: {ratio:.2f} (bar {P99_BAR}); a refusal takes ", end="")
        print(f"{found['refusal_p50_ms']:.1f} ms, p99 {refusal_ms:.1f} (bar {REFUSAL_BAR_MS:.0f})")
        for problem in sorted(set(calm.wrong + storm.wrong)):
            print(problem)
    good = ratio <= P99_BAR and refusal_ms <= REFUSAL_BAR_MS and not found["wrong"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
