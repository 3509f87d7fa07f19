"""Memory while a model is read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tenfold.checkpoint.base import TensorInfo
from tenfold.checkpoint.gguf import GGUFFile
from tenfold.checkpoint.stored import StoredWeight
from tenfold.formats.matrix import Format, Layout
from tests.helpers.model_files import write_gguf

ROWS, COLS = 24576, 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("head_dim", [0, 64])
def test_pages_already_read_are_let_go(tmp_path: Path, head_dim: int) -> None:
    """A matrix of 96 MiB is read in the memory of a few blocks: a model loads in little more than itself."""
    data = np.ones((ROWS, COLS), dtype=np.float32).tobytes()
    path = write_gguf(tmp_path / "m.gguf", {}, {"m": ((ROWS, COLS), "F32", data)})
    del data
    file = GGUFFile(str(path))
    tensor = file.tensors["m"]
    info = TensorInfo("m", tensor.shape, "F32", tensor.size, str(path), tensor.offset)
    weight = StoredWeight(info, tensor.kind, file.mapped, head_dim)
    before = most = _resident_bytes()
    for _first, block in weight.rows(Layout(Format.Q8, group=32)):
        most = max(most, _resident_bytes())
        del block
    assert most - before < 40 << 20
    assert _resident_bytes() - before < 24 << 20
    file.close()
