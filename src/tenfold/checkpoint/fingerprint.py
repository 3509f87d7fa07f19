"""Telling one model's files from another's."""

from __future__ import annotations

import hashlib
from pathlib import Path

CHUNK_BYTES = 1 << 20


def fingerprint(path: Path) -> str:
    """A digest (BLAKE2b, 32 hex digits) of all that a model at ``path`` says: the GGUF file, or the folder's
    JSON and safetensors files with their names. Reads them all. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted((*path.glob("*.json"), *path.glob("*.safetensors")))
    for file in files:
        if path.is_dir():
            digest.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as data:
            while chunk := data.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
