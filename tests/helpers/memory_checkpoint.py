"""A checkpoint made of arrays, for tests of graphs and backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import Placement, TensorInfo
from tenfold.formats.matrix import Format, Layout, Matrix

GROUP = 32


class DictCheckpoint:
    """Implements `tenfold.checkpoint.base.Checkpoint` over a dict of float32 arrays (or torch tensors).

    Norms, biases and matrices whose width is no multiple of 32 stay float32; ``q8`` rounds by the largest
    magnitude of each group of 32, ``bf16`` to nearest even. ``auto`` is float32.
    """

    def __init__(self, weights: Mapping[str, Any], config: dict[str, Any]) -> None:
        self.path = "memory"
        self.architecture = str(config.get("model_type"))
        self.config = config
        self._weights: dict[str, npt.NDArray[np.float32]] = {
            name: np.ascontiguousarray(np.asarray(weight, dtype=np.float32))
            for name, weight in weights.items()
        }

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, weight.shape, "F32", weight.nbytes, self.path, 0)
            for name, weight in self._weights.items()
        }

    def place(self, name: str, requested: str) -> Placement:
        weight = self._weights[name]
        if weight.ndim == 1 or requested in ("auto", "f32") or weight.shape[1] % GROUP:
            return Placement(Layout(Format.F32), True, "kept")
        if requested == "bf16":
            return Placement(Layout(Format.BF16), False, "rounded to bf16")
        if requested == "q8":
            return Placement(Layout(Format.Q8, group=GROUP), False, "rounded to q8")
        raise ValueError(f"the test checkpoint has no format {requested!r}")

    def rows(self, name: str, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        weight = np.atleast_2d(self._weights[name])
        step = block_rows or 64
        for first in range(0, len(weight), step):
            yield first, _encode(weight[first : first + step], layout)

    def close(self) -> None:
        self._weights.clear()


def _encode(values: npt.NDArray[np.float32], layout: Layout) -> Matrix:
    if layout.format is Format.F32:
        return Matrix(layout, values)
    if layout.format is Format.BF16:
        bits = values.view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return Matrix(layout, (rounded >> 16).astype(np.uint16))
    assert layout.format is Format.Q8 and not layout.has_minimum
    groups = values.reshape(len(values), -1, layout.group)
    scale = (np.abs(groups).max(axis=2) / 127).astype(np.float32 if layout.wide_scales else np.float16)
    safe = np.where(scale == 0, 1, scale).astype(np.float32)[:, :, None]
    codes = np.clip(np.rint(groups / safe), -127, 127).astype(np.int8)
    return Matrix(layout, codes.reshape(values.shape), scale)
