"""Reading GGUF headers: what is right, and what is damaged or hostile."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.gguf import GGUFFile
from tenfold.checkpoint.gguf_write import gguf_string, gguf_value
from tests.helpers.model_files import Tensors, encode, write_gguf


def _counts(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def _tensor(
    name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    rank = len(dims) if rank is None else rank
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def _open(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(str(path))


def test_metadata_of_every_type_as_another_writer_wrote_them(tmp_path: Path) -> None:
    """Package gguf's writer and this reader agree on every value type."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    numbers = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300, "bool": True,
        "string": "é\0€",
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        expected[f"x.{kind}"] = value
    arrays = {
        "ints": [1, -2, 3],
        "floats": [0.5, -1.5],
        "strings": ["", "a", "ß" * 99],
        "bools": [True, False],
    }
    for name, values in arrays.items():
        writer.add_array(f"x.{name}", values)
        expected[f"x.{name}"] = values
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("m", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(str(path))
    assert file.metadata == expected
    tensor = file.tensors["m"]
    assert (tensor.shape, tensor.kind.name, tensor.size) == ((2, 32), "F32", 256)
    np.testing.assert_array_equal(file.mapped.view(tensor.offset, 256).view("<f4"), matrix.ravel())
    file.close()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    """The data begin at the next multiple of general.alignment, in both versions."""
    head = _counts(1, 1, version) + gguf_string("general.alignment") + gguf_value(alignment)
    head += _tensor("a", [4, 3])
    start = -(-len(head) // alignment) * alignment
    file = _open(tmp_path, head + bytes(start - len(head)) + bytes(48))
    assert file.tensors["a"].offset == start
    assert file.tensors["a"].shape == (3, 4)
    file.close()


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    """262144 tokens with scores and types take well under a second, so that opening a model stays instant."""
    count = 262144
    tokens = b"".join(gguf_string(f"tok{n:06}") for n in range(count))
    head = _counts(0, 3) + gguf_string("t") + struct.pack("<IIQ", 9, 8, count) + tokens
    head += gguf_string("scores") + struct.pack("<IIQ", 9, 6, count) + bytes(4 * count)
    head += gguf_string("types") + struct.pack("<IIQ", 9, 5, count) + bytes(4 * count)
    start = time.process_time()
    file = _open(tmp_path, head)
    assert time.process_time() - start < 0.5
    assert file.metadata["t"][-1] == "tok262143"
    assert file.metadata["scores"] == [0.0] * count
    file.close()


def _array(kind: int, count: int, content: bytes = b"") -> bytes:
    return _counts(0, 1) + gguf_string("key") + struct.pack("<IIQ", 9, kind, count) + content


HOSTILE: dict[str, tuple[bytes, str]] = {
    "not gguf": (b"PK\3\4" + bytes(64), "not a GGUF file"),
    "only magic": (b"GGUF", "version runs past the end"),
    "version 1": (_counts(0, 0, 1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (_counts(1 << 60, 0), "tensor count is 1152921504606846976"),
    "huge key count": (_counts(0, 1 << 60), "metadata count is 1152921504606846976"),
    "more keys than file": (_counts(0, 60000), "runs past the end"),
    "more tensors than file": (_counts(60000, 0), "runs past the end"),
    "key longer than file": (_counts(0, 1) + struct.pack("<Q", 1 << 62), "metadata key runs past the end"),
    "negative string length": (_counts(0, 1) + b"\xff" * 8, "runs past the end"),
    "string past the end": (
        _counts(0, 1) + gguf_string("key") + struct.pack("<IQ", 8, 100) + b"abc",
        "'key' runs past the end",
    ),
    "unknown value type": (_counts(0, 1) + gguf_string("key") + struct.pack("<IQ", 99, 0), "unknown type 99"),
    "unknown element type": (_array(13, 1, bytes(64)), "unknown type 13"),
    "array of arrays": (_array(9, 1, struct.pack("<IIQ", 9, 9, 1) * 5000), "array of arrays"),
    "huge number array": (_array(0, 1 << 60), "has 1152921504606846976 elements"),
    "huge string array": (_array(8, 1 << 60), "has 1152921504606846976 elements"),
    "long number array": (_array(12, 1 << 20, bytes(64)), "runs past the end"),
    "long string array": (_array(8, 1 << 20, bytes(64)), "runs past the end"),
    "element past the end": (
        _array(8, 2, gguf_string("a") + struct.pack("<Q", 1 << 63)),
        "element 1 of 'key'",
    ),
    "array cut in a length": (
        _array(8, 2, gguf_string("abcdefgh") + b"1234"),
        "element 1 of 'key' runs past",
    ),
    "element not utf-8": (
        _array(8, 2, gguf_string("a") + gguf_string(b"\xc3\x28")),
        "element 1 of 'key' is not UTF-8",
    ),
    "key not utf-8": (_counts(0, 1) + gguf_string(b"\xff\xfe") + gguf_value(1), "metadata key is not UTF-8"),
    "value not utf-8": (
        _counts(0, 1) + gguf_string("key") + struct.pack("<I", 8) + gguf_string(b"\x80"),
        "'key' is not UTF-8",
    ),
    "bad boolean": (_counts(0, 1) + gguf_string("key") + struct.pack("<IB", 7, 2), "not a boolean"),
    "bad boolean array": (_array(7, 2, b"\1\2"), "not a boolean"),
    "key twice": (_counts(0, 2) + 2 * (gguf_string("key") + gguf_value(1)), "'key' appears twice"),
    "tensor twice": (_counts(2, 0) + 2 * _tensor("a", [4]) + bytes(256), "'a' appears twice"),
    "tensor name not utf-8": (_counts(1, 0) + _tensor(b"\xff", [4]) + bytes(64), "tensor name is not UTF-8"),
    "rank zero": (_counts(1, 0) + _tensor("a", []) + bytes(64), "has 0 dimensions"),
    "huge rank": (_counts(1, 0) + _tensor("a", [4], rank=1 << 31) + bytes(64), "has 2147483648 dimensions"),
    "zero dimension": (_counts(1, 0) + _tensor("a", [4, 0]) + bytes(64), "impossible shape"),
    "dimension of 2^63": (_counts(1, 0) + _tensor("a", [1 << 63]) + bytes(64), "impossible shape"),
    "product of 2^160": (_counts(1, 0) + _tensor("a", [1 << 40] * 4) + bytes(64), "past the end of the file"),
    "product wraps to 0": (
        _counts(1, 0) + _tensor("a", [1 << 32] * 2) + bytes(64),
        "past the end of the file",
    ),
    "part of a block": (
        _counts(1, 0) + _tensor("a", [33], kind=8) + bytes(64),
        "rows of 33, not whole Q8_0 blocks",
    ),
    "unsupported type": (_counts(1, 0) + _tensor("a", [256], kind=16) + bytes(64), "type IQ2_XXS"),
    "unknown type": (_counts(1, 0) + _tensor("a", [256], kind=4) + bytes(64), "type number 4"),
    "offset unaligned": (_counts(1, 0) + _tensor("a", [4], offset=8) + bytes(64), "not a multiple of 32"),
    "offset of 2^63": (_counts(1, 0) + _tensor("a", [4], offset=1 << 63) + bytes(64), "past the end"),
    "offset wraps": (_counts(1, 0) + _tensor("a", [4], offset=(1 << 64) - 32) + bytes(64), "past the end"),
    "data past the end": (_counts(1, 0) + _tensor("a", [24]) + bytes(64), "past the file's end"),
    "overlap": (
        _counts(2, 0) + _tensor("a", [16]) + _tensor("b", [4], offset=32) + bytes(256),
        "'a' and 'b' overlap",
    ),
    "alignment zero": (
        _counts(0, 1) + gguf_string("general.alignment") + gguf_value(0),
        "not a power of two",
    ),
    "alignment a string": (
        _counts(0, 1) + gguf_string("general.alignment") + gguf_value("x"),
        "not a power of two",
    ),
    "alignment 48": (_counts(0, 1) + gguf_string("general.alignment") + gguf_value(48), "not a power of two"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, case: str) -> None:
    """Each lie of a file ends in an error that names the file and what is wrong."""
    content, message = HOSTILE[case]
    with pytest.raises(CheckpointError) as caught:
        _open(tmp_path, content)
    assert message in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    """A sparse file of terabytes that claims one endless string costs neither time nor memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(_counts(0, 1) + gguf_string("key") + struct.pack("<IQ", 8, 1 << 39))
    try:
        with path.open("r+b") as file:
            file.truncate(1 << 40)
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    with pytest.raises(CheckpointError, match="larger than the 64 MiB"):
        GGUFFile(str(path))


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """Missing files, folders and empty files get an error of their own."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="not a regular file"):
        GGUFFile(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="empty"):
        GGUFFile(str(tmp_path / "empty"))


def test_data_is_where_the_helper_wrote_it(tmp_path: Path) -> None:
    """Several tensors of different types keep their own bytes."""
    rng = np.random.default_rng(0)
    values = {
        kind: rng.standard_normal((3, 64)).astype(np.float32) for kind in ("F32", "Q8_0", "Q4_1", "BF16")
    }
    encoded = {kind: encode(matrix, kind) for kind, matrix in values.items()}
    tensors: Tensors = {f"t.{kind}": ((3, 64), kind, data) for kind, data in encoded.items()}
    file = GGUFFile(str(write_gguf(tmp_path / "model.gguf", {}, tensors)))
    for kind, data in encoded.items():
        tensor = file.tensors[f"t.{kind}"]
        assert tensor.size == len(data)
        assert file.mapped.view(tensor.offset, tensor.size).tobytes() == data
    file.close()
