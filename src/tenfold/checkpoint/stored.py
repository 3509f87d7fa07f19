"""A weight in a mapped file: which layout it gets, and its rows in that layout, a block at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import CheckpointError, Placement, TensorInfo
from tenfold.checkpoint.mapped import MappedFile
from tenfold.formats.ggml import GGMLType, NonFiniteError, relay
from tenfold.formats.matrix import Format, Layout, Matrix
from tenfold.formats.rounding import quantize

_BLOCK_ELEMENTS = 1 << 20
"""A block is 4 MiB as float32; as codes it stays in the cache between reading and packing."""

_LAYOUTS = {
    "f32": Layout(Format.F32),
    "bf16": Layout(Format.BF16),
    "q8": Layout(Format.Q8, group=32),
    "q4": Layout(Format.Q4, group=32, has_minimum=True),
}


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight where it lies, and how it differs from the canonical one."""

    info: TensorInfo
    kind: GGMLType
    file: MappedFile
    head_dim: int = 0
    """Not 0: within each head of so many rows, the file has the halves of the canonical order interleaved."""
    excess: float = 0.0
    """What the file's values are too large by. Only for vectors."""

    def place(self, requested: str) -> Placement:
        """See `Checkpoint.place`. A grid of the requested format is kept. Raises ValueError."""
        stored, native = self.kind.name, self.kind.layout
        plain_float = native.format in (Format.F32, Format.BF16)
        if requested != "auto" and requested not in _LAYOUTS:
            raise ValueError(f"format {requested!r} is not one of auto, {', '.join(_LAYOUTS)}")
        if len(self.info.shape) == 1:
            return Placement(_LAYOUTS["f32"], True, "vectors are held as F32")
        if requested == "auto" or native.format.value == requested:
            kept = f"{stored} kept" if plain_float else f"{stored} grid kept"
            return Placement(native, True, "F16 widened to F32" if stored == "F16" else kept)
        if requested == "f32":
            how = "widened" if plain_float else "dequantized"
            return Placement(_LAYOUTS["f32"], True, f"{how} from {stored} by --format f32")
        cols = self.info.shape[-1]
        if requested in ("q8", "q4") and cols % 32:
            why = f"{cols} columns are not whole groups of 32: BF16 in place of --format {requested}"
            return Placement(_LAYOUTS["bf16"], native.format is Format.BF16, why)
        how = "rounded" if plain_float else "requantized"
        return Placement(_LAYOUTS[requested], False, f"{how} from {stored} by --format {requested}")

    def rows(self, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        """See `Checkpoint.rows`. Raises CheckpointError for weights that do not fit ``layout``."""
        if block_rows < 0 or block_rows % 16:
            raise ValueError(f"block_rows is {block_rows}, not a multiple of 16")
        if len(self.info.shape) == 1:
            if layout.format is not Format.F32:
                raise ValueError(f"{self.info.name} is a vector, which is only held as F32")
            return iter([(0, self._vector())])
        return self._blocks(layout, block_rows)

    def _blocks(self, layout: Layout, block_rows: int) -> Iterator[tuple[int, Matrix]]:
        rows, cols = self.info.shape
        row_bytes = self.info.stored_bytes // rows
        step = block_rows or max(16, _BLOCK_ELEMENTS // cols // 16 * 16)
        order = None if self.head_dim == 0 else _halves_from_pairs(rows, self.head_dim)
        let_go = 0
        try:
            for first in range(0, rows, step):
                end = min(first + step, rows)
                self.file.prefetch(self.info.offset + end * row_bytes, min(step, rows - end) * row_bytes)
                if order is None:
                    raw = self.file.view(self.info.offset + first * row_bytes, (end - first) * row_bytes)
                    raw = raw.reshape(end - first, row_bytes)
                else:
                    whole = self.file.view(self.info.offset, rows * row_bytes).reshape(rows, row_bytes)
                    raw = whole[order[first:end]]
                block = self._convert(raw, layout, None if order is None else order[first:end], first)
                del raw
                # Rows of a head that goes on in the next block are still to be read.
                done = end if self.head_dim == 0 or end == rows else end // self.head_dim * self.head_dim
                self.file.release(self.info.offset + let_go * row_bytes, (done - let_go) * row_bytes)
                let_go = done
                yield first, block
        finally:
            self.file.release(self.info.offset + let_go * row_bytes, (rows - let_go) * row_bytes)

    def _vector(self) -> Matrix:
        raw = self.file.view(self.info.offset, self.info.stored_bytes).reshape(1, -1)
        values = self._convert(raw, _LAYOUTS["f32"], None, 0).codes
        if self.head_dim:
            values = values[:, _halves_from_pairs(values.shape[1], self.head_dim)]
        if self.excess:
            values = values - np.float32(self.excess)
        return Matrix(_LAYOUTS["f32"], values)

    def _convert(
        self,
        raw: npt.NDArray[np.uint8],
        layout: Layout,
        order: npt.NDArray[np.int64] | None,
        first: int,
    ) -> Matrix:
        try:
            matrix = relay(raw, self.kind)
        except NonFiniteError as error:
            row = first + error.row if order is None else int(order[error.row])
            offset = self.info.offset + row * raw.shape[1] + error.byte
            raise CheckpointError(
                f"{self.info.file}: tensor {self.info.name}: a {error.what} is not finite (byte {offset})"
            ) from None
        if layout == self.kind.layout:
            return matrix
        try:
            return quantize(matrix.dequantize(), layout)
        except ValueError as error:
            raise CheckpointError(
                f"{self.info.file}: tensor {self.info.name}, rows from {first}: {error} "
                f"(byte {self.info.offset + first * raw.shape[1]})"
            ) from error


class StoredWeights:
    """What every checkpoint does with its weights once it has found them: a part of `Checkpoint`."""

    _weights: dict[str, StoredWeight]
    """By canonical name, in the order of the file."""

    def tensors(self) -> dict[str, TensorInfo]:
        """Every weight, by canonical name."""
        return {name: weight.info for name, weight in self._weights.items()}

    def place(self, name: str, requested: str) -> Placement:
        """See `Checkpoint.place`. Raises KeyError for an unknown name, ValueError for an unknown request."""
        return self._weights[name].place(requested)

    def rows(self, name: str, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        """See `Checkpoint.rows`. Raises KeyError, ValueError, CheckpointError for bad data."""
        return self._weights[name].rows(layout, block_rows)


def _halves_from_pairs(rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Where the rows of a rotary projection, in canonical order, are in a file that pairs neighbours.

    Canonically row i of a head rotates with row i + head_dim / 2; GGUF's llama has them as 2i and 2i + 1.
    """
    row = np.arange(rows, dtype=np.int64)
    half, index = np.divmod(row % head_dim, head_dim // 2)
    stored: npt.NDArray[np.int64] = row - row % head_dim + 2 * index + half
    return stored
