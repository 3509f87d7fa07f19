"""One model in the forms that the peers of peers.py read: GGUF files of other types, and a folder of BF16."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from peer_environments import VENVS

from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.open import open_checkpoint
from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize

MODELS = VENVS / "models"
BF16 = Layout(Format.BF16)
TYPES = {"q4_0": "Q4_0", "q8_0": "Q8_0", "bf16": "BF16"}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers of these types, for a file's metadata."""


def gguf_in(source: Path, kind: str) -> Path:
    """The model of the GGUF file ``source`` with its matrices in ``kind``: ``file`` for as they are, or one
    of `TYPES`, made from the dequantized weights when it is first asked for.

    With q4_0 the embedding, which is the head too where both are one, and a head of its own stay in Q8_0, as
    llama-quantize keeps them in more than 4 bits. Vectors stay as they are. Raises ValueError or OSError.
    """
    if kind == "file":
        return source
    path = MODELS / f"{source.stem}.{TYPES[kind]}.gguf"
    return _made(path, lambda target: _write_gguf(source, kind, target))


def folder_of(source: Path) -> Path:
    """A folder with config.json and the dequantized weights of a GGUF file as BF16 safetensors, made when it
    is first asked for. It has no tokenizer: peers get token ids. Raises ValueError or OSError."""
    return _made(MODELS / f"{source.stem}.hf", lambda target: _write_folder(source, target))


def _made(path: Path, write: Callable[[Path], None]) -> Path:
    """``path``, a file or a folder, written if it is not there; it only ever appears whole."""
    if not path.exists():
        print(f"writing {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            write(Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
    return path


def _write_gguf(source: Path, kind: str, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        # The writer has its own of these.
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        chosen = _type_of(tensor, kind)
        data = tensor.data
        if chosen is not tensor.tensor_type:
            data = gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), chosen)
        writer.add_tensor(tensor.name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(tensor: Any, kind: str) -> Any:
    """What a tensor becomes."""
    if len(tensor.shape) < 2:
        return tensor.tensor_type
    if kind == "q4_0" and tensor.name in ("token_embd.weight", "output.weight"):
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType[TYPES[kind]]


def _write_folder(source: Path, target: Path) -> None:
    checkpoint = open_checkpoint(source)
    try:
        weights = {
            name: (list(info.shape), _bf16_bytes(checkpoint, name))
            for name, info in checkpoint.tensors().items()
        }
        config = {**checkpoint.config, "dtype": "bfloat16"}
    finally:
        checkpoint.close()
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    # Written by hand, as safetensors' own writer takes BF16 from torch alone.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, data) in weights.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in weights.values():
            file.write(data)


def _bf16_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    layout = checkpoint.place(name, "auto").layout
    return b"".join(
        quantize(block.dequantize(), BF16).codes.tobytes() for _, block in checkpoint.rows(name, layout)
    )
