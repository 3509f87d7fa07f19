"""`tenfold synth`: a model file of random weights in the shape of a known model, for measuring speed.

How fast a model is does not depend on what its weights are, so a file of the right shape stands in for one
that is not at hand. Its text is noise. What the numbers must do is stay ordinary through all layers:

- A matrix has mean 0 and variance 1 / columns, so that rows of order one stay of order one and attention
  scores have a variance of one.
- What a layer adds to the residual stream is made smaller by sqrt(2 * layers): the stream does not grow.
  Gemma's layers norm what they add, and its stream grows to sqrt(2 * layers), which is as well: it begins
  with the embedding times sqrt(hidden), and a model where that stays the largest part repeats one token.
- The embedding, which is the output matrix as well where the two are tied, has variance 1 / hidden, so
  that logits have a variance of one.

Quantized blocks are not rounded from floats: their codes are random bytes, and their scales are chosen for
that variance. So a weight costs no arithmetic, and a file is written about as fast as a disk takes it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.bench.disk_room import check_disk_room
from tenfold.bench.shapes import SHAPES, Shape, SynthFormat
from tenfold.checkpoint.gguf import GGUFFile
from tenfold.checkpoint.gguf_write import NewTensor, write_gguf
from tenfold.checkpoint.locate import locate
from tenfold.config import format_bytes
from tenfold.formats.ggml import GGML_TYPES
from tenfold.progress import Progress

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PIECE_WEIGHTS = 1 << 22
"""Made and written at a time: at most 16 MiB."""
_HEADS = ("token_embd.weight", "output.weight")
_RESIDUAL = ("attn_output.weight", "ffn_down.weight")
_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What a matrix whose columns are not whole blocks of 256 has instead, as llama-quantize chooses it."""


class SynthFile(msgspec.Struct, frozen=True):
    """A file that was written."""

    path: str
    shape: str
    format: str
    seed: int
    bytes: int
    parameters: int
    types: dict[str, int]
    """Parameters by GGUF type."""

    def text(self) -> str:
        """For people."""
        types = ", ".join(f"{count:,} in {name}" for name, count in self.types.items())
        return (
            f"{self.path}: {format_bytes(self.bytes)}, {self.parameters:,} parameters ({types}).\n"
            f"The weights are random: measure speed with it, its text is noise. Try:\n"
            f"  tenfold bench {self.path}"
        )


def run(shape: str, requested: SynthFormat, path: Path, seed: int, force: bool, as_json: bool) -> str:
    """Writes the file with progress on standard error and returns the report, text or one JSON object.

    Raises ValueError for a file that is there already, unless ``force``, and for what is there and is no
    file (a folder, a device); and as `write_model` does.
    """
    if path.exists() and not (force and path.is_file()):
        remedy = "choose another, or replace it with --force" if path.is_file() else "give a file"
        raise ValueError(f"{path} is there already; {remedy}")
    tensors = model_tensors(SHAPES[shape], requested, seed)
    total = sum(tensor.size for tensor in tensors)
    written = 0
    with Progress(total / 1e6, "MB", path.name) as bar:

        def progress(size: int) -> None:
            nonlocal written
            written += size
            bar.at(written / 1e6)

        size = write_model(SHAPES[shape], tensors, path, f"{shape} with random weights", progress)
    types: dict[str, int] = {}
    for tensor in tensors:
        name = GGML_TYPES[tensor.kind].name
        types[name] = types.get(name, 0) + math.prod(tensor.shape)
    made = SynthFile(str(path), shape, requested, seed, size, sum(types.values()), types)
    return json.dumps(msgspec.to_builtins(made)) if as_json else made.text()


