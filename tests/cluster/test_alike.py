"""What a cluster's namespace says of its workers: only those that answer alike are in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tenfold.cluster import alike
from tenfold.cluster.alike import check_alike, full_namespace
from tenfold.protocol import EngineSettings


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    return EngineSettings(model=str(tmp_path / "model.gguf"))


def test_workers_that_answer_alike(settings: EngineSettings, tmp_path: Path) -> None:
    """Promise: the same file elsewhere, and options that change no answer, are in the same namespace; it can
    be given for the cluster's name, too."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"weights")
    namespace = full_namespace("ours-2", settings)
    others = replace(settings, model=str(copy), threads=7, role="decode")
    assert full_namespace("ours-2", others) == full_namespace(namespace, others) == namespace
    assert namespace.startswith("ours-2-auto-auto-")
    assert check_alike(namespace, others)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": "q4"}, "cluster ours do: its --format is q4, theirs auto .* with the same"),
        ({"kv_format": "q8"}, "its --kv-format is q8, theirs auto .* with the same"),
        ({"model": "other.gguf"}, "its model is .* the same files"),
        ({"code": "0" * 12}, "its Tenfold is 00000000, .* install the same"),
    ],
)
def test_one_that_would_answer_differently(
    settings: EngineSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    said: str,
) -> None:
    """Promise: it is in another namespace, and refused in this one with the reason and the remedy."""
    namespace = full_namespace("ours", settings)
    if code := changed.pop("code", None):
        monkeypatch.setattr(alike, "code_digest", lambda: code)
    if "model" in changed:
        (tmp_path / changed["model"]).write_bytes(b"others")
        changed["model"] = str(tmp_path / changed["model"])
    other = replace(settings, **changed)
    assert full_namespace("ours", other) != namespace
    with pytest.raises(ValueError, match=said):
        check_alike(namespace, other)


def test_a_namespace_of_somebody_else(settings: EngineSettings) -> None:
    """Promise: of one that says nothing it is not claimed that its workers are alike."""
    assert not check_alike("production", settings)
