"""Whether models fit a machine together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.inspection import inspect_model
from tenfold.server.memory import Wanted, check_room, check_together, weight_bytes
from tests.helpers.model_files import random_weights, tiny_config, write_folder
from tests.helpers.tiny_served import write_tiny

A, B = Wanted("a", 600, 100), Wanted("b", 300, 0)


def test_the_sum_counts() -> None:
    """Weights and KV memory of all, to the byte."""
    check_together([A, B], 1000)
    with pytest.raises(
        ValueError, match=r"want 1000 B .*a: 600 B of weights \+ 100 B of KV memory; b: 300 B of"
    ):
        check_together([A, B], 999)


def test_what_is_free_counts_for_one_more() -> None:
    """What is loaded already is named, so that something can be unloaded."""
    check_room(A, 700, ["b (1 GiB)"])
    with pytest.raises(ValueError, match=r"no room for a: .*699 B are free; loaded are b \(1 GiB\)"):
        check_room(A, 699, ["b (1 GiB)"])


@pytest.mark.parametrize("format", ["auto", "f32", "bf16", "q8", "q4"])
def test_weights_are_known_without_reading_them(tmp_path: Path, format: str) -> None:
    """As many bytes as the model's inspection tells, whatever the file and the format asked for."""
    config = tiny_config("qwen2")
    folder = write_folder(tmp_path / "folder", config, random_weights(config), "BF16")
    for path in (str(folder), write_tiny(tmp_path / "tiny.gguf", 1)):
        weights = inspect_model(path, format, 16).weights
        assert abs(weight_bytes(path, format) - sum(weight.bytes for weight in weights)) <= len(weights)
    assert weight_bytes(str(tmp_path / "nothing"), format) == 0
