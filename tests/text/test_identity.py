from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenfold.checkpoint.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llama_cpp_address(smollm2_path: Path) -> Iterator[str]:
    """A llama.cpp server with the same file."""
    xllamacpp = pytest.importorskip("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(smollm2_path)
    parameters.n_ctx = 64
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.port = 0
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    yield server.listening_address
    del server


def test_ids_are_llama_cpp_s(
    llama_cpp_address: str, smollm2_metadata: dict[str, Any], strings: list[str]
) -> None:
    """A GGUF file gives the same ids here and in llama.cpp, special tokens parsed or not.

    benchmarks/tokenizer_identity.py does the same for more strings, models and pre-tokenizers.
    """
    tokenizer = Tokenizer.from_gguf_metadata(smollm2_metadata)
    for text in strings:
        for parse_special in (True, False):
            question = {"content": text, "add_special": True, "parse_special": parse_special}
            request = urllib.request.Request(
                f"{llama_cpp_address}/tokenize",
                json.dumps(question).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:
                expected = json.load(response)["tokens"]
            assert tokenizer.encode(text, add_special_tokens=True, parse_special=parse_special) == expected
