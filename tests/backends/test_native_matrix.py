"""Matrices of every layout: packed and read back without a change, and multiplied as numpy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.formats.matrix import Format, Layout, Matrix
from tenfold.formats.rounding import quantize
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import LEVELS, core_program, linear_program, pack, wrapped

FLOATS = (Layout(Format.F32), Layout(Format.BF16))
GRIDS = tuple(
    Layout(format, group=group, wide_scales=wide, has_minimum=minimum)
    for format, group in ((Format.Q8, 16), (Format.Q8, 32), (Format.Q4, 32))
    for wide in (False, True)
    for minimum in (False, True)
)


def random_matrix(rng: np.random.Generator, rows: int, cols: int, layout: Layout) -> Matrix:
    """Any codes, scales of either sign and of different size a group, and minima unlike them."""
    if layout in FLOATS:
        return quantize(rng.standard_normal((rows, cols)).astype(np.float32), layout)
    groups = cols // layout.group
    scale_type = np.float32 if layout.wide_scales else np.float16
    if layout.format is Format.Q8:
        codes: npt.NDArray[Any] = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    else:
        codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    scale = (rng.choice([-1, 1], (rows, groups)) * rng.uniform(0.5, 2, (rows, groups)) / 128).astype(
        scale_type
    )
    minimum = (3 * rng.standard_normal((rows, groups))).astype(scale_type) if layout.has_minimum else None
    return Matrix(layout, codes, scale, minimum)


def exact_rows(rng: np.random.Generator, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Activations that int8 codes hold without error: a stretch of 32 is whole numbers up to 127 times a
    power of two, the largest 127; some have an outlier beside them, up to 127 * 128 of the same."""
    whole = rng.integers(-126, 127, (rows, cols // 32, 32))
    sign = rng.choice([-1, 1], (2, rows, cols // 32, 1))
    places = rng.permuted(np.tile(np.arange(32), (rows, cols // 32, 1)), axis=2)[:, :, :2]
    np.put_along_axis(whole, places[:, :, :1], 127 * sign[0], axis=2)
    outlier = np.flatnonzero(rng.random(whole.shape[:2]) < (0.3 if cols > 64 else 0.0))
    size = rng.integers(12000, 127 * 128 + 1, whole.shape[:2])
    stretches = whole.reshape(-1, 32)
    stretches[outlier, places.reshape(-1, 2)[outlier, 1]] = (size * sign[1, :, :, 0]).ravel()[outlier]
    values = stretches / 128.0
    return values.reshape(rows, cols).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 50),
    groups=st.integers(1, 4),
    odd=st.integers(1, 67),
    layout=st.sampled_from([*FLOATS, *GRIDS]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_packed_is_read_back(rows: int, groups: int, odd: int, layout: Layout, seed: int) -> None:
    """A packed row read back is the row that the matrix stands for, bit for bit."""
    cols = odd if layout in FLOATS else groups * 32
    matrix = random_matrix(np.random.default_rng(seed), rows, cols, layout)
    core = core_program(vocab=4)
    index = pack(core, matrix)
    read = np.stack([core.read_row(index, row) for row in range(rows)])
    np.testing.assert_array_equal(read, matrix.dequantize())


def multiply(inputs: npt.NDArray[np.float32], matrix: Matrix, **options: Any) -> npt.NDArray[np.float32]:
    """``inputs @ matrix.T`` by the core, all rows in one step, tokens in a scrambled order."""
    order = np.random.default_rng(0).permutation(len(inputs))
    table = np.zeros((len(matrix.codes), inputs.shape[1]), np.float32)
    table[: len(inputs)] = inputs
    program = wrapped(linear_program(table, matrix, max_rows=len(inputs), kv_pages=9, **options))
    pages = list(range(-(-len(inputs) // 16)))
    output = program.step(step_batch(Part(tokens=order.tolist(), pages=pages)))
    assert output.logits is not None
    result = np.empty_like(output.logits)
    result[order] = output.logits
    return result


@pytest.mark.parametrize("layout", [*FLOATS, *GRIDS], ids=repr)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 17, 30, 63, 64, 65, 130])
def test_linear_is_numpys(layout: Layout, rows: int) -> None:
    """Every kernel, with activations that its codes hold exactly, equals float64 arithmetic up to the
    rounding of float32 sums, at every size of tile; ISA levels and team sizes are equal to the bit."""
    rng = np.random.default_rng(rows)
    outputs = 137  # a partial last panel; no fewer than rows, which are tokens
    cols = 77 if layout in FLOATS else 160
    matrix = random_matrix(rng, outputs, cols, layout)
    if layout in FLOATS:
        inputs = rng.standard_normal((rows, cols)).astype(np.float32)
    else:
        inputs = exact_rows(rng, rows, cols)
    weights = matrix.dequantize().astype(np.float64)
    exact = inputs.astype(np.float64) @ weights.T
    size = np.abs(inputs.astype(np.float64)) @ np.abs(weights).T
    results = [multiply(inputs, matrix, isa=isa) for isa in LEVELS]
    results.append(multiply(inputs, matrix, threads=3))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert (np.abs(results[0] - exact) / size).max() < 2e-6


@pytest.mark.parametrize("layout", GRIDS, ids=repr)
def test_rounding_of_activations_stays_within_its_bound(layout: Layout) -> None:
    """With any activations the error is at most that of rounding them: half a step of each stretch's scale,
    which outliers (more than four times the row's root mean square) do not set."""
    rng = np.random.default_rng(3)
    rows, outputs, cols = 9, 33, 256
    matrix = random_matrix(rng, outputs, cols, layout)
    inputs = rng.standard_normal((rows, cols)).astype(np.float32)
    inputs[rng.random(inputs.shape) < 0.01] *= 30
    stretches = np.abs(inputs.astype(np.float64)).reshape(rows, -1, 32)
    outlier = stretches**2 > 16.0 * (inputs.astype(np.float64) ** 2).mean(axis=1)[:, None, None]
    split = outlier.any(axis=2)
    assert 0 < split.sum() < split.size
    largest = np.maximum(np.where(outlier, 0, stretches).max(axis=2), stretches.max(axis=2) / 128)
    step = largest / 127
    weights = matrix.dequantize().astype(np.float64)
    bound = np.repeat(step / 2 * 1.02, 32, axis=1) @ np.abs(weights).T
    size = np.abs(inputs.astype(np.float64)) @ np.abs(weights).T
    error = np.abs(multiply(inputs, matrix) - inputs.astype(np.float64) @ weights.T)
    assert (error <= bound + 2e-6 * size).all()
    assert error.max() > 1e-6


@pytest.mark.parametrize("layout", GRIDS, ids=repr)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_stay_none(layout: Layout, broken: float) -> None:
    """An infinity or NaN among a row's activations makes all that row's results NaN, at every ISA level, and
    leaves its neighbours alone; a row whose squares are too large is computed."""
    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, 20, 64, layout)
    inputs = exact_rows(rng, 5, 64)
    sound = multiply(inputs, matrix)
    inputs[1, 40] = broken
    inputs[3] *= np.float32(2.0**70)
    for isa in LEVELS:
        result = multiply(inputs, matrix, isa=isa)
        assert np.isnan(result[1]).all()
        np.testing.assert_array_equal(result[[0, 2, 4]], sound[[0, 2, 4]])
        np.testing.assert_array_equal(result[3], sound[3] * np.float32(2.0**70))


def test_matrices_that_do_not_fit_are_refused() -> None:
    """Shapes, types and parts of a matrix are checked before anything is packed."""
    core = core_program(vocab=4)
    q8 = core.add_matrix(20, 64, "q8", 32, False, False)
    codes, scale = np.zeros((16, 64), np.int8), np.ones((16, 2), np.float16)
    core.write_rows(q8, 0, codes, scale, None)
    for arguments in (
        (q8, 0, codes.astype(np.uint8), scale, None),
        (q8, 0, codes, scale.view(np.int16), None),
        (q8, 0, codes, scale.astype(np.float32), None),
        (q8, 0, codes, scale, scale),
        (q8, 0, codes, None, None),
        (q8, 0, codes[:, :32], scale, None),
        (q8, 0, codes, scale[:, :1], None),
        (q8, 0, codes, scale[:8], None),
        (q8, 16, codes, scale, None),
        (q8, 8, codes[:4], scale[:4], None),
        (q8, -16, codes, scale, None),
        (q8 + 1, 0, codes, scale, None),
        (-1, 0, codes, scale, None),
    ):
        with pytest.raises(ValueError, match=r"write_rows|no such matrix"):
            core.write_rows(*arguments)
    for bad in (
        (16, 48, "q8", 32, False, False),
        (16, 64, "q4", 16, False, False),
        (16, 64, "q8", 0, False, False),
        (16, 64, "f32", 32, False, False),
        (0, 64, "f32", 0, False, False),
        (16, -1, "bf16", 0, False, False),
        (2**31 - 1, 2**31 - 1, "f32", 0, False, False),
        (16, 64, "q5", 32, False, False),
    ):
        with pytest.raises(ValueError, match=r"matrix|format"):
            core.add_matrix(*bad)
    with pytest.raises(ValueError, match="row out of range"):
        core.read_row(q8, 20)
