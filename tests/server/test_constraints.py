"""The fields that constrain a text: what clients of OpenAI, vLLM and SGLang send, and what is refused."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.protocol import Constraint
from tenfold.server.constraints import take_constraint
from tenfold.server.errors import ApiError
from tenfold.server.fields import Fields
from tests.helpers.server_process import ServerProcess, running_server, wait_for

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'


def taken(**body: Any) -> Constraint | None:
    """What a body asks for; every field must have been taken."""
    fields = Fields(body)
    constraint = take_constraint(fields)
    fields.finish()
    return constraint


@pytest.mark.parametrize(
    ("body", "kind", "text", "field"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            *("json_schema", TEXT, "response_format.json_schema.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA},
                }
            },
            *("json_schema", TEXT, "response_format.json_schema.schema"),
        ),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            *("json_schema", TEXT, "response_format.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]', "guided_choice"),
        ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "g"}, "grammar", "g", "ebnf"),
    ],
)
def test_every_client_is_understood(body: dict[str, Any], kind: str, text: str, field: str) -> None:
    """The order of a schema's properties is that in which the client wrote them."""
    constraint = taken(**body)
    assert constraint is not None
    assert (constraint.kind, constraint.text, constraint.field) == (kind, text, field)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "regex": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "disable_any_whitespace": False}},
        {"guided_decoding_backend": "auto"},
    ],
)
def test_what_asks_for_nothing_passes(body: dict[str, Any]) -> None:
    """Clients send such fields by habit."""
    assert taken(**body) is None


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"response_format": {}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_value"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            *("response_format.json_schema.schema", "missing_parameter"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
            *("response_format.json_schema.name", "invalid_value"),
        ),
        *(
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": {}}}},
                *("response_format.json_schema.name", "invalid_value"),
            )
            for name in ("", "bad name!", "x" * 65)
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}}},
            *("response_format.json_schema.strict", "invalid_value"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"scheme": {}}}},
            *("response_format.json_schema.scheme", "unknown_parameter"),
        ),
        ({"structured_outputs": []}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_parameter"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            *("structured_outputs.whitespace_pattern", "unsupported_value"),
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "invalid_value"),
        ({"guided_json": 3}, "guided_json", "invalid_value"),
        ({"guided_regex": {}}, "guided_regex", "invalid_value"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "invalid_value"),
        ({"guided_grammar": []}, "guided_grammar", "invalid_value"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported_value"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "unsupported_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "invalid_value"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    """Also more than one constraint."""
    with pytest.raises(ApiError) as caught:
        taken(**body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param in caught.value.message


def test_a_constraint_that_cannot_be_enforced_never_reaches_the_worker(server: ServerProcess) -> None:
    """400 before any token, with the place in the schema; the server goes on."""
    before = server.metric("tenfold_generated_tokens_total")
    for fields, param, code in (
        ({"guided_regex": "["}, "guided_regex", "invalid_value"),
        ({"guided_json": {"items": {"not": {}}}}, "guided_json.items.not", "unsupported_value"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "invalid_value"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "invalid_value"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "invalid_value"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "invalid_value"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "invalid_value"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "invalid_value"),
    ):
        body = {"prompt": "Hi", "max_tokens": 4, "stream": True, **fields}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert json.dumps(error).isascii()
    assert server.metric("tenfold_generated_tokens_total") == before
    good = {"prompt": "Hi", "max_tokens": 4, "guided_regex": "a+"}
    assert httpx.post(f"{server.url}/v1/completions", json=good, timeout=60).status_code == 200


def costly(number: int) -> dict[str, Any]:
    """One of many bodies with a schema that compiles for minutes."""
    schema = {"title": str(number), "allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(200)]}
    return {"prompt": "Hi", "max_tokens": 4, "guided_json": schema}


def test_what_kills_the_compiler_kills_nothing_else(server: ServerProcess) -> None:
    """Overflows of its stack, compiling without end: 400 by the field, and others are served meanwhile."""
    url = f"{server.url}/v1/completions"
    crash = 'start: %json {"type":"integer","minimum":-1e30,"maximum":-1e20}'
    good = {"prompt": "Hi", "max_tokens": 4, "guided_regex": "a+b?"}
    assert httpx.post(url, json=good, timeout=60).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, url, json=costly(0), timeout=60)
        for body, says in (
            ({"guided_json": {"type": "integer", "minimum": -1e30, "maximum": -1e20}}, "held exactly"),
            ({"guided_grammar": crash}, "held exactly"),
        ):
            response = httpx.post(url, json={"prompt": "Hi", "max_tokens": 4, **body}, timeout=60)
            assert response.status_code == 400 and says in response.json()["error"]["message"]
        assert httpx.post(url, json=good, timeout=60).status_code == 200
        error = slow.result().json()["error"]
    assert (error["param"], error["code"]) == ("guided_json", "invalid_value")
    assert "takes more than 1 s to compile" in error["message"]
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200
    assert server.metric('tenfold_constraint_refused_total{model="fake",reason="time"}') == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_while_constraints_are_checked(tmp_path: Path, number: int) -> None:
    """Within its grace, without a traceback (`running_server` looks for one), and no process is left."""
    with running_server(tmp_path / "log") as server, ThreadPoolExecutor(8) as pool:
        url = f"{server.url}/v1/completions"
        asked = [pool.submit(httpx.post, url, json=costly(i), timeout=60) for i in range(8)]
        pids = wait_for(server.checker_pids, 60)
        assert server.stop(number) == 0
        for each in asked:
            with suppress(httpx.TransportError):
                assert each.result().status_code in (400, 503)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)
