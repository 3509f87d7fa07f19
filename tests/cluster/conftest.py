"""A model, one machine that serves it, and a cluster that a test file starts as its `whole`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenfold.bench.server import Server
from tests.helpers.cluster import NAME, ClusterProcess, write_ascii_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ascii_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """`tenfold serve` on one machine: what all answers are held against."""
    with Server(str(model), "--name", NAME, "--threads", "1", "--kv-memory", "64MiB") as server:
        yield server


@pytest.fixture
def cluster(whole: ClusterProcess) -> ClusterProcess:
    """With both workers there, whatever the test before did."""
    whole.wait_for_workers(2)
    return whole
