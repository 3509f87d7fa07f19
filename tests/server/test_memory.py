"""Whether models fit a machine together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenfold.config import ServeConfig
from tenfold.inspection import inspect_model
from tenfold.server.memory import PROCESS_BYTES, Wanted, check_room, check_together, wanted, weight_bytes
from tests.helpers.model_files import random_weights, tiny_config, write_folder
from tests.helpers.tiny_served import write_tiny

OWN = PROCESS_BYTES
A, B = Wanted("a", 600, 100, 1), Wanted("b", 300, 0, 2)


def test_the_sum_counts() -> None:
    """Weights and KV memory of all, and what processes take themselves, to the byte."""
    check_together([A, B], 1000 + 3 * OWN)
    with pytest.raises(
        ValueError,
        match=r"^192.0 MiB of memory are wanted \(a: 600 B of weights \+ 100 B of KV memory \+ 1 worker of "
        r"64.0 MiB; b: 300 B of weights \+ 2 workers of 64.0 MiB\)",
    ):
        check_together([A, B], 999 + 3 * OWN)


def test_what_is_free_counts_for_one_more() -> None:
    """What is loaded already is named, so that something can be unloaded."""
    check_room(A, 700 + OWN, ["b (1 GiB)"])
    with pytest.raises(ValueError, match=r"no room for a: .*64.0 MiB are free; loaded are b \(1 GiB\)"):
        check_room(A, 699 + OWN, ["b (1 GiB)"])


@pytest.mark.parametrize(
    ("options", "processes"), [({}, 1), ({"workers": 256}, 256), ({"prefill": 2, "decode": 3}, 5)]
)
def test_workers_take_memory_of_their_own(tmp_path: Path, options: dict[str, Any], processes: int) -> None:
    """However small the model: 256 workers of it are 16 GiB."""
    path = write_tiny(tmp_path / "tiny.gguf", 1)
    want = wanted(ServeConfig(model=path, kv_memory_bytes=1 << 30, **options), path)
    assert want.bytes == processes * (PROCESS_BYTES + weight_bytes(path, "auto")) + (1 << 30)


@pytest.mark.parametrize("format", ["auto", "f32", "bf16", "q8", "q4"])
def test_weights_are_known_without_reading_them(tmp_path: Path, format: str) -> None:
    """As many bytes as the model's inspection tells, whatever the file and the format asked for."""
    config = tiny_config("qwen2")
    folder = write_folder(tmp_path / "folder", config, random_weights(config), "BF16")
    for path in (str(folder), write_tiny(tmp_path / "tiny.gguf", 1)):
        weights = inspect_model(path, format, 16).weights
        assert abs(weight_bytes(path, format) - sum(weight.bytes for weight in weights)) <= len(weights)
    assert weight_bytes(str(tmp_path / "nothing"), format) == 0
