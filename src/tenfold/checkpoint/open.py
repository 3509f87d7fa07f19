"""Opening a model, whatever it is stored as."""

from __future__ import annotations

import os

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.folder import FolderCheckpoint
from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint


def open_checkpoint(path: str | os.PathLike[str]) -> GGUFCheckpoint | FolderCheckpoint:
    """Opens a GGUF file, or a folder with config.json and safetensors. Both are a `Checkpoint`.

    Raises CheckpointError for anything else, and for a model that is damaged or not supported.
    """
    path = os.fspath(path)
    check_path(path)
    return FolderCheckpoint(path) if os.path.isdir(path) else GGUFCheckpoint(path)


def check_path(path: str) -> None:
    """Raises CheckpointError, saying what to give instead, for what cannot be a model by its names alone."""
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "config.json")):
            return
        files = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
        if files:
            raise CheckpointError(f"{path}: a folder of GGUF files; give one of them: {', '.join(files[:8])}")
        raise CheckpointError(f"{path}: a folder without config.json is not a model")
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such file or folder")
    if path.endswith((".safetensors", ".json")):
        raise CheckpointError(f"{path}: give the folder with config.json and weights, not a file in it")
