"""Rounding a float32 matrix to a layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenfold.formats.matrix import Format, Layout, Matrix

Floats = npt.NDArray[np.float32]
_CHUNK = 1 << 16
"""Elements rounded at a time: they and the temporaries stay in the cache."""

_LARGEST = 1e18
"""Squares of values of this size, and sums of them, still fit float32; no weight comes near."""

_SPANS = (14.4, 15.0, 15.6, 16.4)
"""Steps that a group's range is first divided into: 15 is the exact range, more cut its upper end off."""

_DEPTHS = (8.0, 7.5, 7.0)
"""The same for groups around zero: the code given to the element farthest from zero."""


def quantize(values: npt.NDArray[np.float32], layout: Layout) -> Matrix:
    """Rounds ``values`` ``[rows, cols]`` to ``layout``.

    F32 is a copy; BF16 rounds to nearest, ties to even. Q8 divides a group's largest magnitude into 127
    steps. Q4 tries a few ranges per group and refines the best by alternating rounding with a least-squares
    fit of scale and minimum (the idea of llama.cpp's k-quants). Codes are chosen against the scale as stored.
    A group's result depends on its own values only.

    Raises ValueError for values that are not finite or beyond the layout's range, for columns that are not
    whole groups, and for Q8 with a minimum, which only exists to hold grids of files.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    if values.ndim != 2:
        raise ValueError(f"quantize takes a matrix, not {values.ndim} dimensions")
    if not np.isfinite(values).all():
        raise ValueError("cannot round values that are not finite")
    if layout.format is Format.F32:
        return Matrix(layout, values.copy())
    if layout.format is Format.BF16:
        return Matrix(layout, _bfloat16(values))
    if layout.group not in (16, 32):
        raise ValueError(f"groups have 16 or 32 elements, not {layout.group}")
    if values.size and np.abs(values).max() > _LARGEST:
        raise ValueError(f"a value is beyond the range of {layout.format.value}")
    if layout.format is Format.Q8 and layout.has_minimum:
        raise ValueError("rounding to q8 is symmetric: a layout with a minimum is not offered")
    rows, cols = values.shape
    if cols % layout.group:
        raise ValueError(f"{cols} columns are not whole groups of {layout.group}")

    groups = values.reshape(-1, layout.group)
    codes = np.empty(groups.shape, dtype=np.int8 if layout.format is Format.Q8 else np.uint8)
    scale_type = np.float32 if layout.wide_scales else np.float16
    scale = np.empty((len(groups), 1), dtype=scale_type)
    minimum = np.empty((len(groups), 1), dtype=scale_type) if layout.has_minimum else None
    step = _CHUNK // layout.group
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        codes[part], scale[part], low = _round_groups(groups[part], layout)
        if minimum is not None:
            minimum[part] = low
    return Matrix(
        layout,
        codes.reshape(rows, cols),
        scale.reshape(rows, -1),
        None if minimum is None else minimum.reshape(rows, -1),
    )


def _bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    if ((rounded & np.uint16(0x7F80)) == np.uint16(0x7F80)).any():
        raise ValueError("a value is beyond the range of bf16")
    return rounded


def _round_groups(x: Floats, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """Codes ``[n, group]`` of groups ``[n, group]``, and scale and minimum ``[n, 1]`` as stored."""
    minimum = np.zeros((len(x), 1), dtype=np.float32)
    if layout.format is Format.Q8:
        lowest, highest, offset = -128, 127, 0
        largest = np.abs(x).max(axis=1, keepdims=True)
        scale = largest / np.float32(127)
        if not layout.wide_scales:
            # A tiny scale has few bits in float16: rounded down, the largest elements would be cut off.
            scale = _half(scale)
            above = np.nextafter(scale.astype(np.float16), np.float16(np.inf)).astype(np.float32)
            scale = np.where(scale * np.float32(127.5) < largest, above, scale)
    else:
        lowest, highest, offset = 0, 15, 0 if layout.has_minimum else 8
        if layout.has_minimum:
            scale, minimum = _fit_range(x)
        else:
            scale = _fit_around_zero(x)
        if not layout.wide_scales:
            scale, minimum = _half(scale), _half(minimum)
    codes = _codes(x, scale, minimum, lowest - offset, highest - offset)
    codes += np.float32(offset)
    return codes, scale, minimum


def _half(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("a group's scale or minimum is beyond the range of float16; use wide scales")
    return halves.astype(np.float32)


def _codes(x: Floats, scale: Floats, minimum: Floats, lowest: int, highest: int) -> Floats:
    used = np.abs(scale) >= np.finfo(np.float32).tiny
    inverse = np.where(used, np.float32(1) / np.where(used, scale, np.float32(1)), np.float32(0))
    codes = x - minimum
    codes *= inverse
    np.rint(codes, out=codes)
    return np.clip(codes, np.float32(lowest), np.float32(highest), out=codes)


def _dot(a: Floats, b: Floats) -> Floats:
    products: Floats = np.einsum("ij,ij->i", a, b)
    return products[:, None]


def _squared_error(x: Floats, codes: Floats, scale: Floats, minimum: Floats) -> Floats:
    error = codes * scale
    error += minimum
    error -= x
    return _dot(error, error)


def _fit_range(x: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum ``[n, 1]`` for codes 0..15."""
    lowest = x.min(axis=1, keepdims=True)
    extent = x.max(axis=1, keepdims=True) - lowest
    total = x.sum(axis=1, keepdims=True)
    size = np.float32(x.shape[1])

    def refit(scale: Floats, minimum: Floats) -> tuple[Floats, Floats, Floats]:
        codes = _codes(x, scale, minimum, 0, 15)
        first, second = codes.sum(axis=1, keepdims=True), _dot(codes, codes)
        spread = size * second - first * first  # an integer below 2^24: exact
        solvable = spread > 0
        slope = (size * _dot(codes, x) - first * total) / np.where(solvable, spread, np.float32(1))
        scale = np.where(solvable, slope, scale)
        minimum = np.where(solvable, (total - scale * first) / size, minimum)
        return scale, minimum, codes

    best = np.full_like(lowest, np.inf)
    scale, minimum = np.zeros_like(lowest), lowest
    for span in _SPANS:
        tried_scale, tried_minimum, codes = refit(extent / np.float32(span), lowest)
        error = _squared_error(x, codes, tried_scale, tried_minimum)
        better = error < best
        best = np.where(better, error, best)
        scale = np.where(better, tried_scale, scale)
        minimum = np.where(better, tried_minimum, minimum)
    for _ in range(2):
        scale, minimum, _codes_used = refit(scale, minimum)
    return scale, minimum


def _fit_around_zero(x: Floats) -> Floats:
    """Scale ``[n, 1]`` for codes -8..7; it is negative where the element farthest from zero is positive."""
    farthest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    none = np.zeros_like(farthest)

    def refit(scale: Floats) -> tuple[Floats, Floats]:
        codes = _codes(x, scale, none, -8, 7)
        norm = _dot(codes, codes)
        return np.where(norm > 0, _dot(codes, x) / np.where(norm > 0, norm, np.float32(1)), scale), codes

    best, scale = np.full_like(farthest, np.inf), none
    for depth in _DEPTHS:
        tried, codes = refit(farthest / np.float32(-depth))
        error = _squared_error(x, codes, tried, none)
        scale = np.where(error < best, tried, scale)
        best = np.minimum(best, error)
    for _ in range(2):
        scale, _codes_used = refit(scale)
    return scale
