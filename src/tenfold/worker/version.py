"""Which Tenfold this is: two processes that compute for one answer must be the same."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import tenfold


def version() -> str:
    """As installed; ``unknown`` for a source tree that was not."""
    try:
        return metadata.version("tenfold")
    except metadata.PackageNotFoundError:
        return "unknown"


def code_digest() -> str:
    """12 hex digits that are equal for equal Python code: messages and answers depend on it. The core is not
    in it, as its file differs with the compiler, and its results do not."""
    root = Path(tenfold.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
