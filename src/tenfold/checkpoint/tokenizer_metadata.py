"""Typed reads of a tokenizer's GGUF metadata. Each raises CheckpointError, naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tenfold.checkpoint.base import CheckpointError

_T = TypeVar("_T", int, str, bool)


def required(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """The value under ``key``, which has to be there."""
    if key not in metadata:
        raise CheckpointError(f"{key} is missing")
    value = metadata[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def optional(metadata: Mapping[str, Any], key: str, kind: type[_T], default: _T) -> _T:
    """The value under ``key``, or ``default`` where there is none."""
    return required(metadata, key, kind) if key in metadata else default


def token_id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    """``tokenizer.ggml.NAME_token_id``, one of ``count`` tokens. A default outside them counts as none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return default if default is not None and default < count else None
    token = required(metadata, key, int)
    if not 0 <= token < count:
        raise CheckpointError(f"{key} is {token}, but there are {count} tokens")
    return token


def array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """An array, as a list."""
    value = metadata[key]
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"{key} is a {type(value).__name__}, not an array")
    return list(value)


def strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """An array of strings in UTF-8, which has to be there."""
    if key not in metadata:
        raise CheckpointError(f"{key} is missing")
    values = array(metadata, key)
    for at, value in enumerate(values):
        if not isinstance(value, str):
            raise CheckpointError(f"{key}: entry {at} is a {type(value).__name__}, not a string")
    try:
        "".join(values).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{key}: not UTF-8: {error.object[error.start : error.start + 8]!r}") from None
    return values


def numbers(metadata: Mapping[str, Any], key: str, count: int, real: bool = False) -> list[Any] | None:
    """An array of ``count`` integers (with ``real``: of numbers), None where there is none."""
    if key not in metadata:
        return None
    values = array(metadata, key)
    if len(values) != count:
        raise CheckpointError(f"{key} has {len(values)} entries, but there are {count} tokens")
    for at, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float if real else int):
            raise CheckpointError(f"{key}: entry {at} is a {type(value).__name__}, not a number")
    return values
