"""GGUF's tensor types, re-laid without loss.

A GGUF row is a sequence of blocks, each with packed codes and its scales. Here the blocks of a row are taken
apart into a ``Matrix``: the same codes and the same grid, unpacked. K-quants store scales as products of two
numbers; the product (at most 17 bits) is kept in float32. Block layouts: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tenfold.formats.matrix import Format, Layout, Matrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Codes = npt.NDArray[np.uint8] | npt.NDArray[np.int8]
Parts = tuple[Codes, Halves | Floats, Halves | Floats | None]
"""Codes ``[n, elements]``, scales and minima ``[n, elements / group]`` of n blocks."""

_IQ4_CODES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
_MXFP4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the e2m1 values."""

_Q8_HALF = Layout(Format.Q8, group=32)
_Q8_HALF_MINIMUM = Layout(Format.Q8, group=32, has_minimum=True)
_Q8_WIDE = Layout(Format.Q8, group=32, wide_scales=True)
_Q8_FINE = Layout(Format.Q8, group=16, wide_scales=True)


class NonFiniteError(ValueError):
    """A weight or a scale is infinite or not a number. ``row`` and ``byte`` (in that row) say where."""

    def __init__(self, what: str, row: int, byte: int) -> None:
        super().__init__(f"{what} is not finite at row {row}, byte {byte} of the row")
        self.what = what
        self.row = row
        self.byte = byte


@dataclasses.dataclass(frozen=True)
class GGMLType:
    """A tensor type of GGUF that can be read."""

    name: str
    block: int
    """Elements of a block; a row is a whole number of blocks."""
    block_bytes: int
    layout: Layout
    """The layout that holds its grid."""
    unpack: Callable[[Bytes], Parts] | None = None
    """None for plain floats."""


