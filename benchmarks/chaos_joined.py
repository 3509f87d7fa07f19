"""Requests against a `tenfold serve` without workers of its own, while those that joined it come and go.

    python benchmarks/chaos_joined.py
    python benchmarks/chaos_joined.py --workers 3 --requests 1000 --every 5
    python benchmarks/chaos_joined.py --all-at-once --every 30

Every ``--every`` seconds, as long as there are requests, one worker is killed (another takes its place),
asked to end (likewise), or stopped for a moment or for longer than it may be. The last one that gets on is
spared, or with ``--all-at-once`` it happens to all of them together; then requests wait for one to come back.
Checked: every request is answered with the text that it has when it is sent alone afterwards, with a finish
reason; at the end nothing runs or waits, and all workers are up. A request that is refused with
``retry-after`` is sent again, and counted. Prints JSON; the exit code is 1 when something is violated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from refusals import Refusals

from tenfold.bench.prompts import questions
from tenfold.bench.script import run_script
from tenfold.bench.server import Server

CONCURRENCY = 12
FAULTS = ("kill", "kill", "end", "stop")
PAUSES_S = (0.5, 5.0, 14.0)
SETTLE_S = 60.0


class Workers:
    """`tenfold worker` processes, each with a name; one that ends is started again."""

    def __init__(self, model: str, where: str, secret: Path, count: int, rng: random.Random) -> None:
        self._command = [
            *(sys.executable, "-c", "from tenfold.cli import main; main()", "worker", model),
            *("--join", where, "--secret-file", str(secret), "--threads", "1", "--kv-memory", "64MiB"),
        ]
        self._rng = rng
        self._done = threading.Event()
        self.faults: Counter[str] = Counter()
        """Also ``spared``: when too few workers got on."""
        self._running = {f"far{number}": self._start(f"far{number}") for number in range(count)}

    @property
    def names(self) -> list[str]:
        return list(self._running)

    def disturb(self, server: Server, every_s: float, all_at_once: bool) -> None:
        """Until `stop`; to be run in a thread."""
        while not self._done.wait(every_s):
            up = [name for name, state in states(server).items() if state == "up" and name in self._running]
            what = self._rng.choice(FAULTS)
            if all_at_once and up:
                hit = self.names
            elif not all_at_once and len(up) > 1:
                hit = [self._rng.choice(up)]
            else:
                what, hit = "spared", []
            self.faults[what] += 1
            processes = [self._running[name] for name in hit]
            if what == "stop":
                for process in processes:
                    os.kill(process.pid, signal.SIGSTOP)
                self._done.wait(self._rng.choice(PAUSES_S))
                for process in processes:
                    os.kill(process.pid, signal.SIGCONT)
                continue
            for process in processes:
                process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            for name, process in zip(hit, processes, strict=True):
                process.wait()
                self._running[name] = self._start(name)

    def stop(self) -> None:
        self._done.set()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._command, "--name", name], stderr=subprocess.DEVNULL)


class Client:
    """Asks a server; `refusals` counts how often it was told to come again."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._lock = threading.Lock()
        self.refusals = 0

    def ask(self, body: dict[str, Any]) -> tuple[str, str]:
        """Text and finish reason. Raises OSError for anything but 200 and refusals."""
        data, refusals = json.dumps(body).encode(), Refusals()
        while True:
            request = urllib.request.Request(self._url, data, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=600) as response:
                    choice = json.load(response)["choices"][0]
                return choice["message"]["content"], choice["finish_reason"]
            except urllib.error.HTTPError as error:
                if (wait_s := refusals.wait_s(error.code, error.headers["retry-after"])) is None:
                    raise
            with self._lock:
                self.refusals += 1
            time.sleep(wait_s)


def states(server: Server) -> dict[str, str]:
    """Of all workers, by name."""
    found: dict[str, str] = json.loads(server.get("/health"))["workers"]
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report; ``violations`` is empty if all promises were kept."""
    model: str = args.model
    rng = random.Random(args.seed)
    bodies = [
        {
            "messages": messages,
            "seed": n,
            "temperature": rng.choice((0.0, 0.8)),
            "max_tokens": rng.randint(1, 96),
        }
        for n, messages in enumerate(questions(args.requests, excerpt=150))
    ]
    violations: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        workers = Workers(model, where, secret, args.workers, rng)
        try:
            with Server(
                model, "--workers", "0", "--accept-workers", where, "--secret-file", str(secret)
            ) as server:
                settle(server, workers.names)
                client = Client(server.url)

                def one(body: dict[str, Any]) -> tuple[str, str] | None:
                    try:
                        return client.ask(body)
                    except OSError as error:
                        violations.append(f"request {body['seed']}: {error}")
                        return None

                disturbing = threading.Thread(
                    target=workers.disturb, args=(server, args.every, args.all_at_once)
                )
                disturbing.start()
                began = time.monotonic()
                with ThreadPoolExecutor(CONCURRENCY) as pool:
                    answers = list(pool.map(one, bodies))
                took_s = time.monotonic() - began
                workers.stop()
                disturbing.join()
                violations += settle(server, workers.names)
                for body, answer in zip(bodies, answers, strict=True):
                    if answer is not None and one(body) not in (answer, None):
                        violations.append(f"request {body['seed']}: another text when it is sent alone")
                metrics = server.metrics()
        finally:
            workers.stop()
            workers.close()
    if metrics["requests_in_flight"] or metrics["kv_pages_free"] != metrics["kv_pages_total"]:
        violations.append("requests or pages are left")
    counted = ("worker_joins_total", "worker_restarts_total", "router_moved_total", "router_resyncs_total")
    return {
        "requests": args.requests,
        "seconds": round(took_s, 1),
        "faults": dict(workers.faults),
        "lost": sum(answer is None for answer in answers),
        "refused_and_sent_again": client.refusals,
        **{name: metrics[name] for name in counted},
        "violations": violations,
    }


def settle(server: Server, names: list[str]) -> list[str]:
    """Waits until all are up; says who is not."""
    deadline = time.monotonic() + SETTLE_S
    while (now := states(server)) != dict.fromkeys(names, "up"):
        if time.monotonic() > deadline:
            return [f"workers are {now}"]
        time.sleep(0.1)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all-at-once", action="store_true", help="each fault befalls all workers")
    args = parser.parse_args()
    report = run(args)
    print(json.dumps(report, indent=1))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    run_script(main)
