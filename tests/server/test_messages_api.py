"""Anthropic's Messages API against a live server: the official client, and the bytes themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tenfold.server.errors import ApiError
from tenfold.server.messages_api.body import parse_message
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for

anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")

CALL = 'I will. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
SCRIPTS = {
    "after": "It is 3.",
    "cut": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x',
    "two": CALL + '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "call": CALL,
    "plain": "Hello you there",
    "long": "la " * 1000,
}
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that says what it is told to."""
    fake = FakeConfig(delay_s=0.001, max_context=4096, scripts=SCRIPTS)
    with running_server(tmp_path_factory.mktemp("server") / "log", fake) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def body(content: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": content}],
        **fields,
    }


def raw(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/messages", json=fields, headers={"anthropic-version": "2023-06-01"})


@pytest.mark.parametrize("say", ["plain", "call", "two", "cut"])
def test_whole_and_streamed_say_the_same(client: Any, say: str) -> None:
    """The blocks, the end and the usage of a stream are those of a whole answer."""
    request = body(f"@{say}@", tools=[ADD])
    if say == "cut":
        request["max_tokens"] = len(SCRIPTS["cut"])
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()

    def blocks(message: Any) -> list[Any]:
        # Only the ids of calls are new each time.
        shown = [block.to_dict() for block in message.content]
        return [{**block, "id": None} if block["type"] == "tool_use" else block for block in shown]

    assert blocks(whole) == blocks(streamed)
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)
    assert whole.usage == streamed.usage
    if say == "plain":
        assert (whole.content[0].text, whole.stop_reason) == ("Hello you there", "end_turn")
        assert whole.usage.output_tokens == len("Hello you there") + 1
    elif say == "cut":
        assert (whole.content[0].input["a"], whole.stop_reason) == (1, "max_tokens")
    else:
        assert [block.type for block in whole.content[:2]] == ["text", "tool_use"]
        assert (whole.content[1].name, whole.content[1].input) == ("add", {"a": 1, "b": [2, "x"]})
        assert whole.stop_reason == "tool_use"


def test_a_tools_result_goes_back(client: Any) -> None:
    """The answer as it came, with its result and more text behind it, is the next request's conversation."""
    first = client.messages.create(**body("@call@", tools=[ADD]))
    call = first.content[1]
    messages = [
        {"role": "user", "content": "@call@"},
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "@after@"},
            ],
        },
    ]
    answer = client.messages.create(model="fake", max_tokens=50, tools=[ADD], messages=messages)
    assert answer.content[0].text == "It is 3."


def test_one_call_at_a_time(client: Any) -> None:
    """disable_parallel_tool_use: the answer ends with its first call; tool_choice none: it is text."""
    one = client.messages.create(
        **body("@two@", tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    )
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = client.messages.create(**body("@call@", tools=[ADD], tool_choice={"type": "none"}))
    assert [block.type for block in none.content] == ["text"]
    assert "<tool_call>" in none.content[0].text


def test_a_stop_sequence_is_named_and_never_seen(client: Any) -> None:
    """Whole and streamed: which one it was, and nothing of it or behind it."""
    request = body("@plain@", stop_sequences=["never", "you t"])
    whole = client.messages.create(**request)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "you t")
    assert whole.content[0].text == "Hello "
    assert whole.usage.output_tokens == len("Hello you t")
    with client.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == "Hello "
        assert stream.get_final_message().stop_sequence == "you t"


