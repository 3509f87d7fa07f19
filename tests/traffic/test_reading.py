"""Reading recorded traffic."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.protocol import SamplingParams
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import choose_chat
from tenfold.server.endpoints import ENDPOINTS
from tenfold.server.prepare import Preparer
from tenfold.server.tool_formats.choose import FORMATS
from tenfold.traffic.reading import TrafficError, TrafficRequest, contents, read_traffic
from tests.helpers.fake_engine import VOCAB
from tests.helpers.fake_text import FakeTokenizer, load_fake_text
from tests.helpers.traffic import line, write_lines
from tests.server.test_app import PLAN

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
AGENT = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain"},
    ],
    "tools": TOOLS,
    "seed": 3,
    "max_tokens": 5,
}


def read(path: Path, context: int = 2000) -> list[TrafficRequest]:
    return read_traffic(path, load_fake_text(""), VOCAB, context)


def test_a_line_becomes_the_request_that_the_server_would_compute(tmp_path: Path) -> None:
    """Prompt, parameters and notes; the recorded model's name is not this model's, and does not matter."""
    path = write_lines(
        tmp_path / "t",
        [
            line("Hi", model="gpt-4o", temperature=0.5, seed=7, max_tokens=9, stream=True)
            | {"class": "chat", "conversation": "c1", "time": 12.5, "answer": "Hello"}
        ],
    )
    (found,) = read(path)
    expected = FakeTokenizer().encode("user:Hi|", add_special_tokens=False, parse_special=True)
    assert list(found.prompt) == expected
    assert (found.line, found.kind, found.conversation, found.time) == (1, "chat", "c1", 12.5)
    assert (found.params.temperature, found.params.seed, found.params.max_tokens) == (0.5, 7, 9)
    assert found.answer == "Hello"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parallel_tool_calls": False, "stop": "x"},
        {"tool_choice": "none"},
        {"tools": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_an_agent_s_turn_is_what_the_server_would_compute(more: dict[str, Any], tmp_path: Path) -> None:
    """Tools, calls and what they brought: prompt, parameters and the reading of the answer are those of the
    server's own preparation."""
    body = AGENT | more
    (found,) = read(write_lines(tmp_path / "t", [body]))
    text = load_fake_text("")
    plan = msgspec.structs.replace(PLAN, vocab_size=VOCAB, max_context=2000)
    endpoint = ENDPOINTS["/v1/chat/completions"]
    (choice,) = (
        Preparer("m", plan, text, choose_chat(text)).job(endpoint, json.dumps(body).encode(), "id").choices
    )
    assert (found.prompt, found.params) == (choice.request.prompt, choice.request.params)
    assert found.sections.one_call == ("parallel_tool_calls" in more)
    assert (found.sections.tools is None) == (more.get("tool_choice") == "none" or "tools" in more)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "x", "role": "user"}]}', 'the key "role" twice'),
        (json.dumps(line(speed=9)).encode(), "unknown field speed"),
        (json.dumps(line(temperature=3)).encode(), "temperature is 3"),
        (json.dumps(line(tools=[{"type": "function"}])).encode(), "tools[0].function"),
        (
            json.dumps(line(tools=TOOLS, tool_choice="required")).encode(),
            "tool_choice is not supported in recorded traffic: what a grammar forces",
        ),
        (json.dumps(line(tools=STRICT)).encode(), "tools is not supported in recorded traffic"),
        (json.dumps(line(n=2)).encode(), "n is not supported in recorded traffic"),
        (
            json.dumps(line(response_format={"type": "json_object"})).encode(),
            "response_format is not supported in recorded traffic",
        ),
        (json.dumps(line(model=7)).encode(), "model is 7; it must be a string"),
        (json.dumps({"temperature": 0}).encode(), "messages is missing"),
        (json.dumps(line() | {"class": 7}).encode(), "class is 7; it must be a string"),
        (json.dumps(line(conversation=" ")).encode(), "conversation is empty"),
        (json.dumps(line(answer=["a"])).encode(), 'answer is ["a"]; it must be a string'),
        (json.dumps(line(time="yesterday")).encode(), 'time is "yesterday"; it must be seconds'),
        (json.dumps(line(time=True)).encode(), "time is true; it must be seconds"),
        (json.dumps(line("x" * 1999)).encode(), "the model's context is 2000"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "cannot begin with a tool's answer"),
    ],
)
def test_a_line_that_is_no_request_is_named_with_its_fault(data: bytes, says: str, tmp_path: Path) -> None:
    """By its number in the file, in the words of the server."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n\n" + data + b"\n")
    with pytest.raises(TrafficError) as caught:
        read(path)
    assert "t.jsonl" in str(caught.value)
    assert "line 3: " in str(caught.value)
    assert says in str(caught.value)


def test_many_faults_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    """Enough to see what is wrong, and no flood."""
    path = write_lines(tmp_path / "t", [line(speed=9) for _ in range(12)])
    with pytest.raises(TrafficError) as caught:
        read(path)
    assert "line 5: " in str(caught.value)
    assert "line 6: " not in str(caught.value)
    assert "and 7 more lines" in str(caught.value)


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    """An empty result would be taken for a result."""
    (tmp_path / "t").write_text("\n \n")
    with pytest.raises(TrafficError, match="has no requests"):
        read(tmp_path / "t")


def test_times_may_be_written_in_several_ways_and_order_the_traffic(tmp_path: Path) -> None:
    """Seconds, and ISO 8601 with a zone, with Z, or in UTC without; the oldest comes first."""
    times: list[Any] = [30, "1970-01-01T00:00:20Z", "1970-01-01T01:00:10+01:00", "1970-01-01T00:00:05"]
    found = read(write_lines(tmp_path / "t", [line(time=time) for time in times]))
    assert [one.time for one in found] == [5, 10, 20, 30]
    assert [one.line for one in found] == [4, 3, 2, 1]


def test_without_times_the_order_of_the_lines_is_that_of_time(tmp_path: Path) -> None:
    """And a mixture of both has no order: an error names the lines without."""
    found = read(write_lines(tmp_path / "t", [line(str(i)) for i in range(3)]))
    assert [one.line for one in found] == [1, 2, 3]
    with pytest.raises(TrafficError, match="line 2: time is missing"):
        read(write_lines(tmp_path / "t", [line(time=1), line(), line(time=3)]))


def test_turns_of_one_conversation_are_recognised_without_a_key(tmp_path: Path) -> None:
    """Later bodies repeat the first messages; another opening is another conversation."""
    first = {"role": "user", "content": "Hi"}
    later = [first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}]
    rows = [{"messages": [first]}, {"messages": later}, line("Hello"), line("Hi", conversation="own")]
    a, b, c, d = read(write_lines(tmp_path / "t", rows))
    assert a.conversation == b.conversation
    assert len({a.conversation, c.conversation, d.conversation}) == 3
    assert len(b.prompt) > len(a.prompt), "recorded turns are part of the prompt, as they were"


def test_a_body_without_a_seed_gets_one_that_is_always_the_same(tmp_path: Path) -> None:
    """So that work can be taken up again; equal lines get different ones, as they would when served."""
    path = write_lines(tmp_path / "t", [line("Hi"), line("Hi"), line("Ho"), line("Hi", temperature=0.5)])
    first, again = read(path), read(path)
    assert [one.params.seed for one in first] == [one.params.seed for one in again]
    assert len({one.params.seed for one in first}) == 4


def test_what_a_request_is_known_by_survives_new_parameters() -> None:
    """Answers are kept for days by it: a parameter that is added to the engine, and that no body gives, must
    not have all answers made anew. So these bytes are fixed."""
    params = SamplingParams(temperature=0.5, logit_bias={7: 1.0}, seed=3)
    expected = msgspec.msgpack.encode(((1, 2), [("logit_bias", {7: 1.0}), ("seed", 3), ("temperature", 0.5)]))
    assert contents((1, 2), params) == expected
    tools = Sections(tools=FORMATS["hermes"], tool_names=frozenset({"f"}))
    assert contents((1, 2), params, tools) == expected, "nothing of the tools can end the answer"
    known = {
        contents((1, 2), params, sections)
        for sections in (tools, replace(tools, one_call=True), replace(tools, one_call=True, tools=None))
    }
    assert len(known) == 3
    stopped = msgspec.structs.replace(params, stop=("x",))
    assert contents((1, 2), stopped, tools) != contents((1, 2), stopped)
    assert contents((1, 2), SamplingParams()) == msgspec.msgpack.encode(((1, 2), []))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A file of anything is traffic or a TrafficError, and never another failure."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    with contextlib.suppress(TrafficError):
        assert read(path)
