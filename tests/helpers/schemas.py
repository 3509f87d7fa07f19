"""50 JSON Schemas of the kinds that clients send, all bounded: a text that keeps to them comes to an end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def record(required: list[str] | None = None, **properties: Schema) -> Schema:
    """An object with these properties and no others, all required unless it is said which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def items(schema: Schema, most: int, least: int = 0) -> Schema:
    """A list of so many at most."""
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most}


_STRINGS: list[Schema] = [
    SHORT,
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "pattern": "^[0-9]{2}-[0-9]{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "green", "blue"]},
    {"const": "fixed"},
    {"enum": [1, "one", None, True, [1], {"a": 1}]},
    {"type": ["string", "null"], "maxLength": 4},
]
_NUMBERS: list[Schema] = [
    DIGIT,
    {"type": "integer", "minimum": -20, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": [0.5, 1.5, 1e3]},
]
_LISTS: list[Schema] = [
    items(DIGIT, 4),
    items(SHORT, 3, 1),
    items({"type": "boolean"}, 2, 2),
    items({"enum": ["a", "b", "c"]}, 3),
    items(items(DIGIT, 2), 2),
    items(record(a=DIGIT), 2),
    {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [DIGIT], "items": {"type": "boolean"}, "maxItems": 3},
    items({"anyOf": [DIGIT, {"type": "null"}]}, 3),
    {"type": "array", "maxItems": 0},
]
_OBJECTS: list[Schema] = [
    record(a=DIGIT),
    record(name=SHORT, age=DIGIT),
    record(["name"], name=SHORT, age=DIGIT),
    record([], a=DIGIT, b={"type": "boolean"}),
    record(user=record(name=SHORT), ok={"type": "boolean"}),
    record(tags=items({"enum": ["x", "y"]}, 2), note={"type": ["string", "null"], "maxLength": 4}),
    record(kind={"const": "point"}, x=DIGIT, y=DIGIT),
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 0},
    {**record(a=DIGIT), "title": "A title", "description": "Notes enforce nothing.", "default": {"a": 1}},
    record(when={"type": "string", "format": "date"}, count=DIGIT),
    {**record(), "properties": {"with space": DIGIT, "und\u00e9rline": {"type": "boolean"}}},
    record(a=record(b=record(c=record(d=DIGIT)))),
]
_COMPOSED: list[Schema] = [
    {"anyOf": [record(a=DIGIT), record(b=SHORT)]},
    {"oneOf": [{"type": "boolean"}, DIGIT]},
    {"oneOf": [record(k={"const": "a"}, v=DIGIT), record(k={"const": "b"}, w=SHORT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"$defs": {"p": record(x=DIGIT, y=DIGIT)}, **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    {"definitions": {"c": {"enum": ["on", "off"]}}, **items({"$ref": "#/definitions/c"}, 2, 1)},
    {
        "$defs": {"t": record(v=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]})},
        "$ref": "#/$defs/t",
    },
    {**record(a=DIGIT), "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:one"},
]
SCHEMAS: list[Schema] = _STRINGS + _NUMBERS + _LISTS + _OBJECTS + _COMPOSED
