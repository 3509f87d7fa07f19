"""Tools, reasoning, several choices, echo, tokens: a live server, and the official client where it can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tenfold.config import ServeConfig
from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.fake_text import FakeTokenizer
from tests.helpers.server_process import ServerProcess, running_server, wait_for

SCRIPTS = {
    "one": 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Rome </tool_call>"}}</tool_call>',
    "two": '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "time"}</tool_call>Done.',
    "junk": 'See <tool_call>{"name": "nobody"}</tool_call> and <tool_ca',
    "think": "<think>Rome it is.</think>It rains.",
    "cut": '<tool_call>{"name": "weather", "arguments": {"city": "' + "R" * 200 + '"}}</tool_call>',
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An engine that says what it is told, in a format with reasoning."""
    fake = FakeConfig(delay_s=0.0005, max_context=4096, scripts=SCRIPTS)
    log = tmp_path_factory.mktemp("tools") / "log"
    with running_server(log, fake, reasoning_format="think") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def names_of(message: Any) -> list[str]:
    """The tools that a message calls."""
    return [call.function.name for call in message.tool_calls]


def say(script: str) -> Any:
    return [{"role": "user", "content": f"@{script}@"}]


def test_a_call_comes_whole(client: openai.OpenAI) -> None:
    """As OpenAI's: text before it, its arguments as JSON text, the finish reason."""
    answer = client.chat.completions.create(model="fake", messages=say("one"), tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Rome </tool_call>"},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(SCRIPTS["one"]) + 1


def test_calls_come_in_pieces(client: openai.OpenAI) -> None:
    """Index, id, type and name first, then arguments; no marker is ever content; the end in a chunk of its
    own. What the client adds up is what it gets whole."""
    fields: Any = {"model": "fake", "messages": say("two"), "tools": TOOLS, "tool_choice": "auto"}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    begun: list[Any] = []
    text = ""
    for chunk in chunks:
        text += chunk.delta.content or ""
        for call in chunk.delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(begun):
                assert call.id and call.type == "function" and call.function.name
                assert call.function.arguments == ""
                begun.append([call.function.name, ""])
            else:
                assert call.index == len(begun) - 1
                assert call.id is None and call.function.name is None
                begun[call.index][1] += call.function.arguments or ""
    assert begun == [["weather", '{"city": "Rome"}'], ["time", "{}"]]
    assert text == "Done."
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert not chunks[-1].delta.content and not chunks[-1].delta.tool_calls
    with client.chat.completions.stream(model="fake", messages=say("two"), tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert names_of(final.choices[0].message) == ["weather", "time"]


def test_an_answer_with_calls_can_be_sent_back(client: openai.OpenAI) -> None:
    """The message as the client has it, then what the tools said."""
    first: Any = client.chat.completions.create(model="fake", messages=say("two"), tools=TOOLS)
    first = first.choices[0].message
    messages: list[Any] = [*say("two"), first]
    for call in first.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    answer = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_text_that_is_none_is_text(server: ServerProcess, stream: bool) -> None:
    """All of it, with finish stop; and without tools nothing is looked for."""
    for tools in (TOOLS, None):
        body = {"messages": say("junk"), "tools": tools, "stream": stream}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        if stream:
            lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
            choices = [json.loads(line[6:])["choices"][0] for line in lines]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            finish = choices[-1]["finish_reason"]
        else:
            choice = response.json()["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert (text, finish) == (SCRIPTS["junk"], "stop")


def test_a_call_that_is_cut_says_length(client: openai.OpenAI) -> None:
    """Whatever is there of it, nobody takes it for complete."""
    answer = client.chat.completions.create(model="fake", messages=say("cut"), tools=TOOLS, max_tokens=100)
    message: Any = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length"
    assert message.tool_calls[0].function.arguments.endswith("RRR")


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    """parallel_tool_calls: false ends the answer with its first call, and tokens count up to there."""
    answer = client.chat.completions.create(
        model="fake", messages=say("two"), tools=TOOLS, parallel_tool_calls=False
    )
    assert names_of(answer.choices[0].message) == ["weather"]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == SCRIPTS["two"].index("</tool_call>")


def test_no_calls_with_tool_choice_none(client: openai.OpenAI) -> None:
    """The model is not told of tools, and what it writes is text."""
    answer = client.chat.completions.create(
        model="fake", messages=say("two"), tools=TOOLS, tool_choice="none"
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SCRIPTS["two"], "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user:@two@|")


def test_errors_of_tools_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    """With the field's place."""
    bad: Any = [{"type": "function", "function": {"name": "a b"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=say("one"), tools=bad)
    assert caught.value.param == "tools[0].function.name"


def test_a_client_that_hangs_up_within_a_call_cancels_it(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    """As within text: nothing is left in flight."""
    stream = client.chat.completions.create(model="fake", messages=say("cut"), tools=TOOLS, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    stream.close()
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)
    assert server.metric('tenfold_requests_total{finish="abort"}') >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_the_text(server: ServerProcess, stream: bool) -> None:
    """In a field of its own, and counted in the usage; it may be sent back."""
    body = {
        "messages": [*say("think"), {"role": "assistant", "content": "a", "reasoning_content": "b"}],
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    if stream:
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
        events = [json.loads(line[6:]) for line in lines]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        message: Any = {
            name: "".join(delta.get(name, "") for delta in deltas)
            for name in ("content", "reasoning_content")
        }
        usage = events[-1]["usage"]
    else:
        message, usage = response.json()["choices"][0]["message"], response.json()["usage"]
    assert (message["reasoning_content"], message["content"]) == ("Rome it is.", "It rains.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(">Rome it is.</think>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_each_choice_is_what_its_own_seed_gives(server: ServerProcess, stream: bool, path: str) -> None:
    """Choice i has the seed plus i; the prompt counts once; every choice ends once."""
    prompt: Any = {"messages": [{"role": "user", "content": "Hi"}]} if path[1] == "h" else {"prompt": "Hi"}
    body = {
        **prompt,
        "n": 4,
        "seed": -2,
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    response = httpx.post(f"{server.url}/v1/{path}", json=body)
    of = expected.chat_text if path[1] == "h" else expected.text
    texts = [of("Hi", (seed + (1 << 64)) % (1 << 64), 8) for seed in (-2, -1, 0, 1)]
    found = [""] * 4
    if stream:
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
        events = [json.loads(line[6:]) for line in lines]
        finishes = []
        for event in events[:-1]:
            (choice,) = event["choices"]
            found[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
            if choice["finish_reason"]:
                finishes.append(choice["index"])
        assert sorted(finishes) == [0, 1, 2, 3]
        usage = events[-1]["usage"]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        found = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
        usage = response.json()["usage"]
    assert found == texts
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (32, 8 if path[1] == "h" else 2)


def test_several_prompts_have_choices_in_order(client: openai.OpenAI, server: ServerProcess) -> None:
    """Those of the first prompt first; texts or token ids; each prompt counts once."""
    fields: Any = {"model": "fake", "seed": 3, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=["ab", "cde"], n=2, **fields)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, expected.text("ab", 3, 5)),
        (1, expected.text("ab", 4, 5)),
        (2, expected.text("cde", 3, 5)),
        (3, expected.text("cde", 4, 5)),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)
    ids = [
        FakeTokenizer().encode(text, add_special_tokens=True, parse_special=True) for text in ("ab", "cde")
    ]
    again = client.completions.create(prompt=ids, best_of=1, **fields)
    assert [choice.text for choice in again.choices] == [
        answer.choices[0].text,
        answer.choices[2].text,
    ]
    error = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a", "x" * 5000]}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_comes_before_the_text(client: openai.OpenAI, stream: bool) -> None:
    """The prompt as it was given, or what its tokens say; not among the tokens generated."""
    ids = FakeTokenizer().encode("ab", add_special_tokens=True, parse_special=True)
    for prompt in ("ab", ids):
        fields: Any = {"model": "fake", "prompt": prompt, "echo": True, "seed": 3, "max_tokens": 5}
        answer: Any = client.completions.create(**fields, stream=stream, extra_body={"ignore_eos": True})
        if stream:
            text = "".join(chunk.choices[0].text for chunk in answer)
        else:
            text = answer.choices[0].text
            assert answer.usage.completion_tokens == 5
        assert text == "ab" + expected.text("ab", 3, 5)


def test_a_request_of_many_choices_is_taken_by_an_idle_server(tmp_path: Any) -> None:
    """However few requests it takes: a 429 that says when to come again is for what can be taken then. Whole
    or streamed, of one prompt or of several; nothing is left in flight."""
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.001), max_running=2, max_queue=0) as small:
        for stream in (False, True):
            for fields in (
                {"prompt": "a", "n": 128},
                {"prompt": ["a"] * 128},
                {"prompt": ["a", "b"], "n": 2},
            ):
                body = {**fields, "max_tokens": 2, "stream": stream}
                response = httpx.post(f"{small.url}/v1/completions", json=body, timeout=120)
                assert response.status_code == 200, response.text
                wait_for(lambda: small.metric("tenfold_requests_in_flight") == 0)


def test_a_client_that_hangs_up_cancels_every_choice(server: ServerProcess) -> None:
    """Not only the one that it last heard of."""
    body = {"prompt": "x", "n": 8, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(40):
            next(lines)
        assert server.metric("tenfold_requests_in_flight") == 8
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)


def test_tokens_and_back(server: ServerProcess) -> None:
    """In vLLM's shapes; a chat's tokens are those that a chat has."""
    http = httpx.Client(base_url=server.url)
    found = http.post("/tokenize", json={"model": "fake", "prompt": "Hi!", "return_token_strs": True}).json()
    assert found == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [41, 74, 2],
        "token_strs": ["H", "i", "!"],
    }
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Hi!"}
    chat = http.post("/tokenize", json={"messages": say("one"), "tools": TOOLS}).json()
    body = {"messages": say("one"), "tools": TOOLS, "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert (chat["count"], chat["token_strs"]) == (usage["prompt_tokens"], None)
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": "x" * 50_000}, "prompt"),
        ("/tokenize", {"messages": say("one"), "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ):
        response = http.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param
    assert http.get("/tokenize").status_code == 405


def test_what_clients_send_by_habit_works(server: ServerProcess) -> None:
    """Fields without an effect, and nulls for all that there are."""
    body = {
        "model": "fake",
        "messages": say("think"),
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": True},
        **dict.fromkeys(
            ("tools", "functions", "audio", "prediction", "verbosity", "web_search_options", "n")
        ),
    }
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    for name, value in (("reasoning_effort", "high"), ("store", True)):
        response = httpx.post(f"{server.url}/v1/chat/completions", json={**body, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_formats_can_be_chosen(tmp_path: Any) -> None:
    """A name that there is none of is refused at the start; a request that needs what is off hears why."""
    with pytest.raises(ValueError, match="tool_format is 'xml'"):
        ServeConfig(model="m", tool_format="xml")
    with pytest.raises(ValueError, match="reasoning_format is 'loud'"):
        ServeConfig(model="m", reasoning_format="loud")
    with running_server(tmp_path / "log", FakeConfig(), tool_format="none") as other:
        error = httpx.post(
            f"{other.url}/v1/chat/completions", json={"messages": say("one"), "tools": TOOLS}
        ).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_value")
    assert "fake cannot call tools" in error["message"] and "--tool-format none" in error["message"]
