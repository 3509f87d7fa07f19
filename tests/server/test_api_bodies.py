"""Bodies of the Messages and Responses APIs by themselves: whatever comes, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.server.chat_setup import choose_chat
from tenfold.server.endpoints import ENDPOINTS
from tenfold.server.errors import ApiError
from tenfold.server.messages_api.body import parse_count, parse_message
from tenfold.server.messages_api.conversation import parse_conversation
from tenfold.server.prepare import Preparer
from tenfold.server.requests import ApiRequest
from tenfold.server.responses_api.body import parse_response
from tenfold.server.responses_api.items import conversation_of, parse_input
from tenfold.server.responses_api.store import ResponseStore
from tenfold.server.text import Text
from tests.helpers.fake_text import FakeStream, FakeTemplate, FakeTokenizer
from tests.server.test_app import PLAN

_FIELDS = (
    "model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_k", "tools",
    "tool_choice", "thinking", "output_config", "cache_control", "metadata", "stream", "input",
    "instructions", "text", "reasoning", "include", "store", "previous_response_id", "parallel_tool_calls",
    "stream_options", "max_output_tokens",
)  # fmt: skip
_KEYS = (
    "type", "role", "content", "text", "id", "name", "input", "tool_use_id", "input_schema", "parameters",
    "call_id", "arguments", "output", "summary", "format", "schema", "strict", "effort", "thinking", "status",
    "is_error", "citations", "annotations", "caller", "budget_tokens", "user_id", "description",
)  # fmt: skip
_WORDS = (
    "text", "user", "assistant", "tool_use", "tool_result", "thinking", "function", "function_call",
    "function_call_output", "reasoning", "message", "input_text", "output_text", "json_schema", "auto", "any",
    "tool", "required", "adaptive", "ephemeral", "m", "x", "",
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(_FIELDS), values, max_size=6)
USER = {"role": "user", "content": "x"}


def parse_kept(body: bytes, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    return parse_response(body, models, vocab_size, ResponseStore().shelf(""))


@pytest.mark.parametrize("parse", [parse_message, parse_count, parse_kept])
@settings(deadline=None)
@given(body=bodies, whole=st.booleans())
def test_any_body_is_taken_or_refused(parse: Any, body: dict[str, Any], whole: bool) -> None:
    """Never anything but a request or an error that says what is wrong; also where all else is right."""
    if whole:
        body = {"messages": [USER], "max_tokens": 5, "input": "x", **body}
        for name in ("messages", "max_tokens", "input"):
            theirs = name != "input" if parse is parse_kept else name == "input"
            if theirs or (parse is parse_count and name == "max_tokens"):
                body.pop(name)
    try:
        parsed = parse(json.dumps(body).encode(), ("m",), 100)
    except ApiError as error:
        assert error.status in (400, 404)
        assert error.message
    else:
        assert parsed.messages


@settings(deadline=None)
@given(value=st.lists(values, min_size=1, max_size=3))
def test_any_conversation_is_taken_or_refused(value: list[Any]) -> None:
    """The same for what is in it, where nothing else is in the way."""
    for parse in (parse_conversation, lambda items: conversation_of(parse_input(items), 0)):
        try:
            messages = parse(value)
        except ApiError as error:
            assert (error.status, error.param is None) == (400, False)
        else:
            assert all(isinstance(message["content"], str) for message in messages)


def test_anthropics_turns_become_messages() -> None:
    """Results of tools first, neighbours of one role joined, thoughts and calls at their message."""
    found = parse_conversation(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "bad", "is_error": True},
                    {"type": "text", "text": "d"},
                ],
            },
        ]
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "Error: bad", "tool_call_id": "1", "name": "add"},
        {"role": "user", "content": "d"},
    ]


def test_items_become_messages() -> None:
    """What the assistant thought, said and called in one go is one message."""
    items = parse_input(
        [
            {"role": "user", "content": "a"},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "3"}]},
        ]
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation_of(items, 0) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]


class Thinking(FakeTemplate):
    """Knows a switch for reasoning or not, and remembers what it was told."""

    source = "{% if enable_thinking %}<think></think>"

    def __init__(self, switch: bool) -> None:
        self.variables = frozenset({"messages", "enable_thinking"} if switch else {"messages"})
        self.told: list[Any] = []

    def render(self, messages: Any, /, **variables: Any) -> str:
        self.told.append(variables.get("enable_thinking"))
        return super().render(messages, **variables)


@pytest.mark.parametrize(
    ("switch", "kind", "told"),
    [
        (True, None, None),
        (True, "adaptive", True),
        (True, "enabled", True),
        (True, "disabled", False),
        (False, "adaptive", None),
        (False, "disabled", "refused"),
    ],
)
def test_thinking_is_asked_for_as_the_template_knows_it(switch: bool, kind: str | None, told: Any) -> None:
    """By its switch; without one only what the model does anyway passes."""
    template = Thinking(switch)
    text = Text(FakeTokenizer(), template, FakeStream)
    preparer = Preparer("m", PLAN, text, choose_chat(text))
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 5}
    if kind is not None:
        body["thinking"] = {"type": kind}
    if told == "refused":
        with pytest.raises(ApiError) as refused:
            preparer.job(ENDPOINTS["/v1/messages"], json.dumps(body).encode(), "id")
        assert refused.value.param == "thinking"
    else:
        preparer.job(ENDPOINTS["/v1/messages"], json.dumps(body).encode(), "id")
        assert template.told == [told]
