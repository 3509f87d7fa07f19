"""What llguidance says is wrong with a schema or grammar, as a client of ours can use it: with the
keyword and the remedy."""

from __future__ import annotations

import re

from tenfold.protocol import ConstraintKind

_LONGEST = 400
_SCHEMAS = (
    (
        r"oneOf constraints are not supported",
        "oneOf can be enforced only where its cases exclude one another by their types, by a const or by a "
        "required property. Tell them apart so, or use anyOf",
    ),
    (
        r"Resource '(?P<what>[^']*)' is not present",
        "{what} is not fetched: $ref must be a place within the schema, like #/$defs/name, and $schema a "
        "known draft. Put what it refers to under $defs",
    ),
    (
        r"Pointer '(?P<what>[^']*)' does not exist",
        "$ref points to {what}, which does not exist in the schema",
    ),
    (
        r"Regex is empty",
        "no string keeps to all of pattern, format, minLength and maxLength together, or to those of the "
        "schemas that allOf puts together. Take one away",
    ),
    (
        r"does not contain a multiple of",
        "no multiple of multipleOf was found within minimum and maximum. Widen them, or use an enum of the "
        "values",
    ),
    (r"invalid multiple of", "multipleOf must be a number above 0"),
    (r"multipleOf' has too many digits", "multipleOf has more digits than are held exactly. Round it"),
    (
        r"(anyOf|oneOf|enum) is empty|No options in anyOf",
        "enum, anyOf and oneOf must have a value that is left",
    ),
    (
        r"Failed to generate regex for (integer|float) range",
        "minimum and maximum cannot be enforced. Leave one out, or bring them closer to 0",
    ),
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties can be enforced only where all of properties are in required. "
        "Require them, or leave the count out",
    ),
    (
        r"[Uu]nsatisfiable[^:]*: (?P<what>.*)",
        "Unsatisfiable schema, no value keeps to it: {what}. Take one of those keywords away",
    ),
    (r"^Invalid type: (?P<what>.*)", "Invalid type {what}: it must be one of JSON's, or a list of them"),
)
"""What is found in a message of the library's, and what is said instead. The first counts."""
_REGEXES = (
    (
        r"look-around, including|lookarounds not supported",
        "look-around and \\b are not supported in regular expressions. Say it without them: {all}",
    ),
    (r"backreferences are not supported", "references are not supported in regular expressions: {all}"),
)
_ALL = (
    (
        r"^NoExtensionBias$",
        "no text can ever match it, as where a rule or a $ref leads to nothing but itself, or bounds leave "
        "no multiple of multipleOf",
    ),
    (
        r"lexer precomputation failed|fuel exhausted|too many expressions|grammar size",
        "it is too large for the compiler's limits ({all}). Make it simpler: fewer or shorter patterns, "
        "alternatives and repetitions",
    ),
)


def explained(kind: ConstraintKind, text: str) -> str:
    """The message for people who know nothing of the library."""
    text = error_of(text)
    is_schema = kind in ("json_schema", "json_object")
    for pattern, said in (*_ALL, *_REGEXES, *(_SCHEMAS if is_schema else ())):
        if (found := re.search(pattern, text)) is not None:
            return str(said.format(all=text, **found.groupdict()))
    return f"the {'schema' if is_schema else 'text'} cannot be used: {text}"


def error_of(text: str) -> str:
    """What llguidance says, without what it does not say."""
    text = " ".join(line.strip() for line in text.splitlines() if "non-verbose" not in line).strip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
