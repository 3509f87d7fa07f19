"""SIGKILL of a worker under load: how soon it is told, how soon it is over, and how the streams end."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.helpers.server_process import ServerProcess, wait_for


@dataclass
class KillReport:
    """What was seen. Seconds are after the kill; None: it did not come."""

    red_s: float | None = None
    """Until ``/ready`` said no, ..."""
    green_s: float | None = None
    """... and until it said yes again."""
    ends: Counter[str] = field(default_factory=Counter)
    """How streams ended: ``done``, ``error``, or ``cut``: without a terminal event."""


def kill_under_load(server: ServerProcess, streams: int, tokens: int, prompt: str = "abc") -> KillReport:
    """Kills the worker of a server that has one while ``streams`` stream, and follows all to their ends."""
    report = KillReport()
    threads = [
        threading.Thread(target=_stream, args=(server.url, report, n, tokens, prompt)) for n in range(streams)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("tenfold_generated_tokens_total") >= 5 * streams, 60)
    server.kill_worker()
    killed = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=10) as http:
        while report.green_s is None and time.monotonic() < killed + 30:
            ready = http.get("/ready").status_code == 200
            now = time.monotonic() - killed
            if not ready and report.red_s is None:
                report.red_s = now
            elif ready and report.red_s is not None:
                report.green_s = now
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    return report


def _stream(url: str, report: KillReport, seed: int, tokens: int, prompt: str) -> None:
    body = {
        "prompt": f"{seed} {prompt}",
        "seed": seed,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    ends: list[str] = []
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300
        ) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    ends.append("done")
                elif line and "error" in json.loads(line.removeprefix("data: ")):
                    ends.append("error")
    except httpx.HTTPError:
        ends = []
    report.ends[ends[0] if len(ends) == 1 else "cut"] += 1
