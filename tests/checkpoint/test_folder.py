"""Hugging Face folders as checkpoints."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.folder import FolderCheckpoint
from tenfold.formats.matrix import Format, Layout
from tests.checkpoint.test_gguf_checkpoint import FAMILIES, read
from tests.helpers.model_files import Config, random_weights, tiny_config, write_folder

F32 = Layout(Format.F32)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_and_config_are_as_stored(tmp_path: Path, family: str, shards: int, dtype: str) -> None:
    """Names, shapes and every bit of the weights, in one file or several."""
    config = tiny_config(family)
    weights = random_weights(config)
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "m", config, weights, dtype, shards)))
    assert checkpoint.architecture == family
    assert checkpoint.config == config
    assert set(checkpoint.tensors()) == set(weights)
    for name, values in weights.items():
        info = checkpoint.tensors()[name]
        assert (info.shape, info.stored_type) == (values.shape, dtype)
        placement = checkpoint.place(name, "auto")
        is_bf16 = dtype == "BF16" and values.ndim == 2
        assert placement.layout == (Layout(Format.BF16) if is_bf16 else F32)
        assert placement.lossless
        if dtype == "F32":
            expected = values
        elif dtype == "F16":
            expected = values.astype(np.float16).astype(np.float32)
        else:
            bits = values.view(np.uint32).astype(np.int64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
            expected = rounded.astype(np.uint32).view(np.float32)
        got = read(checkpoint, name, placement.layout, 16).reshape(values.shape)
        np.testing.assert_array_equal(got, expected)
    checkpoint.close()


@pytest.mark.parametrize("padding", range(8))
def test_unaligned_data(tmp_path: Path, padding: int) -> None:
    """A header may have any length, so that the data begin at any byte."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [2, 32], "data_offsets": [0, 256]}}).encode()
    text += b" " * padding
    matrix = np.arange(64, dtype="<f4").reshape(2, 32)
    checkpoint = _folder(tmp_path, struct.pack("<Q", len(text)) + text + matrix.tobytes())
    for layout in (F32, Layout(Format.BF16)):
        np.testing.assert_array_equal(read(checkpoint, "a", layout), matrix)
    checkpoint.close()


def _folder(tmp_path: Path, content: bytes, config: Config | None = None) -> FolderCheckpoint:
    tmp_path.joinpath("config.json").write_text(
        json.dumps(config or tiny_config("llama", tie_word_embeddings=True))
    )
    tmp_path.joinpath("model.safetensors").write_bytes(content)
    return FolderCheckpoint(str(tmp_path))


