"""Time in which the front was there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tenfold.server.clock as clock_module
from tenfold.server.clock import LONGEST_GAP_S, WatchedClock


def test_time_in_which_nobody_looked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a front that was stopped for an hour finds that hardly any time has passed, so it takes nobody
    for silent who was not; otherwise its clock is the monotonic one."""
    real = SimpleNamespace(now=50.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: real.now))
    clock = WatchedClock()
    began = clock.now()
    for _ in range(100):
        real.now += 0.2
        clock.now()
    assert clock.now() - began == pytest.approx(20)
    real.now += 3600
    assert clock.now() - began == pytest.approx(20 + LONGEST_GAP_S)
    real.now += 0.5
    assert clock.now() - began == pytest.approx(20.5 + LONGEST_GAP_S)
