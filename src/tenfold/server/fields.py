"""Taking a JSON object apart field by field, so that every value is checked and none is overlooked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tenfold.limits import Range
from tenfold.server.errors import ApiError, invalid

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a function or a schema."""


class Fields:
    """The fields of one request body. Each is taken once; `finish` refuses what nobody took.

    null means the same as an absent field. All methods raise `ApiError` (400) naming field, value and range.
    """

    def __init__(self, data: Any, size: int = 0) -> None:
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        self._data: dict[str, Any] = data
        self.size = size
        """Of the body, in bytes."""
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """The raw value, or None."""
        self._taken.add(name)
        return self._data.get(name)

    def number(self, name: str, default: float, range: Range) -> float:
        """A number in the range."""
        value = self.take(name)
        return default if value is None else check_number(name, value, range)

    def integer(self, name: str, range: Range) -> int | None:
        """An integer in the range, or None."""
        value = self.take(name)
        return None if value is None else check_integer(name, value, range)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(name, f"{name} is {show(value)}; it must be true or false")
        return value

    def string(self, name: str) -> str | None:
        """A string, or None."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(name, f"{name} is {show(value)}; it must be a string")
        return value

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """A field that is known but not supported: only ``allowed`` values pass, which ask for nothing."""
        value = self.take(name)
        if value is None or is_among(value, allowed):
            return
        raise invalid(name, f"{name} is {show(value)}; {why}", code="unsupported_value")

    def finish(self) -> None:
        """Refuses fields that were not taken."""
        for name in self._data:
            if name not in self._taken:
                raise invalid(name, f"unknown field {name}", code="unknown_parameter")


def is_among(value: Any, allowed: Sequence[Any]) -> bool:
    """Whether it is one of them in JSON, where 1 is 1.0 and not true."""
    return value in [item for item in allowed if isinstance(item, bool) == isinstance(value, bool)]


def check_integer(name: str, value: Any, range: Range) -> int:
    """``value`` if it is an integer in the range; 5.0 is one, as in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in range:
        raise invalid(name, f"{name} is {show(value)}; it must be an integer {range}")
    return value


def check_number(name: str, value: Any, range: Range) -> float:
    """``value`` if it is a number in the range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range:
        raise invalid(name, f"{name} is {show(value)}; it must be a number {range}")
    return float(value)


def check_object(name: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    """``value`` if it is an object with no other fields than those that are ``known``."""
    if not isinstance(value, dict):
        raise invalid(name, f"{name} is {show(value)}; it must be an object")
    for key in value:
        if key not in known:
            raise invalid(f"{name}.{key}", f"unknown field {name}.{key}", code="unknown_parameter")
    return value


def check_string(name: str, value: Any) -> str:
    """``value`` if it is a string."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} is {show(value)}; it must be a string")
    return value


def check_list(name: str, value: Any) -> list[Any]:
    """``value`` if it is a list."""
    if not isinstance(value, list):
        raise invalid(name, f"{name} is {show(value)}; it must be a list")
    return value


def check_flag(name: str, value: Any) -> bool:
    """``value`` if it is a boolean; False for null."""
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} is {show(value)}; it must be true or false")
    return bool(value)


def token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids; empty for null."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(name, f"{name} is {show(value)}; it must be a list of token ids")
    ids = Range(0, vocab_size - 1)
    return tuple(check_integer(f"{name}[{i}]", item, ids) for i, item in enumerate(value))


def show(value: Any) -> str:
    """A value for an error message: JSON, cut when it is long."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # decoded further up, where there was more room
        return "nested too deeply to be shown"
    return text if len(text) <= 80 else text[:77] + "..."
