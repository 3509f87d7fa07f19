"""What a weight is stored as: codes on a grid, and the grid.

A ``Matrix`` is the form in which weights cross from checkpoints to backends: unpacked, so that a backend can
lay it out as its kernels like. It is made for a block of rows at a time, so it is never large.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Format(str, enum.Enum):
    """Number formats of weights in memory."""

    F32 = "f32"
    BF16 = "bf16"
    Q8 = "q8"
    """8-bit linear: ``scale * code (+ minimum)``, code in -128..127."""
    Q4 = "q4"
    """4-bit linear: ``scale * code + minimum``, code in 0..15; without a minimum it is ``-8 * scale``."""


class Layout(msgspec.Struct, frozen=True):
    """A format with its parameters: everything a backend must know to choose a kernel and to reserve
    memory."""

    format: Format
    group: int = 0
    """Elements of a row that share a scale (16 or 32); 0 for F32 and BF16."""
    wide_scales: bool = False
    """Scales and minima are float32 rather than float16."""
    has_minimum: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Storage per weight, scales and minima included."""
        if self.format is Format.F32:
            return 32.0
        if self.format is Format.BF16:
            return 16.0
        code = 8 if self.format is Format.Q8 else 4
        return code + (32 if self.wide_scales else 16) * (2 if self.has_minimum else 1) / self.group


class Matrix(msgspec.Struct, frozen=True):
    """Rows of a weight ``[rows, cols]`` in a layout.

    ``codes``: F32 float32, BF16 uint16 (the high half of a float32), Q8 int8, Q4 uint8 with one code a byte.
    ``scale``, ``minimum``: ``[rows, cols / group]``, float16 or float32 by ``layout.wide_scales``; None where
    the layout has none.
    """

    layout: Layout
    codes: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None = None
    minimum: npt.NDArray[Any] | None = None

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The float matrix that this stands for, ``[rows, cols]`` float32."""
        fmt = self.layout.format
        if fmt is Format.F32:
            return np.asarray(self.codes, dtype=np.float32)
        if fmt is Format.BF16:
            return (self.codes.astype(np.uint32) << 16).view(np.float32)
        assert self.scale is not None
        rows, cols = self.codes.shape
        scale = self.scale.astype(np.float32)[:, :, None]
        codes = self.codes.reshape(rows, cols // self.layout.group, self.layout.group).astype(np.float32)
        if self.minimum is not None:
            values = scale * codes + self.minimum.astype(np.float32)[:, :, None]
        elif fmt is Format.Q4:
            values = scale * (codes - np.float32(8))
        else:
            values = scale * codes
        return values.reshape(rows, cols)