def test_the_events_of_a_stream(server: ServerProcess) -> None:
    """Names, order and indices, as the documentation has them; the id's header is there twice."""
    response = raw(server, **body("@call@", tools=[ADD], stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    events = []
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    deltas = "content_block_delta"
    assert kinds[:4] == ["message_start", "ping", "content_block_start", deltas]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert [kind for kind in kinds if kind != deltas] == [
        "message_start", "ping", "content_block_start", "content_block_stop",
        "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    pieces = [event["delta"] for event in events if event["type"] == deltas]
    assert {piece["type"] for piece in pieces} == {"text_delta", "input_json_delta"}
    assert json.loads("".join(piece.get("partial_json", "") for piece in pieces)) == {"a": 1, "b": [2, "x"]}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_input_tokens_add_up_and_are_counted_before(client: Any) -> None:
    """count_tokens says what a request will use, of any length; cached ones are apart from the others."""
    request = body([{"type": "text", "text": "@plain@", "cache_control": {"type": "ephemeral"}}], tools=[ADD])
    usage = client.messages.create(**request, system=[{"type": "text", "text": "Be kind."}]).usage
    assert usage.cache_read_input_tokens > 0
    del request["max_tokens"]
    counted = client.messages.count_tokens(**request, system="Be kind.")
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    long = client.messages.count_tokens(model="fake", messages=body("x" * 5000)["messages"])
    assert long.input_tokens > 5000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"colour": "blue"}, "colour"),
        ({"user": "me"}, "user"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        (body([{"type": "image", "source": {}}]), "messages[0].content[0].type"),
        (body([{"type": "document", "source": {}}]), "messages[0].content[0].type"),
        (body([{"type": "text", "text": "x", "colour": 1}]), "messages[0].content[0].colour"),
        (body([{"type": "text", "text": "x", "cache_control": {"type": "no"}}]),
         "messages[0].content[0].cache_control"),
        (body([{"type": "tool_result", "tool_use_id": "x"}]), "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         "messages[1]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 5000}, "messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    """400 in Anthropic's shape, with the very field in the message."""
    response = raw(server, **{**body("Hi"), **fields})
    answer = response.json()
    assert response.status_code == 400, answer
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["error"]["param"] == param
    assert answer["request_id"] == response.headers["request-id"]
    if param != "messages":
        assert param in answer["error"]["message"]


def test_errors_arrive_as_the_clients_own_exceptions(client: Any, server: ServerProcess) -> None:
    """By status, and with the type in the body."""
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**body("Hi", extra_body={"temperature": 1.5}))
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature is 1.5" in str(bad.value)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**body("Hi"), "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    long = httpx.post(f"{server.url}/v1/messages", content=b" " * ((8 << 20) + 1))
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    method = httpx.get(f"{server.url}/v1/messages/count_tokens")
    assert (method.status_code, method.json()["type"]) == (405, "error")


def test_hanging_up_cancels(client: Any, server: ServerProcess) -> None:
    """A stream that is closed leaves nothing in flight."""
    with client.messages.stream(**body("@long@", max_tokens=3000)) as stream:
        next(iter(stream.text_stream))
        assert server.metric("tenfold_requests_in_flight") == 1
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)
    assert server.metric('tenfold_requests_total{finish="abort"}') >= 1


def test_a_stream_that_breaks_ends_with_an_error(tmp_path: Any) -> None:
    """An event of its own, and no message_stop: the client raises."""
    fake = FakeConfig(delay_s=0.02, max_context=4096, scripts=SCRIPTS, only_once=str(tmp_path / "once"))
    with running_server(tmp_path / "log", fake) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        with (
            pytest.raises(anthropic.APIStatusError) as failed,
            client.messages.stream(**body("@long@", max_tokens=3000)) as stream,
        ):
            for number, _ in enumerate(stream):
                if number == 10:
                    server.kill_worker()
        assert failed.value.body["error"]["type"] in ("api_error", "overloaded_error")


def test_a_field_that_is_needed_is_not_said_to_be_optional() -> None:
    """The range of max_tokens is that of the other APIs, but for leaving it out."""
    data = json.dumps({"max_tokens": 0, "messages": [{"role": "user", "content": "x"}]}).encode()
    with pytest.raises(ApiError, match=r"max_tokens is 0; it must be an integer from 1 to 2147483647$"):
        parse_message(data, (), 100)
