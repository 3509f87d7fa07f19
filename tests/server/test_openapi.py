"""The OpenAPI document says what the server does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.server.errors import ApiError
from tenfold.server.openapi_bodies import BODIES
from tenfold.server.requests import MAX_STOPS
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server

needs_schemathesis = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis"
)

VOCAB = 300
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": CHAT_TOOLS,
}
"""What must stand beside a field for its value to matter."""

OTHER_TOOLS: dict[str, dict[str, Any]] = {
    "MessagesRequest": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "CountTokensRequest": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "ResponsesRequest": {"tools": [{"type": "function", "name": "f"}]},
}
SCHEMAS = {name: body.schema(VOCAB) for name, body in BODIES.items()}
FIELDS = [(kind, name) for kind, schema in SCHEMAS.items() for name in schema["properties"]]


def bounds(schema: Any) -> list[Any]:
    """Values at the edges of everything in a schema: what a range or a list of values allows just so, or
    just not."""
    found: list[Any] = []
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("minimum", "maximum"):
                step = 1 if isinstance(value, int) else abs(value) * 1e-9 or 1e-9
                found += [value, value - step, value + step]
            elif name == "enum":
                found += value
            else:
                found += [value] if name == "const" else bounds(value)
    elif isinstance(schema, list):
        found = [edge for item in schema for edge in bounds(item)]
    return found


EDGES = [edge for schema in SCHEMAS.values() for edge in bounds(schema)]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 400)
    | st.sampled_from(EDGES)
    | st.floats(-3, 3)
    | st.integers(-2, 30).map(float)
    | st.text(max_size=3)
)
lists = st.lists(leaves, max_size=MAX_STOPS + 2) | st.lists(
    st.lists(st.integers(0, 9), max_size=2), max_size=2
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"]), "text": st.text(max_size=2) | leaves},
    optional={"more": leaves},
)
messages: st.SearchStrategy[Any] = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "robot"])},
        optional={
            "content": st.text(max_size=3) | st.lists(parts, max_size=2) | leaves,
            "name": leaves,
            "refusal": leaves | st.just([]),
            "tool_calls": st.sampled_from([None, [], [1], {}]),
            "more": leaves,
        },
    ),
    max_size=2,
)
objects = (
    st.dictionaries(st.sampled_from(["0", "5", "299", "x", "", "-1"]), leaves, max_size=2)
    | st.fixed_dictionaries({}, optional={"include_usage": leaves, "more": leaves})
    | st.sampled_from([{}, {"type": "text"}, {"type": "json_object"}, ["text"]])
)
values = leaves | lists | messages | objects


def companions(kind: str, field: str, value: Any) -> Mapping[str, Any]:
    """What must stand beside a field for its value alone to matter."""
    if field == "best_of" and value is not None:
        return {"n": value}
    if field == "tool_choice" and kind in OTHER_TOOLS:
        return OTHER_TOOLS[kind]
    if field == "stream_options" and kind == "ResponsesRequest":
        return {}
    return COMPANIONS.get(field, {})


def accepted(kind: str, body: dict[str, Any]) -> bool:
    """Whether the parser takes a body."""
    try:
        BODIES[kind].parse(json.dumps(body).encode(), ("here",), VOCAB)
    except ApiError as error:
        assert error.status in (400, 404)
        return error.status == 404  # names of models and responses are any strings
    return True


@needs_schemathesis  # for the validator that comes with it
@pytest.mark.parametrize(("kind", "field"), FIELDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_document_allows_what_the_parser_takes(kind: str, field: str, data: st.DataObject) -> None:
    """Field by field, any value: valid by the schema if and only if the server takes it."""
    import jsonschema_rs

    schema = SCHEMAS[kind]
    validator = jsonschema_rs.Draft202012Validator(schema)
    edges = bounds(schema["properties"][field])
    value = data.draw(values | st.sampled_from(edges) if edges else values)
    body = {**BODIES[kind].example, **companions(kind, field, value), field: value}
    assert validator.is_valid(body) == accepted(kind, body), body


def test_every_field_that_is_taken_raw_has_a_form() -> None:
    """And no form is there for a field that nobody takes."""
    raw: set[str] = set()
    forms: set[str] = set()
    for kind, body in BODIES.items():
        own = {name for name, rule in body.taken(VOCAB).items() if rule is None}
        assert own <= set(body.forms(VOCAB)), kind
        raw |= own
        forms |= set(body.forms(VOCAB))
    assert forms == raw


@needs_schemathesis
def test_calls_made_of_the_document(tmp_path: Path) -> None:
    """Right and wrong ones: no 5xx, no hang, every answer as documented (`make soak`: 20,000)."""
    from tests.helpers.api_fuzz import fuzz

    with running_server(tmp_path / "log", FakeConfig(faults=False)) as server:
        statuses = fuzz(server.url, 60, begin=7)
        assert server.metric("tenfold_requests_in_flight") == 0
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        assert statuses[f"{path} 400"] > 0
    assert statuses["/v1/completions 200"] > 0


def test_stats_tell_what_was_done(server: ServerProcess) -> None:
    """The counters of /stats are those of /metrics."""
    body = {"prompt": "x" * 20, "max_tokens": 3, "ignore_eos": True}
    before = httpx.get(f"{server.url}/stats").json()
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 400
    after = httpx.get(f"{server.url}/stats").json()
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    assert grown | {"prompt_tokens": 20, "cached_prompt_tokens": 16, "generated_tokens": 3} == grown
    assert grown | {"requests_ended": 1, "requests_rejected": 1, "first_tokens": 1} == grown
    assert after["uptime_s"] > before["uptime_s"]
    assert after["model"] == "fake" and after["ready"] and after["not_ready_reason"] is None
    assert after["workers"][0]["kv_total_bytes"] == 4096 * 1024


@needs_schemathesis
def test_calls_to_a_server_of_several_models(tmp_path: Path) -> None:
    """The same, with admin keys: what is said of loading and unloading is true too."""
    from tests.helpers.api_fuzz import fuzz

    keys = tmp_path / "admins"
    keys.write_text("admin-key")
    keys.chmod(0o600)
    fake = FakeConfig(faults=False)
    with running_server(tmp_path / "log", fake, others={"b": fake}, admin_key_file=str(keys)) as server:
        statuses = fuzz(server.url, 60, begin=11, model="b", headers={"x-api-key": "admin-key"})
    assert statuses["/v1/completions 200"] > 0
    assert statuses["/admin/models 400"] + statuses["/admin/models 409"] > 0
    assert statuses["/admin/models/{model} 404"] > 0
