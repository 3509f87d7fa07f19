"""What a worker takes of the machine."""

from __future__ import annotations

from tenfold.backends.cores import choose_threads
from tenfold.protocol import EngineSettings
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
