"""Damaged files: whatever happens to the bytes, the outcome is a readable checkpoint or a CheckpointError."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.open import open_checkpoint
from tests.helpers.model_files import random_weights, tiny_config, write_folder, write_gguf_model

MEMORY_BYTES = 24 << 20
"""Far above what these small models take, far below what a believed lie would."""

EXTREMES = [0, 1, 2, 7, 8, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EXTREMES += [1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]

FUZZ = settings(
    max_examples=400,
    deadline=3000,  # milliseconds: no file of this size may keep us longer
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# A change of a file: cut it off, flip bits of a byte, or write an extreme number over a field.
cuts = st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.just(0))
flips = st.tuples(st.just("flip"), st.integers(0, 1 << 20), st.integers(1, 255))
writes32 = st.tuples(st.just("I"), st.integers(0, 1 << 20), st.sampled_from(EXTREMES[:11]))
writes64 = st.tuples(st.just("Q"), st.integers(0, 1 << 20), st.sampled_from(EXTREMES))
changes = st.lists(st.one_of(flips, writes32, writes64, cuts), min_size=1, max_size=4)
Changes = list[tuple[str, int, int]]


def damaged(content: bytes, changes: Changes, header: int) -> bytes:
    """``content`` with changes applied, most of them within the first ``header`` bytes."""
    data = bytearray(content)
    for kind, position, value in changes:
        position %= header if position % 4 else len(content)
        if kind == "cut":
            del data[position:]
        elif position + 8 <= len(data):
            if kind == "flip":
                data[position] ^= value
            else:
                struct.pack_into("<" + kind, data, position, value)
    return bytes(data)


def read_all(path: Path) -> None:
    """Opens and reads everything. Only CheckpointError may come out, and memory is bounded."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint = open_checkpoint(path)
            try:
                for name in checkpoint.tensors():
                    for requested in ("auto", "q4"):
                        layout = checkpoint.place(name, requested).layout
                        for _ in checkpoint.rows(name, layout):
                            pass
            finally:
                checkpoint.close()
    except CheckpointError as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of several types, with a vocabulary."""
    config = tiny_config("llama", num_hidden_layers=1)
    kinds = {"q_proj": "Q4_1", "k_proj": "Q8_0", "up_proj": "Q5_0", "down_proj": "F16", "embed": "BF16"}
    path = write_gguf_model(
        tmp_path_factory.mktemp("gguf") / "m.gguf",
        config,
        random_weights(config),
        lambda name: next((kind for part, kind in kinds.items() if part in name), "F32"),
        {
            "tokenizer.ggml.tokens": [f"t{n}" for n in range(256)],
            "tokenizer.ggml.scores": [0.5] * 256,
            "x.y": True,
        },
    )
    read_all(path)
    return path


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in one file."""
    config = tiny_config("llama", num_hidden_layers=1)
    path = write_folder(tmp_path_factory.mktemp("folder") / "m", config, random_weights(config), "F16")
    read_all(path)
    return path / "model.safetensors"


@FUZZ
@given(changes)
@example([("Q", 8, 1 << 60)])
@example([("Q", 16, 1 << 60)])
def test_damaged_gguf(gguf_file: Path, tmp_path: Path, changes: Changes) -> None:
    """Truncation anywhere, flipped bits, and extreme numbers over any field."""
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged(gguf_file.read_bytes(), changes, 8000))
    read_all(path)


@FUZZ
@given(changes)
def test_damaged_safetensors(safetensors_file: Path, tmp_path: Path, changes: Changes) -> None:
    """The same for safetensors, whose header is text."""
    path = write_folder(tmp_path / "m", tiny_config("llama", num_hidden_layers=1), {})
    (path / "model.safetensors").write_bytes(damaged(safetensors_file.read_bytes(), changes, 1500))
    read_all(path)


@settings(FUZZ, max_examples=150)
@given(st.binary(max_size=400))
def test_noise_after_a_good_beginning(tmp_path: Path, noise: bytes) -> None:
    """Random bytes as header of both formats."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 3, 3) + noise)
    read_all(path)
    folder = write_folder(tmp_path / "m", tiny_config("llama"), {})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(noise)) + noise)
    read_all(folder)


def test_truncated_at_every_byte_of_the_header(gguf_file: Path, tmp_path: Path) -> None:
    """A download that stopped is always noticed."""
    path = tmp_path / "m.gguf"
    content = gguf_file.read_bytes()
    for length in [*range(1, 6000, 7), *range(6000, len(content), 4001), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