def relay(raw: Bytes, kind: GGMLType) -> Matrix:
    """Takes the blocks of ``raw`` ``[rows, row bytes]`` (contiguous) apart into a Matrix ``[rows, cols]``.

    Nothing is lost and nothing of ``raw`` is kept. Raises NonFiniteError where a float or a scale is not
    finite, or so large that a weight would overflow float32.
    """
    rows, row_bytes = raw.shape
    if kind.unpack is None:
        return _relay_floats(raw, kind)
    blocks = raw.reshape(rows * (row_bytes // kind.block_bytes), kind.block_bytes)
    with np.errstate(invalid="ignore"):  # infinity times zero: found below
        codes, scale, minimum = kind.unpack(blocks)
    for what, values in (("scale", scale), ("minimum", minimum)):
        if values is not None:
            _check_finite(what, values, rows, row_bytes)
    return Matrix(
        kind.layout,
        codes.reshape(rows, -1),
        scale.reshape(rows, -1),
        None if minimum is None else minimum.reshape(rows, -1),
    )


def _relay_floats(raw: Bytes, kind: GGMLType) -> Matrix:
    if kind.name == "F32":
        values = raw.view("<f4")
        bad = ~np.isfinite(values)
        codes: npt.NDArray[np.generic] = values.copy()
    else:
        bits = raw.view("<u2")
        exponent = np.uint16(0x7C00 if kind.name == "F16" else 0x7F80)
        bad = (bits & exponent) == exponent
        codes = raw.view("<f2").astype(np.float32) if kind.name == "F16" else bits.copy()
    if bad.any():
        row, col = divmod(int(bad.argmax()), bad.shape[1])
        raise NonFiniteError("weight", row, col * kind.block_bytes)
    return Matrix(kind.layout, codes)


def _check_finite(what: str, values: Halves | Floats, rows: int, row_bytes: int) -> None:
    if values.dtype == np.float16:
        bad = (values.view(np.uint16) & np.uint16(0x7C00)) == np.uint16(0x7C00)
    else:
        # The largest code is 128: a scale that passes cannot overflow when it is multiplied.
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~np.isfinite(values * np.float32(128))
    if bad.any():
        per_row = bad.size // rows
        row, index = divmod(int(bad.argmax()), per_row)
        raise NonFiniteError(what, row, index * row_bytes // per_row)


def _halves(blocks: Bytes, start: int) -> Halves:
    """The float16 at byte ``start`` of each block: ``[n, 1]``."""
    return blocks[:, start : start + 2].copy().view(np.float16)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """``[n, k * width]`` bytes -> ``[n, 2 * k * width]``: low halves of ``width`` bytes, then the high."""
    count = packed.shape[0]
    split = packed.reshape(count, -1, width)
    out = np.empty((count, split.shape[1], 2, width), dtype=np.uint8)
    np.bitwise_and(split, np.uint8(15), out=out[:, :, 0])
    np.right_shift(split, np.uint8(4), out=out[:, :, 1])
    return out.reshape(count, -1)


def _crumbs(packed: Bytes) -> Bytes:
    """``[n, k * 32]`` bytes -> ``[n, k * 128]``: of each 32 bytes bits 0..1, then 2..3, 4..5, 6..7."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    out = packed.reshape(packed.shape[0], -1, 1, 32) >> shifts
    out &= np.uint8(3)
    return out.reshape(packed.shape[0], -1)


def _bit_planes(packed: Bytes) -> Bytes:
    """``[n, 32]`` bytes -> ``[n, 256]`` of 0 or 1: bit 0 of all bytes, then bit 1 ..."""
    out = packed.reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    out &= np.uint8(1)
    return out.reshape(-1, 256)


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _five_bits(packed: Bytes, high: Bytes) -> Bytes:
    """Low nibbles ``[n, 16]`` and one high bit per element ``[n, 4]`` -> ``[n, 32]`` codes in 0..31."""
    codes = _nibbles(packed, 16)
    codes |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return codes


def _q5_0(blocks: Bytes) -> Parts:
    codes = _five_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8)
    codes -= np.int8(16)
    return codes, _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _five_bits(blocks[:, 8:], blocks[:, 4:8]).view(np.int8)
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:].copy().view(np.int8), _halves(blocks, 0), None


def _iq4_nl(blocks: Bytes) -> Parts:
    return _IQ4_CODES[_nibbles(blocks[:, 2:], 16)], _halves(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = blocks[:, 4:8].repeat(2, axis=1) >> np.array([0, 4] * 4, dtype=np.uint8)
    six_bits = (low & np.uint8(15)) | ((high & np.uint16(3)) << np.uint16(4)).astype(np.uint8)
    scale = _halves(blocks, 0).astype(np.float32) * (six_bits.astype(np.float32) - np.float32(32))
    return _IQ4_CODES[_nibbles(blocks[:, 8:], 16)], scale, None


def _mxfp4(blocks: Bytes) -> Parts:
    # An e8m0 scale is 2^(e - 127), NaN at 255; the codes are doubled, so the scale is halved.
    exponent = blocks[:, :1].astype(np.int32)
    scale = np.ldexp(np.float32(1), exponent - 128).astype(np.float32)
    scale[exponent == 255] = np.nan
    return _MXFP4_CODES[_nibbles(blocks[:, 1:], 16)], scale, None


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the eight groups of a Q4_K or Q5_K block: d and dmin times 6-bit numbers."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two = np.uint8(0x3F), np.uint8(0x30)
    scales = np.hstack([first & six, (rest & np.uint8(15)) | ((first >> np.uint8(2)) & two)])
    minima = np.hstack([second & six, (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & two)])
    scale = _halves(blocks, 0).astype(np.float32) * scales.astype(np.float32)
    return scale, -(_halves(blocks, 2).astype(np.float32) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Parts:
    scale, minimum = _k_scales(blocks)
    return _nibbles(blocks[:, 16:], 32), scale, minimum


def _q5_k(blocks: Bytes) -> Parts:
    scale, minimum = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:], 32)
    codes |= _bit_planes(blocks[:, 16:48]) << np.uint8(4)
    return codes.view(np.int8), scale, minimum


def _q6_k(blocks: Bytes) -> Parts:
    # Of each 64 low bytes the low nibbles are elements 0..63 and the high ones 64..127, so width is 64 here.
    codes = _nibbles(blocks[:, :128], 64)
    codes |= _crumbs(blocks[:, 128:192]) << np.uint8(4)
    signed = codes.view(np.int8)
    signed -= np.int8(32)
    return signed, _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8), None


def _q2_k(blocks: Bytes) -> Parts:
    scales = blocks[:, :16]
    scale = _halves(blocks, 80).astype(np.float32) * (scales & np.uint8(15)).astype(np.float32)
    minimum = -(_halves(blocks, 82).astype(np.float32) * (scales >> np.uint8(4)).astype(np.float32))
    return _crumbs(blocks[:, 16:80]).view(np.int8), scale, minimum


def _q3_k(blocks: Bytes) -> Parts:
    codes = _crumbs(blocks[:, 32:96])
    codes |= _bit_planes(blocks[:, :32]) << np.uint8(2)
    signed = codes.view(np.int8)
    signed -= np.int8(4)
    low = np.hstack([blocks[:, 96:104] & np.uint8(15), blocks[:, 96:104] >> np.uint8(4)])
    high = np.hstack([(blocks[:, 104:108] >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)])
    six_bits = low | (high << np.uint8(4))
    scale = _halves(blocks, 108).astype(np.float32) * (six_bits.astype(np.float32) - np.float32(32))
    return signed, scale, None


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, Layout(Format.F32)),
    1: GGMLType("F16", 1, 2, Layout(Format.F32)),
    2: GGMLType("Q4_0", 32, 18, Layout(Format.Q4, group=32), _q4_0),
    3: GGMLType("Q4_1", 32, 20, Layout(Format.Q4, group=32, has_minimum=True), _q4_1),
    6: GGMLType("Q5_0", 32, 22, _Q8_HALF, _q5_0),
    7: GGMLType("Q5_1", 32, 24, _Q8_HALF_MINIMUM, _q5_1),
    8: GGMLType("Q8_0", 32, 34, _Q8_HALF, _q8_0),
    10: GGMLType("Q2_K", 256, 84, Layout(Format.Q8, group=16, wide_scales=True, has_minimum=True), _q2_k),
    11: GGMLType("Q3_K", 256, 110, _Q8_FINE, _q3_k),
    12: GGMLType("Q4_K", 256, 144, Layout(Format.Q4, group=32, wide_scales=True, has_minimum=True), _q4_k),
    13: GGMLType("Q5_K", 256, 176, Layout(Format.Q8, group=32, wide_scales=True, has_minimum=True), _q5_k),
    14: GGMLType("Q6_K", 256, 210, _Q8_FINE, _q6_k),
    20: GGMLType("IQ4_NL", 32, 18, _Q8_HALF, _iq4_nl),
    23: GGMLType("IQ4_XS", 256, 136, _Q8_WIDE, _iq4_xs),
    30: GGMLType("BF16", 1, 2, Layout(Format.BF16)),
    39: GGMLType("MXFP4", 32, 17, _Q8_WIDE, _mxfp4),
}
"""The types that can be read, by their number in a GGUF file."""

UNSUPPORTED_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Names of the types that cannot, for error messages."""
