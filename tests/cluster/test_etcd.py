"""A cluster whose processes find each other by etcd, which stands still for a while.

The outage of a minute is in `tests.soak.etcd`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tenfold.bench.server import Server
from tests.helpers.cluster import NAME, running_cluster, write_ascii_model
from tests.helpers.cluster_requests import answer, body, needs_dynamo
from tests.helpers.etcd_outage import over_an_outage
from tests.helpers.server_process import wait_for

pytestmark = [
    needs_dynamo,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
]
LONGEST_GAP_S = 4.0
"""Less than the outage: nobody waits for it."""


def test_etcd_stands_still_for_five_seconds(tmp_path: Path) -> None:
    """Promise: clients see nothing of it, texts are those of one machine; and afterwards a worker that dies
    is replaced as ever."""
    model = write_ascii_model(tmp_path / "tiny.gguf")
    options = ("--name", NAME, "--threads", "1", "--kv-memory", "64MiB")
    with (
        running_cluster(tmp_path, model, etcd=True) as cluster,
        Server(str(model), *options) as server,
    ):
        cluster.wait_for_workers(2)
        count, longest_s = over_an_outage(cluster, server.url, 5)
        assert count > 4 and longest_s < LONGEST_GAP_S
        victim = cluster.pids("worker")[0]
        os.kill(victim, signal.SIGKILL)
        assert answer(cluster.url, body(4)) == answer(server.url, body(4)), cluster.logs()
        wait_for(lambda: len(cluster.pids("worker")) == 2 and victim not in cluster.pids("worker"), 30)
