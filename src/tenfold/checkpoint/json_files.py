"""JSON that comes with a model."""

from __future__ import annotations

import json
import os
from typing import Any

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import open_regular

MAX_JSON_BYTES = 64 << 20
"""The index of the largest models is a few megabytes."""


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """The object in ``data``. Raises CheckpointError about ``what``, also where a key appears twice."""
    try:
        value = json.loads(data, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise CheckpointError(f"{what}: JSON is nested too deeply") from None
    except ValueError as error:  # syntax, UTF-8, numbers of thousands of digits, duplicates
        raise CheckpointError(f"{what}: not valid JSON ({error!s:.200})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: not a JSON object")
    return value


def read_json(path: str) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError, also where the file is missing or unreasonably large."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB")
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json(data, path)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result