def _file(header: object, data: bytes = bytes(256)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(
    dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16), **more: object
) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "short": (b"\1\2\3", "past the end of the file"),
    "header of 2^63": (struct.pack("<Q", 1 << 63) + bytes(64), "past the end of the file"),
    "header past the end": (struct.pack("<Q", 57) + bytes(56), "past the end of the file"),
    "not JSON": (_file(b"{]"), "not valid JSON"),
    "no JSON at all": (_file(b""), "not valid JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (_file([1, 2]), "not a JSON object"),
    "deep lists": (_file(b"[" * 200000), "nested too deeply"),
    "deep objects": (_file(b'{"a":' * 200000), "nested too deeply"),
    "endless number": (_file(b'{"a": ' + b"9" * 100000 + b"}"), "not valid JSON"),
    "name twice": (_file(b'{"a": {}, "a": {}}'), "appears twice"),
    "entry a number": (_file({"a": 1}), "Expected `object`"),
    "no shape": (_file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "missing required field `shape`"),
    "unknown field": (_file(_entry(strides=[1])), "unknown field `strides`"),
    "three offsets": (_file(_entry(offsets=(0, 8, 16))), "length 2"),
    "negative offset": (_file(_entry(offsets=(-16, 0))), ">= 0"),
    "offset a float": (_file(_entry(offsets=(0, 16.5))), "Expected `int`"),
    "offsets reversed": (_file(_entry(offsets=(16, 0))), "-16 bytes are not what"),
    "offset of 2^64": (_file(_entry(offsets=(1 << 64, (1 << 64) + 16))), "offsets"),
    "past the end": (_file(_entry(offsets=(256, 272))), "truncated"),
    "size and shape differ": (_file(_entry(shape=(5,))), "16 bytes are not what F32 [5] takes"),
    "product of 2^96": (_file(_entry(shape=(1 << 48, 1 << 48))), "are not what"),
    "dimension of 2^64": (_file(_entry(shape=(1 << 64,))), "shape"),
    "negative dimensions": (_file(_entry(shape=(-2, -2))), ">= 0"),
    "empty": (_file(_entry(shape=(0,), offsets=(0, 0))), "no matrix or vector"),
    "scalar": (_file(_entry(shape=(), offsets=(0, 4))), "no matrix or vector"),
    "three dimensions": (_file(_entry(shape=(1, 2, 2))), "no matrix or vector"),
    "many dimensions": (_file(_entry(shape=(1,) * 10000)), "no matrix or vector"),
    "dtype I64": (_file(_entry("I64", (2,))), "'I64', which is not supported"),
    "dtype a number": (_file(_entry(7)), "Expected `str`"),
    "overlap": (
        _file(_entry() | {"b": {"dtype": "F16", "shape": [4], "data_offsets": [14, 22]}}),
        "overlaps",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    """Each lie of a header ends in an error with the file and what is wrong."""
    content, message = HOSTILE[case]
    with pytest.raises(CheckpointError) as caught:
        _folder(tmp_path, content)
    assert message in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """A sparse file with a header as large as itself costs no memory."""
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="too large"):
        path.write_bytes(struct.pack("<Q", 1 << 32))
        os.truncate(path, (1 << 32) + 8)
        (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
        FolderCheckpoint(str(tmp_path))


def _sharded(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    config = tiny_config("llama")
    path = write_folder(tmp_path / "m", config, random_weights(config), shards=2)
    return path, json.loads((path / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/m.safetensors", "a/b.safetensors", "a\\b.safetensors", "c:x.safetensors",
     "\0.safetensors", "config.json", "", 7, None, ["model.safetensors"]],
)  # fmt: skip
def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path, shard: object) -> None:
    """Weights are only read from .safetensors files of the folder itself."""
    path, index = _sharded(tmp_path)
    index["weight_map"]["model.norm.weight"] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not the name of a"):
        FolderCheckpoint(str(path))


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    """Missing shards, tensors that are elsewhere or twice, and an empty index."""
    path, index = _sharded(tmp_path)
    index_path = path / "model.safetensors.index.json"
    first, second = sorted(path.glob("*.safetensors"))
    wrong = dict.fromkeys(index["weight_map"], first.name)
    index_path.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(CheckpointError, match="is not in model-00001"):
        FolderCheckpoint(str(path))
    index_path.write_text(json.dumps({"weight_map": index["weight_map"] | {"x": "none.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be read"):
        FolderCheckpoint(str(path))
    empty: list[dict[str, object]] = [{}, {"weight_map": {}}, {"weight_map": [1]}]
    for content in empty:
        index_path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="weight_map is missing"):
            FolderCheckpoint(str(path))
    index_path.write_text(json.dumps(index))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is also in"):
        FolderCheckpoint(str(path))


def test_the_files_of_a_hub_cache_are_links(tmp_path: Path) -> None:
    """The hub keeps a snapshot as links to blobs elsewhere; that is no way out of the folder."""
    path, _index = _sharded(tmp_path)
    for file in list(path.glob("*.safetensors")):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    FolderCheckpoint(str(path)).close()


def test_what_the_config_says_is_respected(tmp_path: Path) -> None:
    """Quantized weights, other architectures, broken files and a missing head are errors that name them."""
    config = tiny_config("llama")
    path = write_folder(tmp_path / "m", config, random_weights(config))
    cases: list[tuple[object, str]] = [
        (config | {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
        (config | {"quantization_config": 1}, "quantization_config"),
        (config | {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (config | {"model_type": "gemma3"}, "the text-only gemma3_text is"),
        (config | {"model_type": ["llama"]}, "model_type"),
        ({}, "model_type None"),
        ([], "not a JSON object"),
    ]
    for content, message in cases:
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            FolderCheckpoint(str(path))
    del config["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = FolderCheckpoint(str(path))
    assert checkpoint.config["tie_word_embeddings"] is False
    checkpoint.close()
    tied = tiny_config("llama", tie_word_embeddings=True)
    path = write_folder(tmp_path / "t", tied | {"tie_word_embeddings": False}, random_weights(tied))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        FolderCheckpoint(str(path))
    os.remove(path / "model.safetensors")
    (path / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"
    ):
        FolderCheckpoint(str(path))


def test_newer_and_older_ways_to_write_rope(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters; models read rope_theta and rope_scaling."""
    config = tiny_config("llama")
    weights = random_weights(config)
    for key in ("rope_theta", "rope_scaling"):
        del config[key]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "a", config, weights)))
    assert (checkpoint.config["rope_theta"], checkpoint.config["rope_scaling"]) == (5e5, None)
    checkpoint.close()
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "a", config, weights)))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    checkpoint.close()
    config["rope_parameters"] = 7
    with pytest.raises(CheckpointError, match="rope_parameters"):
        FolderCheckpoint(str(write_folder(tmp_path / "a", config, weights)))


def test_gemma3_in_its_spellings(tmp_path: Path) -> None:
    """A pattern, a list of layer types and rope_parameters per kind of layer give one config."""
    full = tiny_config("gemma3", num_hidden_layers=7)
    weights = random_weights(full)
    bare = {key: value for key, value in full.items() if key not in ("layer_types", "rope_local_base_freq")}
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "a", bare, weights)))
    assert checkpoint.config == full
    checkpoint.close()
    newer = {key: value for key, value in bare.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "a", newer, weights)))
    changed = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 20000.0}
    assert checkpoint.config == full | changed
    checkpoint.close()
    wrong: list[dict[str, object]] = [{"full_attention": 1, "sliding_attention": {}}, {"full_attention": {}}]
    for broken in wrong:
        with pytest.raises(CheckpointError, match="rope_parameters"):
            FolderCheckpoint(str(write_folder(tmp_path / "a", newer | {"rope_parameters": broken}, weights)))
