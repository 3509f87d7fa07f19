"""Many streams at once, a third of which hang up: what must hold while and after they do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.server_process import ServerProcess, wait_for

DIFFERENT = 32
"""Requests that the clients choose from."""
LEAVING = 1 / 3
"""Share of the requests whose client hangs up."""
WORDS = ("sea", "wind", "stone", "river", "light", "night", "house", "road", "bird", "rain", "fire", "moon")


@contextmanager
def real_server(log: Path, model: str, *options: str) -> Iterator[ServerProcess]:
    """`tenfold serve`, as a user starts it; at exit it must still stop cleanly."""
    code = "from tenfold.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", model, "--port", "0", "--json", *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            server = ServerProcess(process, json.loads(line)["url"], log)
            yield server
            assert server.stop() == 0
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()


@dataclass
class Report:
    """What a soak saw."""

    ends: Counter[str] = field(default_factory=Counter)
    """whole, left, or refused."""
    tokens: int = 0
    resident_bytes: list[tuple[float, int]] = field(default_factory=list)
    """Of front and worker together, by seconds since the beginning."""

    def growth(self, warm_up_s: float) -> float:
        """How much the memory grew after the warm-up, as a share: the median of the last quarter against the
        one of the first quarter of what comes after it."""
        after = [size for at, size in self.resident_bytes if at >= warm_up_s]
        quarter = max(1, len(after) // 4)
        early, late = sorted(after[:quarter]), sorted(after[-quarter:])
        return late[len(late) // 2] / early[len(early) // 2] - 1


def bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Different requests: prompts that share beginnings, sampled and greedy, with and without a stop."""
    made = []
    for index in range(count):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 60)))
        body = {
            "prompt": f"Notes of the keeper, volume {index % 3}. {words}",
            "seed": index,
            "temperature": rng.choice([0, 0.7, 1.0]),
            "max_tokens": rng.randint(4, 32),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if index % 4 == 0:
            body["stop"] = [rng.choice(WORDS), ". The"]
        if index % 5 == 0:
            body["repetition_penalty"] = 1.1
        made.append(body)
    return made


async def read(
    http: httpx.AsyncClient, body: dict[str, Any], most: int | None = None
) -> tuple[str, Any, bool]:
    """The text, the usage and finish reason, and whether the stream had its end; hangs up after ``most``
    events."""
    text, done, count = "", False, 0
    end: dict[str, Any] = {}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return f"status {response.status_code}: {response.text}", None, False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    end |= {"finish": choice["finish_reason"]} if choice["finish_reason"] else {}
                if event.get("usage"):
                    end |= {"tokens": event["usage"]["completion_tokens"]}
                count += 1
                if count == most:
                    return text, None, False
    return text, end, done


async def soak(server: ServerProcess, streams: int, seconds: float, rng: random.Random) -> Report:
    """Runs ``streams`` clients for so long. Raises AssertionError for any text that is not that of the same
    request run alone, and if anything is left of a request at the end."""
    limits = httpx.Limits(max_connections=streams + 4, max_keepalive_connections=streams)
    report = Report()
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300) as http:
        alone = []
        for body in bodies(rng, DIFFERENT):
            text, end, done = await read(http, body)
            assert done, text
            alone.append((body, text, end))
        began = time.monotonic()

        async def client(number: int) -> None:
            mine = random.Random(f"{rng.random()}/{number}")
            while time.monotonic() - began < seconds:
                body, text, end = mine.choice(alone)
                leaves = mine.random() < LEAVING
                got, ended, done = await read(http, body, mine.randint(1, 12) if leaves else None)
                if got.startswith("status "):
                    raise AssertionError(got)
                if done:
                    assert (got, ended) == (text, end), f"not the text of the request alone: {body}"
                    report.tokens += end["tokens"]
                else:
                    assert text.startswith(got), f"not a beginning of the text of the request alone: {body}"
                report.ends["whole" if done else "left"] += 1

        async def watch() -> None:
            while True:
                report.resident_bytes.append((time.monotonic() - began, resident(server)))
                await asyncio.sleep(min(1.0, seconds / 50))

        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(client(number) for number in range(streams)))
        finally:
            watching.cancel()
        wait_for(lambda: nothing_left(server), 30)
        for body, text, end in alone[:4]:
            assert await read(http, body) == (text, end, True)
    return report


def nothing_left(server: ServerProcess) -> bool:
    """No request in front or worker, and no page that one of them needs."""
    stats = httpx.get(f"{server.url}/stats").json()
    busy = [stats["requests_in_flight"], stats["requests_running"], stats["requests_waiting"]]
    return not any(busy) and all(worker["kv_used_bytes"] == 0 for worker in stats["workers"])


def resident(server: ServerProcess) -> int:
    """Bytes of memory that front and worker hold together."""
    pids = [server.process.pid, server.worker_pid()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids if pid is not None]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")
