"""etcd stands still under a cluster at work: what its clients see."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tenfold.bench.cluster import children
from tests.helpers.cluster import ClusterProcess
from tests.helpers.cluster_requests import LONG, Streamed, answer, body

AT_ONCE = 4


def etcd_of(cluster: ClusterProcess) -> int:
    """Its process."""
    (etcd,) = (
        pid
        for pid in children(cluster.process.pid)
        if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].endswith("etcd")
    )
    return etcd


def processes(cluster: ClusterProcess) -> Sequence[int]:
    """Of its front, broker and workers."""
    return [pid for entry in ("front", "broker", "worker") for pid in cluster.pids(entry)]


def over_an_outage(cluster: ClusterProcess, one_machine: str, seconds: float) -> tuple[int, float]:
    """Streams all the while, etcd stopped for ``seconds`` in the middle. Each text must be as it is on one
    machine, and no process may end. Returns how many streams there were, and their longest pause in seconds.
    """
    bodies = [body(number, **LONG) for number in range(AT_ONCE)]
    expected = [answer(one_machine, each)[0:4] for each in bodies]
    before = processes(cluster)
    etcd = etcd_of(cluster)
    until = time.monotonic() + 2 + seconds + 2

    def stream(number: int) -> list[Any]:
        got = []
        while time.monotonic() < until:
            got.append(Streamed(cluster.url, bodies[number]))
        return got

    with ThreadPoolExecutor(AT_ONCE) as pool:
        streams = [pool.submit(stream, number) for number in range(AT_ONCE)]
        time.sleep(2)
        os.kill(etcd, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(etcd, signal.SIGCONT)
        got = [each.result() for each in streams]
    for number, ended in enumerate(got):
        assert all(each.all == expected[number] for each in ended), cluster.logs()
    assert processes(cluster) == before, cluster.logs()
    ended = [each for one in got for each in one]
    return len(ended), max(each.gap_s for each in ended)
