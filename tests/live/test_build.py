"""A worker that learns starts with what it finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest

from tenfold.live.folder import LiveState
from tenfold.protocol import EngineSettings
from tests.helpers.live import build_quick, tiny_model, write_head

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tenfold._native", "torch")),
    reason="needs the built core and torch",
)


@pytest.mark.parametrize("damage", ["none", "head.safetensors", "drafter.json"])
def test_the_head_that_was_live_is_taken_up_if_it_loads(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the drafter's own, and the log says so."""
    model, drafter = tiny_model(tmp_path / "model"), tmp_path / "drafter"
    write_head(model, drafter)
    head = drafter / "live/heads/0002"
    write_head(model, head, seed=1)
    (drafter / "live/state.json").write_bytes(msgspec.json.encode(LiveState(live=2, last=2)))
    if damage != "none":
        (head / damage).write_bytes(b"nonsense")
    settings = EngineSettings(
        model=str(model), threads=1, kv_memory_bytes=8 << 20, drafter=str(drafter), learn=True
    )
    build_quick(settings)
    state = msgspec.json.decode((drafter / "live/state.json").read_bytes(), type=LiveState)
    assert state.live == (2 if damage == "none" else 0)
    assert ("does not load" in caplog.text) == (damage != "none")


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    """And nothing is made in it."""
    model, drafter = tiny_model(tmp_path / "model"), tmp_path / "drafter"
    settings = EngineSettings(model=str(model), threads=1, drafter=str(drafter), learn=True)
    with pytest.raises(ValueError, match="not a drafter"):
        build_quick(settings)
    write_head(model, drafter)
    other = tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="output matrix"):
        build_quick(msgspec.structs.replace(settings, model=str(other)))
    assert not (drafter / "live").exists()
