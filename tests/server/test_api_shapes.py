"""Shapes by themselves: however an answer's events are cut, a stream adds up to the whole answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.server.answer_events import (
    Delta,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
    sum_of,
)
from tenfold.server.messages_api.shape import MessageShape
from tenfold.server.partial_json import object_of
from tenfold.server.responses_api.body import parse_response
from tenfold.server.responses_api.shape import ResponseShape
from tenfold.server.responses_api.store import ResponseStore
from tenfold.server.shapes import Shape

texts = st.text('aé\n"{', min_size=1, max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a\\"{}[],: ', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"}', max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.text('ab"}', max_size=3), values, max_size=4)


@st.composite
def answers(draw: Any) -> list[Event]:
    """The events of one choice, in an order that the seam allows."""
    events: list[Event] = [ReasoningDelta(text) for text in draw(st.lists(texts, max_size=3))]
    calls = 0
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            events += [TextDelta(text) for text in draw(st.lists(texts, min_size=1, max_size=3))]
            continue
        events.append(ToolCallBegin(calls, f"call_{calls}", "add"))
        arguments = json.dumps(draw(objects))
        cut = draw(st.integers(0, len(arguments)))
        events += [ToolArgumentsDelta(calls, part) for part in (arguments[:cut], arguments[cut:]) if part]
        events.append(ToolCallEnd(calls))
        calls += 1
    reason = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    return [*events, Finish(reason)]


@st.composite
def cut_answers(draw: Any) -> tuple[list[Event], list[Delta]]:
    """Such events, and the same ones cut into deltas; the end comes with what is before it."""
    events = draw(answers())
    deltas: list[Delta] = [Delta()]
    for event in events[:-1]:
        if draw(st.booleans()) and event is not events[-2]:
            deltas.append(Delta())
        deltas[-1].events.append(event)
    deltas[-1].events.append(events[-1])
    return events, deltas


USAGE = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=7, reasoning_tokens=2)


def streamed(shape: Shape, deltas: list[Delta]) -> list[Any]:
    """The data of a stream's events."""
    data = shape.opening(0, USAGE)
    for delta in deltas:
        data += shape.delta(0, delta)
    finish = deltas[-1].events[-1]
    assert isinstance(finish, Finish)
    data += shape.closing(0, finish) + shape.ending(USAGE)
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]


def message_of(events: list[Any]) -> Any:
    """What a client makes of a message's stream, checking that blocks open and close in turn."""
    message = events[0]["message"]
    open_ = None
    arguments = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_ is None
                open_ = event["index"]
                assert open_ == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == open_
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_
                open_ = None
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = object_of(arguments)
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    assert open_ is None
    assert events[-1]["type"] == "message_stop"
    return message


@settings(deadline=None)
@given(cut_answers())
def test_a_messages_stream_adds_up(cut: tuple[list[Event], list[Delta]]) -> None:
    """To the very JSON of the whole answer."""
    events, deltas = cut
    whole = MessageShape("x", "m").whole([sum_of([Delta(list(events))])], USAGE)
    assert message_of(streamed(MessageShape("x", "m"), deltas)) == json.loads(whole)


def response_shape() -> ResponseShape:
    store = ResponseStore().shelf("")
    return ResponseShape(0, "m", parse_response(b'{"input":"x"}', ("m",), 9, store), store)


def bare(items: list[Any]) -> list[Any]:
    """Items without the ids that are new each time."""
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@settings(deadline=None)
@given(cut_answers())
def test_a_responses_stream_adds_up(cut: tuple[list[Event], list[Delta]]) -> None:
    """Deltas to what is said to be done, items to the response, and this to the whole answer."""
    events, deltas = cut
    whole = json.loads(response_shape().whole([sum_of([Delta(list(events))])], USAGE))
    found = streamed(response_shape(), deltas)
    last = found[-1]["response"]
    assert (last["status"], bare(last["output"])) == (whole["status"], bare(whole["output"]))
    assert last["usage"] == whole["usage"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(last["output"]):
        own = [event for event in found if event.get("output_index") == index]
        said = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert said == (item.get("arguments") if "arguments" in item else item["content"][0]["text"])
    cut_off = [item["status"] for item in last["output"][:-1] if item["status"] != "completed"]
    assert not cut_off


@settings(deadline=None)
@given(objects, st.integers(0, 200))
def test_of_an_object_that_is_cut_off_remains_what_was_whole(value: dict[str, Any], cut: int) -> None:
    """All of it if it is whole; else a beginning of it, and never a value that was not there."""
    text = json.dumps(value)
    assert object_of(text) == value
    assert _begins(object_of(text[:cut]), value)


def _begins(part: Any, whole: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and _begins(part[name], whole[name]) for name in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(
            _begins(one, other) for one, other in zip(part, whole, strict=False)
        )
    return bool(part == whole)


@settings(deadline=None)
@given(st.text('{}[]",:\\a1 ', max_size=20))
def test_anything_else_is_an_object_too(text: str) -> None:
    """What a model writes where arguments should be never breaks an answer."""
    assert isinstance(object_of(text), dict)
