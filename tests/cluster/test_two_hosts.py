"""Prefill on one host and decode on another: two network namespaces, and a link between them that is cut."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenfold.bench.server import Server
from tenfold.cluster.alike import full_namespace
from tenfold.cluster.up import EVENT_PORTS
from tenfold.protocol import EngineSettings
from tests.helpers.cluster import NAME, ClusterProcess, running_cluster, write_ascii_model
from tests.helpers.cluster_requests import (
    LONG,
    LONGEST_GAP_S,
    Streamed,
    answer,
    body,
    handed_over,
    needs_dynamo,
)
from tests.helpers.namespaces import Host, two_hosts_or_skip
from tests.helpers.server_process import wait_for

pytestmark = needs_dynamo
CLI = [sys.executable, "-c", "from tenfold.cli import main; main()"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_ascii_model(tmp_path / "tiny.gguf")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Of which this process reaches the first alone."""
    with two_hosts_or_skip(reached=True) as pair:
        yield pair


@pytest.fixture
def cluster(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[ClusterProcess]:
    """Front and decode worker on the near host, a prefill worker on the far one. Files are shared."""
    near, far = hosts
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("f" * 40)
    transfer = {"transfer_address": near.address, "transfer_secret": str(secret), "kv_transport": "tcp"}
    with (
        running_cluster(
            *(tmp_path, model, ("decode",), near.command(), transfer),
            address=near.address,
            host=near.reached,
        ) as cluster,
        (tmp_path / "logs" / "far.log").open("w") as log,
    ):
        namespace = full_namespace("tenfold", EngineSettings(model=str(model)))
        role = ["--cluster", "dynamo", "--namespace", namespace, "--role", "prefill"]
        events = ":".join(map(str, (near.address, *EVENT_PORTS)))
        options = ["--name", NAME, "--threads", "1", "--kv-memory", "64MiB", "--secret-file", str(secret)]
        options += ["--kv-transport", "tcp"]  # NIXL would find out that the two share a machine
        where = ["--discovery", str(tmp_path / "discovery"), "--events", events, "--address", far.address]
        process = subprocess.Popen(
            far.command(*CLI, "worker", str(model), *role, *options, *where),
            stdout=log,
            stderr=log,
        )
        try:
            yield cluster
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_pages_come_from_another_host(model: Path, hosts: tuple[Host, Host], cluster: ClusterProcess) -> None:
    """Promise: with prompts computed on one host and answers on another, and pages going over TCP between
    them, texts are those of one machine. When the link goes down no request is lost: streams go on, and
    prompts are computed where they are; when it is back, they are computed on the far host again."""
    with Server(str(model), "--name", NAME, "--threads", "1", "--kv-memory", "64MiB") as server:
        wait_for(lambda: handed_over(cluster), 60)
        for each in (body(0), body(5), body(7, temperature=0), body(30)):
            assert answer(cluster.url, each) == answer(server.url, each), cluster.logs()
        roads = [{"role": "user", "content": "a road " * 300}]
        before = [body(number, **LONG) for number in range(3)]
        after = [body(number, messages=roads) for number in range(20, 24)]
        expected = [answer(server.url, each) for each in (*before, *after)]
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(Streamed, cluster.url, each) for each in before]
            time.sleep(0.5)
            hosts[0].connect(False)
            streams += [pool.submit(Streamed, cluster.url, each) for each in after]
            assert not handed_over(cluster)
            got = [stream.result() for stream in streams]
        assert [each.all for each in got] == expected, cluster.logs()
        assert max(each.gap_s for each in got) < LONGEST_GAP_S
        hosts[0].connect(True)
        wait_for(lambda: handed_over(cluster), 60)
        assert answer(cluster.url, body(9)) == answer(server.url, body(9))
