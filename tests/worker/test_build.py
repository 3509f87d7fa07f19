"""What a worker takes of the machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.backends.cores import choose_threads
from tenfold.protocol import EngineSettings
from tenfold.worker import build
from tenfold.worker.build import own_threads


def test_workers_divide_the_cores() -> None:
    """Promise: without --threads each of several workers takes its part of the cores, at least one, and says
    why; what was asked for is of each."""
    cores, why = choose_threads(0)
    assert own_threads(EngineSettings(model="")) == (cores, why)
    assert own_threads(EngineSettings(model="", threads=3, workers=2)) == (3, "as asked for")
    threads, why = own_threads(EngineSettings(model="", workers=2))
    assert threads == max(1, cores // 2) and "divided among 2 workers" in why
    assert own_threads(EngineSettings(model="", workers=1000))[0] == 1


def test_a_disk_tier_that_cannot_be_says_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Promise: a full disk is called that, a size that was given is called by its option, both with units."""
    monkeypatch.setattr(build, "default_disk_bytes", lambda root: 1 << 20)
    info: Any = SimpleNamespace(page_bytes=1 << 20, max_context=8192)
    settings = EngineSettings(model="m", kv_disk=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^kv_disk .*too little room.*is 1\.0 MiB, and the least .* MiB; free"
    ):
        build.open_tier(settings, info, "identity")
    settings = EngineSettings(model="m", kv_disk=str(tmp_path), kv_disk_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"\(--kv-disk-size\) is 1\.0 MiB; the least .* is \d+\.\d MiB$"):
        build.open_tier(settings, info, "identity")
