"""Nothing in a schema is passed over: it is enforced, it is a note, or it is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenfold.constraints.schema import check_schema
from tenfold.limits import RequestError, Unsupported
from tests.helpers.schemas import SCHEMAS


def test_schemas_that_clients_send_are_taken() -> None:
    """Fifty of them."""
    assert len(SCHEMAS) == 50
    for schema in SCHEMAS:
        check_schema("schema", json.dumps(schema))


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "then", "else", "contains", "minContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("contentEncoding", "$dynamicRef", "nullable", "maxLenght", "x-guidance", "divisibleBy"),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_by_its_place(keyword: str) -> None:
    """At any depth and behind any keyword that holds schemas; where it is only data, nothing is said."""
    bad: dict[str, Any] = {keyword: True}
    for schema, place in (
        (bad, "s"),
        ({"properties": {"a": {"items": bad}}}, "s.properties.a.items"),
        ({"anyOf": [True, {"additionalProperties": bad}]}, "s.anyOf[1].additionalProperties"),
        ({"$defs": {"d": {"prefixItems": [bad]}}}, "s.$defs.d.prefixItems[0]"),
        ({"items": [{}, bad]}, "s.items[1]"),
    ):
        with pytest.raises(Unsupported) as caught:
            check_schema("s", json.dumps(schema))
        assert caught.value.field == f"{place}.{keyword}"
    for data in ({"const": bad}, {"enum": [bad]}, {"default": bad}, {"examples": [bad]}, {"x-note": bad}):
        check_schema("s", json.dumps(data))
    check_schema("s", json.dumps({"properties": {keyword: {}}}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('"x"', "object"),
        ('{"properties":[]}', "object"),
        ('{"anyOf":{}}', "list"),
        ('{"anyOf":[]}', "list"),
        ('{"items":3}', "schema"),
        ('{"format":"iri"}', "date-time"),
        ('{"format":"unknown"}', "date-time"),
        ('{"pattern":3}', "regular expression"),
        (json.dumps({"pattern": "a" * 3000}), "2048"),
        (json.dumps({"patternProperties": {"a" * 3000: {}}}), "2048"),
        ('{"items":' * 70 + "{}" + "}" * 70, "64 deep"),
        ('{"items":' * 30000 + "{}" + "}" * 30000, "nested too deeply"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, says: str) -> None:
    """With what would do."""
    with pytest.raises(RequestError, match=says):
        check_schema("s", text)
