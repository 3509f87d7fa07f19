"""From a constraint to a grammar of llguidance's. Imports llguidance, so it is imported where it is used
first."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from tenfold.constraints.schema import check_schema
from tenfold.constraints.size import check_size
from tenfold.limits import RequestError, Unsupported
from tenfold.protocol import Constraint

MAX_REGEX = 4096
"""Characters of a regular expression."""
MAX_CHOICES = 1024

_JSON_OPTIONS: Any = {
    "lenient": False,
    # Without a bound a small model can go on with white space for ever, and the answer is cut by its length.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
}
_JSON = re.compile(r"%json\s*(?=\{)")
_TEMPERATURE = re.compile(r"\[[^\]\"/]*\btemperature\s*=")


def grammar_of(constraint: Constraint) -> str:
    """The grammar, as llguidance's matcher takes it. Raises RequestError for what is too large or not
    supported; what the compiler itself finds wrong is not found here."""
    kind, text, field = constraint.kind, constraint.text, constraint.field
    check_size(constraint)
    if kind == "json_object":
        return _json('{"type":"object"}')
    if kind == "json_schema":
        return _json(check_schema(field, text))
    if kind == "regex":
        return _regex(text, field)
    if kind == "choice":
        return _choice(text, field)
    return _lark(text, field)


def _json(schema: str) -> str:
    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    return grammar


def _regex(text: str, field: str) -> str:
    if not text:
        raise RequestError(field, "is empty; it must be a regular expression")
    if len(text) > MAX_REGEX:
        raise RequestError(field, f"has {len(text)} characters; at most {MAX_REGEX} are taken")
    grammar: str = LLMatcher.grammar_from_regex(text)
    return grammar


def _choice(text: str, field: str) -> str:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RequestError(field, f"must be a list of strings: {error}") from None
    if not 0 < len(choices) <= MAX_CHOICES:
        raise RequestError(field, f"has {len(choices)} choices; it must have from 1 to {MAX_CHOICES}")
    if "" in choices:
        raise RequestError(field, "has an empty choice; every choice must have at least one character")
    grammar: str = LLMatcher.grammar_from_regex("|".join(map(_literal, choices)))
    return grammar


def _literal(text: str) -> str:
    """A regular expression that matches the text and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _lark(text: str, field: str) -> str:
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise RequestError(field, "is nested too deeply") from None
        except Exception as error:  # the reader's own, and bare ones for rules that are not there
            raise RequestError(field, f"is no grammar in GBNF: {error}") from None
    if _TEMPERATURE.search(text):
        raise Unsupported(field, "has a rule with a temperature, which is not supported. Leave it out")
    grammar: str = LLMatcher.grammar_from_lark(_with_schemas(text, field))
    return grammar


def _with_schemas(text: str, field: str) -> str:
    """The grammar with its JSON Schemas as they were checked."""
    parts, at = [], 0
    for found in _JSON.finditer(text):
        if found.end() < at:  # within a schema
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue  # it stands in a string, or the compiler says what is wrong
        options = {name: schema.pop(name) for name in ("x-guidance",) if name in schema}
        checked = json.loads(check_schema(f"{field} %json", json.dumps(schema)))
        parts += [text[at : found.end()], json.dumps({**checked, **options}, ensure_ascii=False)]
        at = end
    return "".join((*parts, text[at:]))