def write_model(
    shape: Shape,
    tensors: list[NewTensor],
    path: Path,
    name: str,
    progress: Callable[[int], object] = lambda written: None,
) -> int:
    """Writes a model of ``shape`` with the tokenizer of smollm2; see `write_gguf`.

    Raises CheckpointError where the package with that tokenizer is not installed, ValueError where there is
    no such folder or no room, OSError.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    metadata = model_metadata(shape, name)
    check_disk_room(path, sum(tensor.size for tensor in tensors))
    return write_gguf(path, metadata, tensors, progress)


def model_metadata(shape: Shape, name: str) -> dict[str, Any]:
    """The keys of a model of ``shape``, with the tokenizer and chat template of smollm2.

    A larger vocabulary is filled up with unused tokens: the output matrix has the shape's size.
    """
    file = GGUFFile(str(locate("smollm2")))
    file.close()
    tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    missing = shape.vocab - len(tokenizer["tokenizer.ggml.tokens"])
    if missing < 0:
        raise ValueError(f"a vocabulary of {shape.vocab} has no room for smollm2's tokens")
    tokenizer["tokenizer.ggml.tokens"] += [f"<|unused_{number}|>" for number in range(missing)]
    tokenizer["tokenizer.ggml.token_type"] += [5] * missing
    values: dict[str, Any] = {
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_epsilon,
        "rope.freq_base": shape.rope_theta,
    }
    if shape.architecture == "llama":
        values |= {"vocab_size": shape.vocab, "rope.dimension_count": shape.head_dim}
    if shape.window:
        values["attention.sliding_window"] = shape.window
    general = {
        "general.architecture": shape.architecture,
        "general.name": name,
        "general.quantization_version": 2,
    }
    return general | {f"{shape.architecture}.{key}": value for key, value in values.items()} | tokenizer


def model_tensors(shape: Shape, requested: SynthFormat, seed: int) -> list[NewTensor]:
    """All tensors of a model. The same arguments give the same bytes.

    Matrices have the type that is asked for, but embedding and output matrix Q8_0 where that is a 4-bit
    type, as is usual; K-quants become Q5_0 and Q8_0 where columns are not whole blocks. Vectors are F32.
    """
    tensors: list[NewTensor] = []
    for name, (rows, cols) in shape.matrices().items():
        kind = requested.upper()
        if kind.startswith("Q4") and name in _HEADS:
            kind = "Q8_0"
        if cols % GGML_TYPES[_NUMBERS[kind]].block:
            kind = _NARROW[kind]
        number = _NUMBERS[kind]
        std = cols**-0.5
        if name.endswith(_RESIDUAL):
            std /= math.sqrt(2 * shape.layers)
        data = functools.partial(_matrix, kind, rows, cols, std, (seed, len(tensors)))
        block = GGML_TYPES[number]
        size = rows * cols // block.block * block.block_bytes
        tensors.append(NewTensor(name, (rows, cols), number, size, data))
    for name, count in shape.vectors().items():
        data = functools.partial(_vector, name, count, (seed, len(tensors)))
        tensors.append(NewTensor(name, (count,), _NUMBERS["F32"], 4 * count, data))
    return tensors


def _vector(name: str, count: int, seed: tuple[int, int]) -> Iterator[bytes]:
    """Norms about 1, biases about 0."""
    values = np.random.default_rng(seed).uniform(-0.1, 0.1, count)
    if name.endswith("norm.weight"):
        values += 1
    yield values.astype("<f4").tobytes()


def _matrix(kind: str, rows: int, cols: int, std: float, seed: tuple[int, int]) -> Iterator[bytes]:
    """A matrix of random blocks, a few million weights at a time."""
    rng = np.random.Generator(np.random.SFC64(seed))
    block = GGML_TYPES[_NUMBERS[kind]].block
    left = rows * cols // block
    while left:
        count = min(left, PIECE_WEIGHTS // block)
        yield _blocks(kind, count, std, rng)
        left -= count


_SCALE_AT = {"Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q8_0": 0, "Q4_K": 0, "Q6_K": 208}
"""Where a block has its float16 scale."""
_UNIT_VARIANCE = {
    "Q4_0": 21.5,  # code - 8 with code 0 to 15
    "Q4_1": 21.25,  # code - 7.5
    "Q5_0": 85.5,  # code - 16 with code 0 to 31
    "Q8_0": 5461.5,  # code -128 to 127
    "Q4_K": 21.25 * 1333.5,  # (code - 7.5) times a scale of 0 to 63
    "Q6_K": 341.5 * 5461.5,  # code - 32 with code 0 to 63, times a scale of -128 to 127
}
"""Mean square of a block's weights, in squares of its float16 scale, with all bytes random."""


def _blocks(kind: str, count: int, std: float, rng: np.random.Generator) -> bytes:
    """``count`` random blocks whose weights have mean 0 and standard deviation ``std``."""
    if kind in ("F32", "BF16"):
        values = (rng.random(count, np.float32) - np.float32(0.5)) * np.float32(math.sqrt(12) * std)
        return values.astype("<f4").tobytes() if kind == "F32" else _upper_halves(values)
    size = GGML_TYPES[_NUMBERS[kind]].block_bytes
    raw: Bytes = np.frombuffer(bytearray(rng.bytes(count * size)), np.uint8).reshape(count, size)
    # Scales differ from block to block. Their signs are random: codes reach further down than up, and
    # weights with a common sign would give every output the same part.
    scale = rng.uniform(0.75, 1.25, count).astype(np.float32)
    scale *= np.float32(std / math.sqrt(_UNIT_VARIANCE[kind] * (1 + 0.25**2 / 3)))
    if not kind.endswith(("_1", "_K")):
        scale *= np.where(rng.integers(0, 2, count, np.int8), np.float32(-1), np.float32(1))
    _put_half(raw, _SCALE_AT[kind], scale)
    if kind == "Q4_1":
        _put_half(raw, 2, -7.5 * scale)
    elif kind == "Q4_K":
        # A group's minimum gets the 6-bit code of its scale, so that the group is about 0. Codes of the
        # first four groups are in bytes 4 to 7 and 8 to 11; the others' lower halves share bytes 12 to 15.
        _put_half(raw, 2, 7.5 * scale)
        raw[:, 8:12] = raw[:, 4:8]
        raw[:, 12:16] = raw[:, 12:16] & 15 | raw[:, 12:16] << 4
    return raw.tobytes()


def _put_half(raw: Bytes, at: int, values: Floats) -> None:
    raw[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _upper_halves(values: Floats) -> bytes:
    """BF16 by cutting off, which is as random as rounding."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
