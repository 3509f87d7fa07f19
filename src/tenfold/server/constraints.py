"""The fields that constrain an answer's text: OpenAI's, and those that clients of vLLM and SGLang send."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.protocol import Constraint, ConstraintKind
from tenfold.server.errors import invalid
from tenfold.server.fields import NAME, Fields, is_among, show

_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_GUIDED: dict[str, ConstraintKind] = {f"guided_{name}": kind for name, kind in _KINDS.items()}
_SGLANG: dict[str, ConstraintKind] = {"regex": "regex", "ebnf": "grammar"}
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")


def take_constraint(fields: Fields) -> Constraint | None:
    """What the fields ask for, not compiled yet. Raises ApiError, also where more than one of them asks."""
    found = [_response_format(fields.take("response_format"))]
    found += _structured_outputs(fields.take("structured_outputs"))
    for names in (_GUIDED, _SGLANG):
        found += [_of(kind, name, fields.take(name)) for name, kind in names.items()]
    fields.only(
        "guided_decoding_backend", ("auto", "guidance"), "grammars are compiled by guidance's library"
    )
    fields.only("guided_whitespace_pattern", (), "white space in JSON cannot be chosen")
    given = [constraint for constraint in found if constraint is not None]
    if len(given) > 1:
        one, other = given[0].field, given[1].field
        raise invalid(other, f"{other} and {one} both constrain the answer; give one of them")
    return given[0] if given else None


def _response_format(value: Any) -> Constraint | None:
    where = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        _only_known(where, value, ("type",))
        return None
    if kind == "json_object":
        _only_known(where, value, ("type", "schema"))
        schema = value.get("schema")  # as clients of llama.cpp and Together say it
        return (
            _of("json_object", where, "") if schema is None else _of("json_schema", f"{where}.schema", schema)
        )
    if kind == "json_schema":
        _only_known(where, value, ("type", "json_schema"))
        return json_schema(f"{where}.json_schema", value.get("json_schema"))
    if kind in ("structural_tag", "regex", "grammar"):
        raise invalid(
            f"{where}.type", f"{where}.type is {show(kind)}; it is not supported", code="unsupported_value"
        )
    raise invalid(where, f'{where} is {show(value)}; its type must be "text", "json_object" or "json_schema"')


def json_schema(where: str, value: Any) -> Constraint:
    """A named schema as a constraint; ``where`` is its place in the body. Raises ApiError."""
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object with a name and a schema")
    _only_known(where, value, ("name", "description", "schema", "strict"))
    for name in ("name", "description"):
        if not isinstance(value.get(name), str | None):
            raise invalid(f"{where}.{name}", f"{where}.{name} is {show(value[name])}; it must be a string")
    given = value.get("name")
    if given is not None and not NAME.fullmatch(given):
        raise invalid(
            f"{where}.name", f"{where}.name is {show(given)}; it must be 1 to 64 of A-Z a-z 0-9 _ -"
        )
    if not is_among(value.get("strict"), (None, True, False)):  # the schema is enforced either way
        raise invalid(
            f"{where}.strict", f"{where}.strict is {show(value['strict'])}; it must be true or false"
        )
    schema = value.get("schema")
    if schema is None:
        raise invalid(f"{where}.schema", f"{where}.schema is missing", code="missing_parameter")
    if not isinstance(schema, dict):
        raise invalid(f"{where}.schema", f"{where}.schema is {show(schema)}; it must be an object")
    return Constraint(kind="json_schema", text=msgspec.json.encode(schema).decode(), field=f"{where}.schema")


def _structured_outputs(value: Any) -> list[Constraint | None]:
    where = "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    _only_known(where, value, (*_KINDS, "json_object", *_OPTIONS))
    for name in _OPTIONS:
        if not is_among(value.get(name), (None, False)):
            raise invalid(
                f"{where}.{name}",
                f"{where}.{name} is {show(value[name])}; it is not supported",
                code="unsupported_value",
            )
    found = [_of(kind, f"{where}.{name}", value.get(name)) for name, kind in _KINDS.items()]
    wanted = value.get("json_object")
    if wanted is not None and not isinstance(wanted, bool):
        raise invalid(f"{where}.json_object", f"{where}.json_object must be true or false")
    if wanted:
        found.append(_of("json_object", f"{where}.json_object", ""))
    return found


def _of(kind: ConstraintKind, where: str, value: Any) -> Constraint | None:
    """A constraint of the value that a field has; None for null."""
    if value is None:
        return None
    if kind == "json_schema" and isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    elif kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise invalid(where, f"{where} is {show(value)}; it must be a list of strings")
        value = msgspec.json.encode(value).decode()
    if not isinstance(value, str):
        expected = "an object or a string of JSON" if kind == "json_schema" else "a string"
        raise invalid(where, f"{where} is {show(value)}; it must be {expected}")
    return Constraint(kind=kind, text=value, field=where)


def _only_known(where: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known:
            raise invalid(f"{where}.{name}", f"unknown field {where}.{name}", code="unknown_parameter")
