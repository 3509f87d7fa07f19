"""JSON from outside, taken as strictly as its fields: a key that is twice in an object is an error."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tenfold.limits import json_problem


class DuplicateKey(ValueError):
    """A ``key`` is twice in one object. JSON leaves open what that means; most readers take the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"has the key {json.dumps(key)[:80]} twice in one object; give it once")
        self.key = key


def decode_json(data: bytes) -> Any:
    """What ``data`` holds, in time that is linear in its length. Raises ValueError, whose text goes on after
    the name of what was read, and DuplicateKey.

    Duplicates are found by counting colons: there is one for each member of an object, beside those within
    strings, so an encoding of what was decoded has as many as the text unless a member was dropped. Only a
    colon that is escaped in the text spoils that. A second reader looks where the counts differ or one is.
    """
    try:
        value = msgspec.json.decode(data)
        if b"\\u003" in data or data.count(b":") != msgspec.json.encode(value).count(b":"):
            json.loads(data.decode(), object_pairs_hook=_check)
    except DuplicateKey:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not valid JSON: {json_problem(error, data)}") from None
    except RecursionError:
        raise ValueError("is JSON that is nested too deeply") from None
    return value


def _check(pairs: list[tuple[str, Any]]) -> None:
    """Of one object. (Nothing is made of it: None stands in its place.)"""
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise DuplicateKey(key)
        seen.add(key)
