"""Which JSON Schemas are taken: every keyword is one that is enforced, or a note that enforces nothing.

The compiler behind it refuses keywords of the standard that it does not know, but passes over what it has
never heard of (a typing error, `nullable` of OpenAPI), and a schema can switch even that off. Here nothing
is passed over.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.constraints.numbers import (
    BOUNDS,
    check_bound,
    check_literals,
    check_multiple,
    check_multiples,
    check_open,
    check_range,
)
from tenfold.limits import RequestError, Unsupported, json_problem

MAX_DEPTH = 64
"""Schemas within schemas."""
MAX_PATTERN = 2048
"""Characters of a regular expression in a schema."""

_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords whose value is a schema ..."""
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""... a list of schemas ..."""
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""Keywords whose schemas are put together with those beside them."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""... an object with a schema under each name."""
_PLAIN = frozenset(
    (
        "$ref",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
    )
)
_SIZES = frozenset(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"))
MAX_SIZE = 2**32 - 1
"""Of the keywords that count; the compiler's own limit."""
_NOTES = frozenset(
    (
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    )
)
"""Say something to people or to other programs. `discriminator` only points at what `oneOf` says already."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def check_schema(field: str, text: str) -> str:
    """The schema as a JSON object (`true` is one without a keyword), its numbers as they were
    checked. Raises RequestError, naming the place in the schema, for what is not JSON
    or would not be enforced.

    What is held to be a number, and which, is said in `tenfold.constraints.numbers`. Types and values of most
    other keywords are the compiler's to check.
    """
    try:
        schema = msgspec.json.decode(text)
    except RecursionError:
        raise RequestError(field, "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(field, f"is not JSON: {json_problem(error)}") from None
    if not isinstance(schema, dict | bool):
        raise RequestError(field, "must be a JSON Schema: an object")
    if schema is False:
        raise RequestError(field, "is the schema false, which no text matches")
    steps, spans = [], []
    combined = False
    waiting: list[tuple[str, Any, int]] = [(field, schema, 1)]
    while waiting:
        place, value, depth = waiting.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise RequestError(place, "must be a schema: an object, true or false")
        if depth > MAX_DEPTH:
            raise RequestError(field, f"has schemas within schemas more than {MAX_DEPTH} deep")
        waiting += [(where, inner, depth + 1) for where, inner in _inner(place, value)]
        if "multipleOf" in value:
            steps.append(check_multiple(f"{place}.multipleOf", value["multipleOf"]))
        spans.append(check_range(place, value))
        combined = combined or not _COMBINING.isdisjoint(value)
    if combined:
        check_multiples(field, steps)
        check_open(field, spans)
    return "{}" if schema is True else msgspec.json.encode(schema).decode()


def _inner(place: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly in a schema, each with its place."""
    inner: list[tuple[str, Any]] = []
    for name, value in schema.items():
        where = f"{place}.{name}"
        if name == "items" and isinstance(value, list):
            inner += [(f"{where}[{i}]", item) for i, item in enumerate(value)]
        elif name in _ONE:
            inner.append((where, value))
        elif name in _MANY:
            if not isinstance(value, list) or not value:
                raise RequestError(where, "must be a list of at least one schema")
            inner += [(f"{where}[{i}]", item) for i, item in enumerate(value)]
        elif name in _NAMED:
            if not isinstance(value, dict):
                raise RequestError(where, "must be an object: a schema under each name")
            if name == "patternProperties":
                for pattern in value:
                    _check_pattern(where, pattern)
            inner += [(f"{where}.{key}", item) for key, item in value.items()]
        elif name == "format":
            if value not in FORMATS:
                raise Unsupported(where, f"is not supported; supported are {', '.join(FORMATS)}")
        elif name in _SIZES:
            if type(value) is not int or not 0 <= value <= MAX_SIZE:
                raise RequestError(where, f"must be an integer from 0 to {MAX_SIZE}, written without a point")
        elif name == "pattern":
            _check_pattern(where, value)
        elif name in BOUNDS:
            check_bound(where, value)
        elif name == "const":
            check_literals(where, value)
        elif name == "enum":
            if not isinstance(value, list) or not value:
                raise RequestError(where, "must be a list of at least one value")
            check_literals(where, value)
        elif name == "x-guidance" or not (name in _PLAIN or name in _NOTES or name.startswith("x-")):
            raise Unsupported(where, "is not supported: it would not be enforced. Leave it out")
    return inner


def _check_pattern(where: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise RequestError(where, f"must be a regular expression of at most {MAX_PATTERN} characters")
