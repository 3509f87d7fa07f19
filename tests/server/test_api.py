"""A live server and the clients that people use."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers import expected
from tests.helpers.fake_engine import REFUSED, FakeConfig
from tests.helpers.fake_text import FakeTokenizer, piece_of
from tests.helpers.server_process import ServerProcess, running_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(content: str) -> Any:
    return [{"role": "user", "content": content}]


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream, strictly read: nothing but data and empty lines, and [DONE] at the end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    """Same request and seed: same text, finish reason and usage, both ways."""
    fields: Any = {
        "model": "fake",
        "messages": ask("Hello there, how are you?"),
        "max_tokens": 40,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**fields)
    text = expected.chat_text("Hello there, how are you?", 5, 40)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert not chunks[-2].choices[0].delta.content
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == len("user:Hello there, how are you?|")
    assert whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 16


def test_a_completion_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    """From text and from token ids."""
    text = expected.text("Once upon", 3, 20)
    ids = FakeTokenizer().encode("Once upon", add_special_tokens=True, parse_special=True)
    fields: Any = {"model": "fake", "max_tokens": 20, "seed": 3, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(prompt="Once upon", **fields).choices[0].text == text
    assert client.completions.create(prompt=ids, **fields).choices[0].text == text
    stream = client.completions.create(prompt="Once upon", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_end_of_sequence_ends_an_answer(client: openai.OpenAI) -> None:
    """finish_reason stop; the token counts and is not shown."""
    prompt = "x" * 90  # the fake's end of sequence is at position 96
    whole = client.completions.create(model="fake", prompt=prompt, max_tokens=50, seed=1)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].text == expected.text(prompt, 1, 6)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 7


def test_a_stop_string_across_tokens_is_never_seen(server: ServerProcess) -> None:
    """Whole and streamed: the text ends before it, and tokens count up to its last one."""
    ids = tuple(FakeTokenizer().encode("abc", add_special_tokens=True, parse_special=True))
    pieces = [piece_of(id) for id in expected.tokens(ids, 11, 400)]
    stop = pieces[7][-1] + pieces[8] + pieces[9][:1]
    full = "".join(pieces)
    used = next(count for count in range(1, 400) if stop in "".join(pieces[:count]))
    body = {"prompt": "abc", "seed": 11, "max_tokens": 400, "ignore_eos": True, "stop": ["never", stop]}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert whole["choices"][0]["text"] == full[: full.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == used
    streamed = events(httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole["choices"][0]["text"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


def test_every_event_has_the_whole_shape(server: ServerProcess) -> None:
    """One id and time for all events; usage is null in all but the last, as OpenAI has it."""
    body = {
        "messages": ask("Hi"),
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-request-id": "trace-1"})
    found = events(response)
    assert response.headers["x-request-id"] == "trace-1"
    assert {event["id"] for event in found} == {"chatcmpl-trace-1"}
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert {(event["created"], event["model"]) for event in found} == {(found[0]["created"], "fake")}
    assert [event["usage"] is None for event in found] == [True] * (len(found) - 1) + [False]


def test_chat_logprobs_have_openais_shape(client: openai.OpenAI) -> None:
    """One entry a shown token, with its bytes and alternatives, streamed or not."""
    fields: Any = {"model": "fake", "messages": ask("Hi"), "max_tokens": 6, "seed": 2, "logprobs": True}
    whole = client.chat.completions.create(**fields, top_logprobs=2, extra_body={"ignore_eos": True})
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert [bytes(entry.bytes or []) for entry in content] == [entry.token.encode() for entry in content]
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in content)
    stream = client.chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
    found = [
        entry
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [(entry.token, entry.top_logprobs) for entry in found] == [(entry.token, []) for entry in content]


def test_completion_logprobs_have_openais_shape(client: openai.OpenAI) -> None:
    """Columns of equal length; offsets point into the text, also across events."""
    fields: Any = {"model": "fake", "prompt": "Hi", "max_tokens": 6, "seed": 2, "logprobs": 2}
    choice = client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert "".join(found.tokens) == choice.text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert found.token_logprobs == [-0.5] * 6
    assert found.top_logprobs is not None and all(len(top) == 2 for top in found.top_logprobs)
    offsets: list[int] = []
    for chunk in client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == found.text_offset


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    """The error object is what the openai package understands."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=ask("Hi"), temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=ask("Hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model="fake", prompt="Hi", extra_body={"colour": "blue"})
    assert (unknown.value.param, unknown.value.code) == ("colour", "unknown_parameter")


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_400(
    server: ServerProcess, max_tokens: int | None, stream: bool
) -> None:
    """By itself, or with the tokens that were asked for; the numbers are in the message."""
    size = 600 if max_tokens is None else 400
    body = {"prompt": "x" * size, "max_tokens": max_tokens, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(size) in error["message"]
    assert "512" in error["message"]


def test_a_prompt_beyond_the_kv_memory_is_400(tmp_path: Path) -> None:
    """The front knows how much the engine's memory holds, and says so in the field that was sent."""
    with running_server(tmp_path / "log", FakeConfig(kv_pages=4)) as server:
        for path, field, value in (
            ("completions", "prompt", "x" * 65),
            ("chat/completions", "messages", ask("x" * 65)),
        ):
            error = httpx.post(f"{server.url}/v1/{path}", json={field: value}).json()["error"]
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert "KV memory, which holds 64" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_400_with_its_reason(server: ServerProcess, stream: bool) -> None:
    """The engine's own check speaks to the client before any stream has begun, names the field, and counts as
    a refusal and not as a failure."""
    rejected = 'tenfold_requests_rejected_total{status="400"}'
    before = server.metric(rejected)
    body = {"prompt": [1, REFUSED], "stream": stream}
    id = f"refused-{stream}"
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": id})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "invalid_value")
    assert "this engine refuses" in error["message"]
    assert server.metric(rejected) == before + 1
    assert server.metric('tenfold_requests_total{finish="error"}') == 0
    assert server.metric("tenfold_requests_in_flight") == 0
    lines = [line for line in server.log.read_text().splitlines() if id in line]
    assert len(lines) == 1 and "refused: 400" in lines[0]


def test_a_conversation_that_the_template_refuses_is_400(server: ServerProcess) -> None:
    """The template's words reach the client."""
    body = {"messages": [{"role": "tool", "content": "42"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "cannot begin with a tool" in response.json()["error"]["message"]


def test_a_body_that_is_too_long_is_413(server: ServerProcess) -> None:
    """Announced or found out while reading, and the server lives on."""
    long = b" " * ((8 << 20) + 1)
    response = httpx.post(f"{server.url}/v1/completions", content=long)
    assert response.status_code == 413
    response = httpx.post(f"{server.url}/v1/completions", content=iter([long[:1000], long]))
    assert response.status_code == 413
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "Identity, gzip", "x" * 500])
def test_an_encoded_body_is_415(server: ServerProcess, encoding: str) -> None:
    """It is not taken for JSON; identity is no encoding."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    url = f"{server.url}/v1/completions"
    response = httpx.post(url, content=body, headers={"content-encoding": encoding})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    error = response.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert len(error["message"]) < 200
    assert httpx.post(url, content=body, headers={"content-encoding": "Identity"}).status_code == 200


def test_paths_and_methods_that_are_not_there(server: ServerProcess) -> None:
    """404 and 405 as error objects, with what there is."""
    missing = httpx.get(f"{server.url}/v2/models")
    assert missing.status_code == 404
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    wrong = httpx.get(f"{server.url}/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_models_health_ready_and_metrics(server: ServerProcess, client: openai.OpenAI) -> None:
    """What monitors and clients ask for."""
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "workers": {"w0": "up"}}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    before = server.metric("tenfold_generated_tokens_total")
    client.completions.create(model="fake", prompt="Hi", max_tokens=9, extra_body={"ignore_eos": True})
    assert server.metric("tenfold_generated_tokens_total") == before + 9
    assert server.metric('tenfold_requests_total{finish="length"}') >= 1
    assert server.metric("tenfold_time_to_first_token_seconds_count") >= 1
    assert server.metric("tenfold_kv_pages_total") == 4096


def test_each_request_leaves_one_line_in_the_log(server: ServerProcess) -> None:
    """Under its id: new and cached tokens, times, finish."""
    headers = {"x-request-id": "find-me"}
    body = {"prompt": "x" * 20, "max_tokens": 3, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    lines = [line for line in server.log.read_text().splitlines() if "find-me" in line]
    assert len(lines) == 1
    for part in ("prompt=20", "cached=16", "new=4", "queue_ms=2", "ttft_ms=", "tokens=3", "finish=length"):
        assert part in lines[0]


def test_many_streams_at_once_do_not_mix(server: ServerProcess) -> None:
    """Thirty streams over one connection pool, each with its own text."""

    def one(seed: int) -> None:
        body = {"prompt": "abc", "seed": seed, "max_tokens": 60, "ignore_eos": True, "stream": True}
        found = events(httpx.post(f"{server.url}/v1/completions", json=body, timeout=30))
        text = "".join(event["choices"][0]["text"] for event in found)
        assert text == expected.text("abc", seed, 60)

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(one, range(30)))


def test_a_second_request_on_the_same_connection(server: ServerProcess) -> None:
    """Keep-alive: a finished stream leaves the connection usable."""
    with httpx.Client() as http:
        for stream in (True, False, True):
            body = {"prompt": "abc", "max_tokens": 3, "stream": stream}
            assert http.post(f"{server.url}/v1/completions", json=body).status_code == 200


def test_bytes_that_are_no_http_do_not_harm(server: ServerProcess) -> None:
    """Others are served on."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"\x16\x03\x01\x00\xff hello\r\n\r\n")
        sock.recv(1000)
    assert httpx.get(f"{server.url}/ready").status_code == 200
