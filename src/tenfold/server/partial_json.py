"""What can be made of a JSON object whose text was cut off."""

from __future__ import annotations

from typing import Any

import msgspec


def object_of(text: str) -> dict[str, Any]:
    """The object that ``text`` is. If it is cut off: with the members that are whole; if it is none at all:
    empty."""
    for candidate in (text, _closed(text)):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _closed(text: str) -> str:
    """Up to the last place where a value is whole, and with all brackets closed that are open there."""
    open_: list[str] = []
    end, closers = 0, ""
    in_string = escaped = False
    for at, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_.append("}" if char == "{" else "]")
            end, closers = at + 1, "".join(reversed(open_))
        elif char in "}]":
            if not open_:
                break
            open_.pop()
            end, closers = at + 1, "".join(reversed(open_))
        elif char == ",":
            end, closers = at, "".join(reversed(open_))
    return text[:end] + closers
