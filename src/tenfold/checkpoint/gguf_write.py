"""Writing GGUF files: version 3, little-endian, aligned to 32 bytes, with the tensors' data as a stream.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

ALIGNMENT = 32


class NewTensor(msgspec.Struct, frozen=True):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, ``(rows, cols)``."""
    kind: int
    """The type's number; see `tenfold.formats.ggml.GGML_TYPES`."""
    size: int
    """Bytes of data."""
    data: Callable[[], Iterable[bytes]]
    """Makes the data, in pieces; called once, when it is this tensor's turn."""


def gguf_string(text: str | bytes) -> bytes:
    """A string of a GGUF file."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A metadata value with its type: bool, int as uint32, float as float32, str, or a list of such; a list's
    ints are int32, as llama.cpp wants the types of tokens."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if value and type(value[0]) is int:
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    items = [gguf_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    progress: Callable[[int], object] = lambda written: None,
) -> int:
    """Writes a file and returns its bytes. It grows as ``path.part``; when it is whole it takes the place of
    what was at ``path``.

    Memory is bounded by the header and the largest piece of data. ``progress`` gets the bytes of each.
    Raises OSError, and ValueError for data that are not of the size that their tensor said.
    """
    table, offset = b"", 0
    for tensor in tensors:
        table += gguf_string(tensor.name)
        table += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        table += struct.pack("<IQ", tensor.kind, offset)
        offset += tensor.size + -tensor.size % ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items()) + table
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as out:
            out.write(header + bytes(-len(header) % ALIGNMENT))
            for tensor in tensors:
                written = 0
                for piece in tensor.data():
                    written += out.write(piece)
                    progress(len(piece))
                if written != tensor.size:
                    raise ValueError(f"tensor {tensor.name}: {written} bytes of data, not {tensor.size}")
                out.write(bytes(-written % ALIGNMENT))
            size = out.tell()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size
