"""GGUF files: header, metadata and where the tensors are.

All that a file says of itself (counts, lengths, types, shapes, offsets) is checked before it is used, so that
a damaged or hostile file ends in a CheckpointError, with time and memory bounded by the limits below.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

import msgspec
import numpy as np

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.mapped import MappedFile
from tenfold.formats.ggml import GGML_TYPES, UNSUPPORTED_NAMES, GGMLType

MAX_HEADER_BYTES = 64 << 20
"""Metadata and tensor table; the largest vocabularies take about 12 MB."""
MAX_ENTRIES = 1 << 16
"""Metadata keys, and tensors."""
MAX_ARRAY_ELEMENTS = 1 << 22
"""Elements of all metadata arrays together; the largest vocabularies have about 1.5 million."""
MAX_DIMENSION = 1 << 40
"""Of a tensor."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types by number, as struct and numpy codes."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GGUFTensor(msgspec.Struct, frozen=True):
    """A tensor of the file. Its data lies within the file and overlaps no other's."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, ``(rows, cols)``: the reverse of the order in the file."""
    kind: GGMLType
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""


class GGUFFile:
    """An opened GGUF file: ``metadata`` by key (arrays are lists) and ``tensors`` by the file's own names."""

    def __init__(self, path: str) -> None:
        """Maps the file, reads its header. Raises CheckpointError, naming file, key or tensor, and byte."""
        self.path = path
        self.mapped = MappedFile(path)
        try:
            header = _Header(self.mapped)
            self.version: int = header.version
            self.metadata: dict[str, Any] = header.metadata
            self.tensors: dict[str, GGUFTensor] = header.tensors
        except BaseException:
            self.mapped.close()
            raise
        self.mapped.release(0, header.position)

    def close(self) -> None:
        """Unmaps the file."""
        self.mapped.close()


