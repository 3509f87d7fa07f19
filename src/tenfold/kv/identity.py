"""What makes a KV page of one process right in another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

import tenfold
from tenfold.backends.base import ProgramInfo
from tenfold.kv.prefix import hash_page

_CODE = ("models", "graph", "formats", "checkpoint", "backends")
"""Packages that decide, with the core, what a row holds."""


def code_digest() -> str:
    """A digest of the code that computes rows: any change of it may change their bits. Raises OSError."""
    root = Path(tenfold.__file__).parent
    digest = xxhash.xxh3_128()
    for file in sorted(
        (*root.glob("_native*.so"), *(f for name in _CODE for f in root.glob(f"{name}/**/*.py")))
    ):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def page_identity(model: str, info: ProgramInfo, bias: bool = False) -> str:
    """32 hex digits that are equal where pages with equal keys and tokens hold equal bytes.

    ``model`` is its files' `tenfold.checkpoint.fingerprint`. Beside it count: the formats that weights and
    rows are held in, the code, and how keys are made. Threads and ISA level do not: rows have the same bits
    on all of them (law 1). Raises OSError.
    """
    said = {
        "model": model,
        "code": code_digest(),
        "backend": info.backend,
        "weights": sorted((weight.name, weight.format, weight.lossless) for weight in info.weights),
        "kv": [info.kv_format, info.page_bytes, bias],
        "keys": hash_page(hash_page(0, ()), tuple(range(16))),
    }
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
