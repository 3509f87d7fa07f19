"""Re-laying GGUF's blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tenfold.formats.ggml import GGML_TYPES, NonFiniteError, relay
from tenfold.formats.matrix import Format
from tests.helpers.model_files import SCALES_AT, encode, random_blocks

QUANTIZED = {number: kind for number, kind in GGML_TYPES.items() if kind.unpack is not None}


def _names(number: int) -> str:
    return GGML_TYPES[number].name


@pytest.mark.parametrize("number", QUANTIZED, ids=_names)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (33, 512), (64, 1024)])
def test_the_same_matrix_as_the_reference(number: int, rows: int, cols: int) -> None:
    """Every bit pattern of codes and scales stands for the very floats that package gguf gives."""
    kind = GGML_TYPES[number]
    raw = random_blocks(kind.name, rows, cols, np.random.default_rng(rows))
    matrix = relay(raw, kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    np.testing.assert_array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("number", QUANTIZED, ids=_names)
def test_the_parts_are_as_the_layout_says(number: int) -> None:
    """Backends rely on the dtypes and shapes that ``Matrix`` documents."""
    kind = GGML_TYPES[number]
    matrix = relay(random_blocks(kind.name, 3, 512, np.random.default_rng(0)), kind)
    layout = matrix.layout
    assert layout == kind.layout
    assert matrix.codes.dtype == (np.int8 if layout.format is Format.Q8 else np.uint8)
    assert matrix.codes.shape == (3, 512)
    parts = [matrix.scale] + ([matrix.minimum] if layout.has_minimum else [])
    for part in parts:
        assert part is not None
        assert part.dtype == (np.float32 if layout.wide_scales else np.float16)
        assert part.shape == (3, 512 // layout.group)
    assert (matrix.minimum is not None) == layout.has_minimum


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_keep_their_bits(name: str) -> None:
    """Plain floats are not rounded on the way, subnormals and signed zeros included."""
    values = np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32)
    values[0, :4] = [0.0, -0.0, 1e-7, -6e-8]
    number = gguf.GGMLQuantizationType[name].value
    raw = np.frombuffer(encode(values, name), dtype=np.uint8).reshape(5, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    got = relay(raw, GGML_TYPES[number]).dequantize()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("number", GGML_TYPES, ids=_names)
def test_nothing_of_the_input_is_kept(number: int) -> None:
    """The file's pages may be unmapped as soon as a block was re-laid, even where a view would do."""
    kind = GGML_TYPES[number]
    raw = (
        random_blocks(kind.name, 1, kind.block, np.random.default_rng(2))
        if kind.unpack
        else np.full((1, 4), 0x3C, dtype=np.uint8)
    )
    matrix = relay(raw, kind)
    before = matrix.dequantize().copy()
    raw[:] ^= 0x15
    np.testing.assert_array_equal(matrix.dequantize(), before)


def test_minus_128_is_a_code() -> None:
    """Q8_0 files of other writers use the whole range of int8."""
    raw = np.full((1, 34), 0x80, dtype=np.uint8)
    raw[0, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    assert (relay(raw, GGML_TYPES[8]).dequantize() == -64.0).all()


@pytest.mark.parametrize("name", SCALES_AT)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_found(name: str, bad: float) -> None:
    """A damaged scale never becomes a weight: the error has the row, and the byte within half a block."""
    number = gguf.GGMLQuantizationType[name].value
    kind = GGML_TYPES[number]
    for at in SCALES_AT[name]:
        raw = random_blocks(name, 4, 2 * kind.block, np.random.default_rng(3))
        raw[2, kind.block_bytes + at :][:2] = np.array([bad], dtype="<f2").view(np.uint8)
        with pytest.raises(NonFiniteError) as caught:
            relay(raw, kind)
        assert caught.value.row == 2
        assert kind.block_bytes <= caught.value.byte < 2 * kind.block_bytes


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_mxfp4_scales_beyond_float32_are_found(exponent: int) -> None:
    """An e8m0 scale may be NaN, or so large that a weight overflows."""
    raw = np.full((1, 17), exponent, dtype=np.uint8)
    with pytest.raises(NonFiniteError):
        relay(raw, GGML_TYPES[39])


@pytest.mark.parametrize(("name", "bits"), [("F32", "<u4"), ("F16", "<u2"), ("BF16", "<u2")])
def test_floats_that_are_not_finite_are_found(name: str, bits: str) -> None:
    """The error names the row and the byte of the first one."""
    kind = GGML_TYPES[gguf.GGMLQuantizationType[name].value]
    values = np.zeros((3, 8), dtype=bits)
    values[1, 5] = {"F32": 0xFF800000, "F16": 0x7E00, "BF16": 0x7F80}[name]
    with pytest.raises(NonFiniteError) as caught:
        relay(values.view(np.uint8), kind)
    assert (caught.value.row, caught.value.byte) == (1, 5 * kind.block_bytes)
