"""Safetensors files: the header, and where the tensors are.

As with GGUF, all that the header says is checked before it is used. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.json_files import parse_json
from tenfold.checkpoint.mapped import MappedFile
from tenfold.formats.ggml import GGML_TYPES, GGMLType

MAX_HEADER_BYTES = 16 << 20
"""The shards of the largest models have headers of some hundred kilobytes."""

_KINDS = {"F32": GGML_TYPES[0], "F16": GGML_TYPES[1], "BF16": GGML_TYPES[30]}

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class SafetensorsTensor(msgspec.Struct, frozen=True):
    """A tensor of a file. Its data lies within the file and overlaps no other's."""

    shape: tuple[int, ...]
    kind: GGMLType
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""


class SafetensorsFile:
    """An opened file: ``tensors`` by name, and its mapping."""

    def __init__(self, path: str) -> None:
        """Maps the file and reads its header. Raises CheckpointError, naming file, tensor and byte offset."""
        self.path = path
        self.mapped = MappedFile(path)
        try:
            self.tensors: dict[str, SafetensorsTensor] = self._read_header()
        except BaseException:
            self.mapped.close()
            raise

    def _read_header(self) -> dict[str, SafetensorsTensor]:
        size = self.mapped.size
        length = int.from_bytes(self.mapped.map[:8], "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path}: the header of {length} bytes runs past the end of the file (byte 0): "
                "it is truncated, damaged or not a safetensors file"
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: the header of {length} bytes is too large (byte 0)")
        header = parse_json(self.mapped.map[8 : 8 + length], f"{self.path}: header (byte 8)")
        header.pop("__metadata__", None)
        tensors: dict[str, SafetensorsTensor] = {}
        for name, value in header.items():
            tensors[name] = self._tensor(name, value, 8 + length)
        free_from = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < free_from:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r:.80} overlaps another's data (byte {tensor.offset})"
                )
            free_from = tensor.offset + tensor.size
        return tensors

    def _tensor(self, name: str, value: Any, data_start: int) -> SafetensorsTensor:
        shown = f"{self.path}: tensor {name!r:.80}"
        try:
            entry = msgspec.convert(value, _Entry)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{shown}: {error!s:.200} (header, byte 8)") from error
        kind = _KINDS.get(entry.dtype)
        begin, end = entry.data_offsets
        offset = data_start + begin
        if kind is None:
            raise CheckpointError(
                f"{shown} (byte {offset}) has dtype {entry.dtype!r:.20}, which is not supported; "
                f"supported are {', '.join(_KINDS)}"
            )
        if len(entry.shape) not in (1, 2) or 0 in entry.shape:
            raise CheckpointError(
                f"{shown} (byte {offset}) has shape {entry.shape!r:.60}: no matrix or vector"
            )
        if end - begin != math.prod(entry.shape) * kind.block_bytes:
            raise CheckpointError(
                f"{shown} (byte {offset}): {end - begin} bytes are not what {kind.name} {entry.shape} takes"
            )
        if data_start + end > self.mapped.size:
            raise CheckpointError(f"{shown} (byte {offset}) runs past the end of the file: it is truncated")
        return SafetensorsTensor(tuple(entry.shape), kind, offset, end - begin)

    def close(self) -> None:
        """Unmaps the file."""
        self.mapped.close()
