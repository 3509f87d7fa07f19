"""Rounding matrices to layouts."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tenfold.formats.matrix import Format, Layout, Matrix
from tenfold.formats.rounding import quantize

LAYOUTS = [
    Layout(Format.F32),
    Layout(Format.BF16),
    Layout(Format.Q8, group=32),
    Layout(Format.Q8, group=16, wide_scales=True),
    Layout(Format.Q4, group=32, has_minimum=True),
    Layout(Format.Q4, group=32, has_minimum=True, wide_scales=True),
    Layout(Format.Q4, group=16, has_minimum=True),
    Layout(Format.Q4, group=32),
]

matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([32, 96])),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def _normal(rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def _rms(error: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.square(error.astype(np.float64)).mean()))


@settings(max_examples=200, deadline=None)
@given(matrices, st.sampled_from(LAYOUTS))
def test_no_weight_moves_by_more_than_a_step(values: npt.NDArray[np.float32], layout: Layout) -> None:
    """Any finite matrix gives weights near what was given, or is refused for its size; nothing overflows."""
    magnitude = np.abs(values).max()
    try:
        with np.errstate(all="raise", under="ignore"):
            matrix = quantize(values, layout)
    except ValueError as error:
        assert "beyond the range" in str(error)
        assert magnitude > 6e4
        return
    got = matrix.dequantize()
    assert got.shape == values.shape
    assert np.isfinite(got).all()
    if layout.format is Format.F32:
        np.testing.assert_array_equal(got, values)
    elif layout.format is Format.BF16:
        assert (np.abs(got - values) <= np.abs(values) * 2.0**-8 + 1e-38).all()
    else:
        assert matrix.codes.min() >= (-128 if layout.format is Format.Q8 else 0)
        assert matrix.codes.max() <= (127 if layout.format is Format.Q8 else 15)
        # The coarsest grid covers twice the magnitude in 15 steps. The fit may cut the ends off by a step
        # or so, and float16 cannot hold a scale below 6e-8.
        step = 2 * magnitude / (254 if layout.format is Format.Q8 else 15)
        assert np.abs(got - values).max() <= 1.6 * step + 127 * 2.0**-24


def test_bf16_rounds_to_nearest_even() -> None:
    """Bit for bit as package gguf rounds, ties and carries into the exponent included."""
    bits = np.random.default_rng(0).integers(0, 0x7F000000, 4096, dtype=np.uint32)
    bits[:2048] = (bits[:2048] & 0xFFFF0000) | 0x8000
    values = bits.view(np.float32).reshape(64, 64)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    np.testing.assert_array_equal(quantize(values, Layout(Format.BF16)).codes, expected)


def test_q8_is_half_a_step_off_at_most() -> None:
    """Codes are chosen against the scale as it is stored, so its own rounding adds no error."""
    values = _normal(64, 256)
    matrix = quantize(values, Layout(Format.Q8, group=32))
    assert matrix.scale is not None
    step = matrix.scale.astype(np.float32).repeat(32, axis=1)
    assert (np.abs(matrix.dequantize() - values) <= step * 0.5001).all()


@pytest.mark.parametrize("size", [1e-6, 3e-6, 1e-5, 1e-4])
def test_tiny_groups_are_not_cut_off(size: float) -> None:
    """Where float16 has few bits left for a scale, the largest weights still fit the codes."""
    values = _normal(16, 64) * np.float32(size)
    matrix = quantize(values, Layout(Format.Q8, group=32))
    assert matrix.scale is not None
    step = matrix.scale.astype(np.float32).repeat(32, axis=1)
    assert (np.abs(matrix.dequantize() - values) <= step * 0.51).all()


def test_q4_is_better_than_the_plain_range() -> None:
    """The search earns its time: a tenth less error than minimum and maximum give on normal weights."""
    values = _normal(256, 1024)
    with_minimum = quantize(values, Layout(Format.Q4, group=32, has_minimum=True)).dequantize() - values
    plain = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    plain_error = gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_1) - values
    assert _rms(with_minimum) < 0.92 * _rms(plain_error)
    symmetric = quantize(values, Layout(Format.Q4, group=32)).dequantize() - values
    plain = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    plain_error = gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_0) - values
    assert _rms(symmetric) < 0.97 * _rms(plain_error)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.group])
def test_a_matrix_on_the_grid_comes_back(layout: Layout) -> None:
    """Rounding what already is on such a grid loses nothing but the last bit of a scale."""
    rng = np.random.default_rng(5)
    low, high, dtype = (-127, 127, np.int8) if layout.format is Format.Q8 else (0, 15, np.uint8)
    codes = rng.integers(low, high + 1, (8, 128)).astype(dtype)
    codes[:, :: layout.group], codes[:, 1 :: layout.group] = low, high
    groups = (8, 128 // layout.group)
    scale_type = np.float32 if layout.wide_scales else np.float16
    scale = rng.uniform(0.01, 0.02, groups).astype(scale_type)
    minimum = rng.uniform(-0.2, 0.0, groups).astype(scale_type) if layout.has_minimum else None
    values = Matrix(layout, codes, scale, minimum).dequantize()
    again = quantize(values, layout)
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_allclose(again.dequantize(), values, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_see_each_other(layout: Layout) -> None:
    """A matrix read in other blocks is the same matrix."""
    values = _normal(300, 512)
    whole = quantize(values, layout).dequantize()
    parts = [quantize(values[at : at + 16], layout).dequantize() for at in range(0, 300, 16)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30])
def test_constant_groups(layout: Layout, value: float) -> None:
    """A group without a range divides by nothing, and nothing warns."""
    values = np.full((2, 32), value, dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = quantize(values, layout).dequantize()
    np.testing.assert_allclose(got, values, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(layout: Layout, bad: float) -> None:
    """One such value would spoil its whole group without a word."""
    values = _normal(2, 32)
    values[1, 7] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(values, layout)


def test_what_does_not_fit_a_layout_is_refused() -> None:
    """Each refusal says what is wrong."""
    with pytest.raises(ValueError, match="33 columns are not whole groups of 32"):
        quantize(_normal(2, 33), Layout(Format.Q8, group=32))
    with pytest.raises(ValueError, match="beyond the range of float16"):
        quantize(_normal(2, 32) * np.float32(1e9), Layout(Format.Q8, group=32))
    with pytest.raises(ValueError, match="beyond the range of bf16"):
        quantize(np.full((1, 2), 3.4e38, dtype=np.float32), Layout(Format.BF16))
    with pytest.raises(ValueError, match="symmetric"):
        quantize(_normal(2, 32), Layout(Format.Q8, group=32, has_minimum=True))
    with pytest.raises(ValueError, match="16 or 32"):
        quantize(_normal(2, 32), Layout(Format.Q8, group=8))
