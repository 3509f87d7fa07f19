"""OpenAI's Responses API against a live server: the official client, and the events themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for

CALL = 'I will. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
SCRIPTS = {
    "after": "It is 3.",
    "cut": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, 3',
    "two": CALL + '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "call": CALL,
    "plain": "Hello you there",
    "long": "la " * 1000,
}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that says what it is told to."""
    fake = FakeConfig(delay_s=0.001, max_context=4096, scripts=SCRIPTS)
    with running_server(tmp_path_factory.mktemp("server") / "log", fake) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def without_ids(response: Any) -> Any:
    """What of a response must be the same for the same request."""
    shown = json.loads(response.to_json())
    for name in ("id", "created_at", "completed_at"):
        shown.pop(name, None)
    for item in shown["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return shown


@pytest.mark.parametrize("say", ["plain", "call", "two", "cut"])
def test_whole_and_streamed_say_the_same(client: openai.OpenAI, say: str) -> None:
    """Items, status and usage: as answered, as summed up by the client, and in the last event."""
    limit = len(SCRIPTS["cut"]) if say == "cut" else None
    request: Any = {"model": "fake", "input": f"@{say}@", "tools": [ADD], "max_output_tokens": limit}
    whole = client.responses.create(**request)
    if say == "cut":
        # The client's own sum wants whole arguments, so the plain stream is read.
        last = list(client.responses.create(**request, stream=True))[-1]
        assert last.type == "response.incomplete"
        streamed = last.response
    else:
        with client.responses.stream(**request) as stream:
            streamed = stream.get_final_response()
    assert without_ids(whole) == without_ids(streamed)
    assert whole.usage is not None
    if say == "plain":
        assert (whole.output_text, whole.status) == ("Hello you there", "completed")
        assert whole.usage.output_tokens == len("Hello you there") + 1
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        assert whole.usage.input_tokens_details.cached_tokens > 0
    elif say == "cut":
        assert whole.incomplete_details is not None
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in whole.output] == ["incomplete"]
    else:
        first, call = whole.output[:2]
        assert (first.type, call.type) == ("message", "function_call")
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": [2, "x"]})


def test_the_events_of_a_stream(server: ServerProcess) -> None:
    """Names, order, numbers; every delta belongs to an item that is open."""
    request = {"model": "fake", "input": "@call@", "tools": [ADD], "stream": True}
    response = httpx.post(f"{server.url}/v1/responses", json=request)
    events = []
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    items = events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == items[0]["content"][0]["text"] == "I will. "


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI) -> None:
    """Its items need not be sent again; its instructions do."""
    first = client.responses.create(model="fake", input="@call@", tools=[ADD], instructions="Be kind.")
    call = first.output[1]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    more: Any = {"role": "user", "content": [{"type": "input_text", "text": "@after@"}]}
    second = client.responses.create(
        model="fake", previous_response_id=first.id, input=[output, more], tools=[ADD]
    )
    assert second.output_text == "It is 3."
    assert second.previous_response_id == first.id
    # The same, with everything sent: an answer goes back as it came.
    items: Any = [{"role": "user", "content": "@call@"}, *first.output, output, more]
    again = client.responses.create(model="fake", input=items, tools=[ADD], store=False)
    assert again.usage == second.usage
    assert client.responses.retrieve(second.id) == second
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["function_call_output", "message"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_a_response_that_is_gone_is_404(client: openai.OpenAI) -> None:
    """Deleted, or never there; the field is named where one named it."""
    kept = client.responses.create(model="fake", input="@plain@")
    client.responses.delete(kept.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(kept.id)
    with pytest.raises(openai.NotFoundError) as lost:
        client.responses.create(model="fake", input="x", previous_response_id=kept.id)
    assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"colour": "blue"}, "colour"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_output_tokens": 5000}, "input"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_what_is_wrong_is_named(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    """400 with the very field, as this API calls it."""
    response = httpx.post(f"{server.url}/v1/responses", json={"model": "fake", "input": "Hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("a=1", "a")]
)
def test_a_wrong_query_is_400(client: openai.OpenAI, server: ServerProcess, query: str, param: str) -> None:
    """Nothing in it is overlooked."""
    kept = client.responses.create(model="fake", input="@plain@")
    response = httpx.get(f"{server.url}/v1/responses/{kept.id}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_items_come_in_pages(client: openai.OpenAI) -> None:
    """Every item once, in either order."""
    items: Any = [{"role": "user", "content": str(number)} for number in range(7)]
    kept = client.responses.create(model="fake", input=items, max_output_tokens=1)
    for order in ("asc", "desc"):
        listed: Any = client.responses.input_items.list(kept.id, order=order, limit=3)
        texts = [item.content[0].text for item in listed]
        assert texts == sorted(map(str, range(7)), reverse=order == "desc")


def test_hanging_up_cancels(client: openai.OpenAI, server: ServerProcess) -> None:
    """A stream that is closed leaves nothing in flight."""
    stream = client.responses.create(model="fake", input="@long@", max_output_tokens=3000, stream=True)
    next(iter(stream))
    assert server.metric("tenfold_requests_in_flight") == 1
    stream.close()
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)


def test_a_stream_that_breaks_ends_with_failed(tmp_path: Any) -> None:
    """The terminal event says so, and nothing is stored."""
    fake = FakeConfig(delay_s=0.02, max_context=4096, scripts=SCRIPTS, only_once=str(tmp_path / "once"))
    with running_server(tmp_path / "log", fake) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.responses.create(model="fake", input="@long@", max_output_tokens=3000, stream=True)
        events = []
        for event in stream:
            events.append(event)
            if len(events) == 10:
                server.kill_worker()
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
