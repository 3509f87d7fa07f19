"""Workers that Ray places: they answer as one machine does, come back, and leave nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenfold.bench.cluster import children, descendants
from tenfold.bench.server import Server
from tests.helpers.cluster import ClusterProcess, running_cluster
from tests.helpers.cluster_requests import answer, body, needs_dynamo, over_a_fault
from tests.helpers.server_process import wait_for

pytestmark = [
    needs_dynamo,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "tenfold[ray]"'
    ),
]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(folder, model, launcher="ray", ray_address="local") as cluster:
        yield cluster


def actor_of(cluster: ClusterProcess, worker: int) -> int:
    """The process of a worker's actor."""
    (actor,) = (pid for pid in descendants(cluster.process.pid) if worker in children(pid))
    assert Path(f"/proc/{actor}/cmdline").read_text().startswith("ray::TenfoldWorker")
    return actor


def test_answers_are_those_of_one_machine(cluster: ClusterProcess, server: Server) -> None:
    """Promise: who placed the workers changes no text and no usage."""
    for number in range(4):
        assert answer(cluster.url, body(number)) == answer(server.url, body(number))


def test_a_worker_is_killed(cluster: ClusterProcess, server: Server) -> None:
    """Promise: its streams go on at the other; its actor, which lives, starts a new one."""
    victim = cluster.pids("worker")[0]
    actor = actor_of(cluster, victim)
    over_a_fault(cluster, server, lambda: os.kill(victim, signal.SIGKILL))
    wait_for(lambda: len(cluster.pids("worker")) == 2, 60)
    assert actor in {actor_of(cluster, worker) for worker in cluster.pids("worker")}


def test_an_actor_is_killed(cluster: ClusterProcess, server: Server) -> None:
    """Promise: its worker dies with it, its streams go on at the other, and both come back."""
    victim = cluster.pids("worker")[0]
    actor = actor_of(cluster, victim)
    over_a_fault(cluster, server, lambda: os.kill(actor, signal.SIGKILL))
    wait_for(lambda: not Path(f"/proc/{victim}").exists(), 10)
    cluster.wait_for_workers(2)
    assert actor not in {actor_of(cluster, worker) for worker in cluster.pids("worker")}


def test_ctrl_c_leaves_nothing_behind(cluster: ClusterProcess) -> None:
    """Promise: all processes of the cluster and of its Ray end, also when the terminal sends the signal to
    all of them at once; workers take their leave before that."""
    all_of_them = descendants(cluster.process.pid)
    os.killpg(cluster.process.pid, signal.SIGINT)
    assert cluster.process.wait(60) == 0

    def alive() -> list[int]:
        found = []
        for pid in all_of_them:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(pid)
        return found

    wait_for(lambda: not alive(), 10)
    for number in range(2):
        log = (cluster.folder / "logs" / f"worker-{number}.log").read_text(errors="replace")
        assert "Traceback" not in log, log[-3000:]
