"""The seam between files and everything that reads weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from tenfold.formats.matrix import Layout, Matrix


class CheckpointError(ValueError):
    """A model file is unsupported, truncated or lies about itself. The message names file, tensor and byte
    offset."""


class TensorInfo(msgspec.Struct, frozen=True):
    """What is known of a weight before it is read."""

    name: str
    """Canonical (Hugging Face) name."""
    shape: tuple[int, ...]
    """``(rows, cols)`` for a matrix, ``(width,)`` for a vector."""
    stored_type: str
    """The file's own word: ``Q4_1``, ``BF16`` ..."""
    stored_bytes: int
    file: str
    offset: int
    """Byte offset of the data in ``file``."""


class Placement(msgspec.Struct, frozen=True):
    """How a weight will be held in memory, and why."""

    layout: Layout
    lossless: bool
    why: str
    """For people: ``Q4_1 grid kept``, ``requantized from F16 by --format q8`` ..."""


class Checkpoint(Protocol):
    """An opened model: its configuration and its weights by canonical name. Weights stay on disk until
    read."""

    path: str
    architecture: str
    """Model family as `tenfold.models` knows it: ``llama``, ``mistral``, ``qwen2``, ``qwen3``,
    ``gemma3``."""
    config: dict[str, Any]
    """Hugging Face config.json keys, also when it comes from GGUF metadata (see
    ``checkpoint/gguf_config.py``)."""

    def tensors(self) -> dict[str, TensorInfo]:
        """Every weight, by canonical name."""
        ...

    def place(self, name: str, requested: str) -> Placement:
        """The layout that ``name`` gets when the user asks for ``requested`` (``auto, f32, bf16, q8,
        q4``)."""
        ...

    def rows(self, name: str, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        """Yields ``(first_row, block)`` over the whole matrix in order; pages of the file already read are
        let go.

        ``block_rows`` is a multiple of 16; 0 chooses a block of about 4 MiB. A vector is a matrix of one row
        in F32. Row order and norm weights are canonical: GGUF's llama permutation and Gemma's stored ``1 +
        w`` are undone.
        """
        ...

    def close(self) -> None:
        """Unmaps the files."""
        ...
