"""Who launches workers, as far as that needs neither Ray nor Dynamo."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tenfold.cli import main
from tenfold.cluster import supervisor
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.processes import Kept
from tenfold.cluster.ray_launcher import RayLauncher, check_nodes, find_ray
from tenfold.cluster.runtime import Runtime
from tenfold.cluster.supervisor import MARK, Job, Supervisor
from tenfold.protocol import EngineSettings
from tests.helpers.server_process import wait_for

LASTING = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """What an actor is told, with a model and a folder that are there."""
    model = tmp_path / "model.gguf"
    model.touch()
    (tmp_path / MARK).write_text("mine")
    settings = EngineSettings(model=str(model))
    options = WorkerOptions(settings=settings, served_name="m", folder=str(tmp_path / "model"), namespace="n")
    return Job(name="worker-0", options=options, runtime=Runtime(), folder=str(tmp_path), mark="mine")


@contextlib.contextmanager
def supervised(job: Job) -> Iterator[Supervisor]:
    kept = Supervisor(job, "127.0.0.1")
    try:
        yield kept
    finally:
        kept.end()


def test_a_worker_of_an_actor_comes_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: it is started again, what befell it is reported once, and it ends with its supervisor's."""

    def lasting(name: str, options: WorkerOptions, runtime: Runtime, output: Path) -> Kept:
        return Kept(name, LASTING, {}, output)

    monkeypatch.setattr(supervisor, "kept_worker", lasting)
    with supervised(job) as kept:
        wait_for(lambda: kept.report().pid is not None, 20)
        report = kept.report()
        assert (report.address, report.refused) == ("127.0.0.1", None)
        assert report.output == f"{job.folder}/logs/worker-0.log"
        first = report.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        lines: list[str] = []

        def again() -> int | None:
            report = kept.report()
            lines.extend(report.lines)
            return report.pid if report.pid != first else None

        wait_for(lambda: again() is not None, 20)
        (line,) = lines
        assert line.startswith("worker-0 ended") and "killed by signal 9" in line and report.output in line
        second = kept.report().pid
        assert second is not None
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def without(job: Job, what: str) -> Job:
    """With something of it missing on this node."""
    settings = job.options.settings
    if what == "the folder":
        return replace(job, folder=f"{job.folder}/elsewhere")
    if what == "the mark":
        return replace(job, mark="of another cluster")
    changed = {"model": {"model": "/not/there"}, "secret": {"transfer_secret": "/not/there"}}[what]
    return replace(job, options=replace(job.options, settings=replace(settings, **changed)))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("model", "the model is not at /not/there .* same path on all nodes"),
        ("secret", "the secret is not at /not/there .* same path on all nodes"),
        ("the folder", "elsewhere .* --dir .* --etcd"),
        ("the mark", "--dir .* --etcd"),
    ],
)
def test_a_node_that_cannot_have_a_worker_says_why(job: Job, what: str, named: str) -> None:
    """Promise: what is missing on a node is named with the remedy, and nothing is started there."""
    with supervised(without(job, what)) as kept:
        report = kept.report()
    assert report.refused is not None and re.search(named, report.refused), report
    assert report.pid is None


@pytest.fixture
def no_ray_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which `ray start` leaves its address; it is not there yet."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_which_ray(no_ray_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the one that was named, else that of the environment, else the one started here, else none."""
    assert find_ray(None) is None and find_ray("local") is None
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(3):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            addresses.append(f"127.0.0.1:{listening.getsockname()[1]}")
        no_ray_here.write_text(addresses[0] + "\n")
        assert find_ray(None) == addresses[0]
        monkeypatch.setenv("RAY_ADDRESS", addresses[1])
        assert find_ray(None) == addresses[1]
        assert find_ray(addresses[2]) == addresses[2]
        assert find_ray("local") is None


def test_a_ray_that_is_gone(no_ray_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: an address where nothing answers is an error at once that says where it comes from, and not
    minutes of trying; nor is a Ray of our own started instead of the one that was meant."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gone = f"127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(ValueError, match=rf"{gone}.*--ray-address"):
        find_ray(gone)
    no_ray_here.write_text(gone)
    with pytest.raises(ValueError, match=rf"{gone}.*{no_ray_here} .* killed .* delete it"):
        find_ray(None)
    monkeypatch.setenv("RAY_ADDRESS", gone)
    with pytest.raises(ValueError, match=rf"{gone}.*RAY_ADDRESS .* unset it"):
        find_ray(None)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1", "ray://10.0.0.1:10001", "10.0.0.1:ten", ":7"])
def test_what_is_no_address(address: str) -> None:
    """Promise: it is named."""
    with pytest.raises(ValueError, match=f"{address}.*HOST:PORT"):
        find_ray(address)


ONE: dict[str, float] = {"10.0.0.1": 4.0}
TWO: dict[str, float] = {"10.0.0.1": 4.0, "10.0.0.2": 8.0}


@pytest.mark.parametrize(
    ("nodes", "runtime", "shared", "threads", "named"),
    [
        (ONE, {}, False, 4, None),
        (ONE, {}, False, 5, "5 CPUs .* --threads"),
        ({}, {}, False, 0, "no node .* 1 CPUs"),
        (TWO, {"address": "10.0.0.1"}, True, 8, None),
        (TWO, {"address": "10.0.0.1"}, False, 8, "2 nodes .*10.0.0.1, 10.0.0.2.* --etcd.* --dir"),
        (TWO, {"address": "10.0.0.1", "discovery": "etcd"}, False, 8, None),
        (TWO, {"discovery": "etcd"}, False, 8, "cannot reach 127.0.0.1: .* --address"),
        ({"127.0.0.1": 4.0, "127.0.0.2": 4.0}, {"discovery": "etcd"}, False, 1, None),
    ],
)
def test_nodes_that_do_not_fit(
    nodes: dict[str, float], runtime: dict[str, Any], shared: bool, threads: int, named: str | None
) -> None:
    """Promise: workers that could not be placed, or not find the front, are refused before any is started."""
    if named is None:
        check_nodes(Runtime(**runtime), nodes, shared, threads)
        return
    with pytest.raises(ValueError, match=named):
        check_nodes(Runtime(**runtime), nodes, shared, threads)


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the error says what to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(ValueError, match=r'pip install "tenfold\[ray\]"'):
        RayLauncher(Runtime(), tmp_path, False, None, workers=1, threads=1)


def test_an_address_of_ray_without_ray() -> None:
    """Promise: an option that would do nothing is refused."""
    got = CliRunner().invoke(main, ["cluster", "up", "smollm2", "--ray-address", "10.0.0.1:6379"])
    assert got.exit_code == 2 and "--launcher ray" in got.output
