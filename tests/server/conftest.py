"""Servers for the tests of the front."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a step of a millisecond and a context of 512 tokens."""
    with running_server(tmp_path_factory.mktemp("server") / "log", FakeConfig(delay_s=0.001)) as server:
        yield server