class _Header:
    """One pass over the header."""

    def __init__(self, mapped: MappedFile) -> None:
        self.path = mapped.path
        self.data = mapped.map
        self.size = mapped.size
        self.limit = min(mapped.size, MAX_HEADER_BYTES)
        self.position = 0
        self.elements = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}

        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        self.position = 4
        self.version = int(self.scalar("I", "version"))
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            note = "a big-endian file" if swapped in (2, 3) else f"version {self.version}"
            self.fail(f"{note} is not supported, only versions 2 and 3 in little-endian order", 4)
        tensor_count = self.count("tensor count")
        key_count = self.count("metadata count")
        for _ in range(key_count):
            self.read_key()
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r:.40}, not a power of two")
        relative = [self.read_tensor(alignment) for _ in range(tensor_count)]
        self.place_tensors(relative, -(-self.position // alignment) * alignment)

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {message} (byte {self.position if position is None else position})"
        )

    def need(self, length: int, what: str) -> None:
        if length > self.limit - self.position:
            if self.limit < self.size:
                self.fail(f"{what}: the header is larger than the {MAX_HEADER_BYTES >> 20} MiB that are read")
            self.fail(f"{what} runs past the end of the file: it is truncated or damaged")

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        if code == "?" and self.data[self.position] > 1:
            self.fail(f"{what} is not a boolean")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def count(self, what: str) -> int:
        value = int(self.scalar("Q", what))
        if value > MAX_ENTRIES:
            self.fail(f"{what} is {value}, more than {MAX_ENTRIES}", self.position - 8)
        return value

    def string(self, what: str) -> str:
        length = int(self.scalar("Q", f"length of {what}"))
        self.need(length, what)
        start = self.position
        self.position += length
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", start)

    def read_key(self) -> None:
        start = self.position
        key = self.string("metadata key")
        if key in self.metadata:
            self.fail(f"metadata key {key!r:.80} appears twice", start)
        self.metadata[key] = self.value(int(self.scalar("I", f"type of {key!r:.80}")), f"{key!r:.80}")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"{key} has the unknown type {kind}", self.position - 4)
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> list[Any]:
        start = self.position
        kind = int(self.scalar("I", f"element type of {key}"))
        count = int(self.scalar("Q", f"length of {key}"))
        self.elements += count
        if self.elements > MAX_ARRAY_ELEMENTS:
            self.fail(f"{key} has {count} elements; all arrays may have {MAX_ARRAY_ELEMENTS}", start)
        if kind == _STRING:
            return self.strings(count, key)
        if kind == _ARRAY:
            self.fail(f"{key} is an array of arrays, which is not supported", start)
        if kind not in _SCALARS:
            self.fail(f"{key} has elements of the unknown type {kind}", start)
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        self.need(count * dtype.itemsize, key)
        raw = self.data[self.position : self.position + count * dtype.itemsize]
        if dtype.kind == "b" and raw.strip(b"\0\1"):
            self.fail(f"{key} has an element that is not a boolean")
        self.position += len(raw)
        values: list[Any] = np.frombuffer(raw, dtype=dtype).tolist()
        return values

    def strings(self, count: int, key: str) -> list[str]:
        # A vocabulary has hundreds of thousands: this loop is most of the time that opening a file takes.
        self.need(count * 8, key)
        data, limit, position = self.data, self.limit, self.position
        unpack, out = _LENGTH.unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                end = start + unpack(data, position)[0]
                if end > limit:
                    break
                out.append(data[start:end].decode())
                position = end
        except UnicodeDecodeError:
            self.fail(f"element {len(out)} of {key} is not UTF-8", position)
        except struct.error:
            pass
        self.position = position
        if len(out) < count:
            self.need(limit - position + 1, f"element {len(out)} of {key}")
        return out

    def read_tensor(self, alignment: int) -> GGUFTensor:
        """An entry of the tensor table, its offset still relative to the start of the data."""
        start = self.position
        name = self.string("tensor name")
        shown = f"tensor {name!r:.80}"
        if name in self.tensors:
            self.fail(f"{shown} appears twice", start)
        rank = int(self.scalar("I", f"rank of {shown}"))
        if not 1 <= rank <= 4:
            self.fail(f"{shown} has {rank} dimensions", self.position - 4)
        shape = [int(self.scalar("Q", f"shape of {shown}")) for _ in range(rank)][::-1]
        if not all(0 < size <= MAX_DIMENSION for size in shape):
            self.fail(f"{shown} has the impossible shape {shape}", start)
        number = int(self.scalar("I", f"type of {shown}"))
        kind = GGML_TYPES.get(number)
        if kind is None:
            word = UNSUPPORTED_NAMES.get(number, f"number {number}")
            self.fail(f"{shown} has type {word}, which is not supported", self.position - 4)
        if shape[-1] % kind.block:
            self.fail(f"{shown} has rows of {shape[-1]}, not whole {kind.name} blocks of {kind.block}", start)
        offset = int(self.scalar("Q", f"offset of {shown}"))
        if offset % alignment:
            self.fail(f"{shown} has offset {offset}, not a multiple of {alignment}", self.position - 8)
        size = kind.block_bytes * (shape[-1] // kind.block)
        for rows in shape[:-1]:
            size *= rows
        # Shape and offset are bounded here by the file itself, so sums below stay small integers.
        if size > self.size or offset > self.size - size:
            self.fail(f"{shown}: {size} bytes at data offset {offset} run past the end of the file", start)
        tensor = GGUFTensor(name, tuple(shape), kind, offset, size)
        self.tensors[name] = tensor
        return tensor

    def place_tensors(self, relative: list[GGUFTensor], data_start: int) -> None:
        """Makes offsets absolute, and sees that data are within the file and apart."""
        previous, free_from = "", data_start
        for tensor in sorted(relative, key=lambda tensor: tensor.offset):
            offset = data_start + tensor.offset
            if offset < free_from:
                self.fail(f"tensors {previous!r:.80} and {tensor.name!r:.80} overlap", offset)
            if offset + tensor.size > self.size:
                self.fail(f"tensor {tensor.name!r:.80}: {tensor.size} bytes run past the file's end", offset)
            self.tensors[tensor.name] = msgspec.structs.replace(tensor, offset=offset)
            previous, free_from = tensor.name, offset + tensor.size
