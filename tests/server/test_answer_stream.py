"""Text, reasoning and tool calls by one law: any cut of the tokens gives the one-shot answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tenfold.protocol import Chunk
from tenfold.server.answer import Answer
from tenfold.server.answer_events import (
    Delta,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    sum_of,
)
from tenfold.server.answer_stream import AnswerStream, Sections
from tenfold.server.reasoning import FORMATS as REASONING
from tenfold.server.reasoning import THINK
from tenfold.server.tool_formats.calls import CallReader
from tenfold.server.tool_formats.choose import FORMATS

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""On a machine that others use, time says nothing."""
NAMES = frozenset({"f", "get_weather", "Zürich"})


class Letters:
    """A decoder whose tokens are characters: the id is the code point."""

    stopped: str | None = None
    tokens_used = 0

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


def answer_of(
    text: str, cuts: list[int], stop: tuple[str, ...] = (), end: Any = "stop", **sections: Any
) -> tuple[list[Event], Answer]:
    """All events of ``text``, one character a token, in chunks of the given sizes; neighbours are joined."""
    sections.setdefault("tool_names", NAMES)
    answer = Answer(AnswerStream(Letters(), stop, Sections(**sections)))
    events: list[Event] = []
    ids = tuple(map(ord, text))
    start = turn = 0
    while answer.finish is None:
        size = cuts[turn % len(cuts)]
        part, start, turn = ids[start : start + size], start + size, turn + 1
        delta = answer.push([Chunk(id="a", tokens=part, finish=end if start >= len(ids) else None)])
        for event in delta.events:
            last = events[-1] if events else None
            if isinstance(event, TextDelta) and isinstance(last, TextDelta):
                events[-1] = TextDelta(last.text + event.text)
            elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
                events[-1] = ReasoningDelta(last.text + event.text)
            elif isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
                events[-1] = ToolArgumentsDelta(last.index, last.text + event.text)
            elif isinstance(event, ToolCallBegin):
                events.append(ToolCallBegin(event.index, "id", event.name))
            else:
                events.append(event)
    return events, answer


def flat(events: list[Event]) -> list[Any]:
    """Events for people: text as it is, ("think", text), (name, arguments)."""
    found: list[Any] = []
    for event in events:
        match event:
            case TextDelta():
                found.append(event.text)
            case ReasoningDelta():
                found.append(("think", event.text))
            case ToolCallBegin():
                found.append((event.name, ""))
            case ToolArgumentsDelta():
                found[-1] = (found[-1][0], event.text)
            case Finish():
                found.append(event.reason)
    return found


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
    '{"name": "f", "arguments": ',
    '{"arguments": {"x": "</tool_call>"}, "name": "get_weather"}',
    '{"name": "f", "parameters": {"a": [1, {"b": null}], "c": "\\u00e9 \\" [TOOL_CALLS]"}}',
    '{"name": "nobody", "arguments": {}}',
    '{"a": 1}',
    '{"a": tru',
    "}",
    "[",
    "]",
    ",",
    ";",
    "\n",
    " ",
    "f",
    "stop",
    "sto",
    "é🦊",
    "plain text",
    "<tool",
    "</",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
STOPS = st.lists(st.sampled_from(["stop", "\n\n", "a<tool_call>", "}", "<", "t t"]), max_size=2).map(tuple)


@unhurried
@given(
    TEXTS,
    CUTS,
    STOPS,
    st.sampled_from([None, *FORMATS.values()]),
    st.sampled_from([None, *REASONING.values()]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@example("a\n<tool_call>\nstop", [3], ("stop",), FORMATS["hermes"], None, False, False, "stop")
@example("<think>\n\n</think>\n\n{", [1], (), FORMATS["llama3"], THINK, False, False, "length")
def test_any_cut_gives_the_one_shot_answer(
    text: str,
    cuts: list[int],
    stop: tuple[str, ...],
    form: Any,
    reasoning: Any,
    opened: bool,
    one_call: bool,
    end: str,
) -> None:
    """Events, counts and end do not depend on how the tokens come; the order of events is as promised."""
    sections = {
        "tools": form,
        "reasoning": reasoning,
        "opened": opened and reasoning is not None,
        "one_call": one_call,
    }
    events, answer = answer_of(text, cuts, stop, end, **sections)
    once, whole = answer_of(text, [len(text) or 1], stop, end, **sections)
    assert events == once
    assert (answer.completion_tokens, answer.reasoning_tokens) == (
        whole.completion_tokens,
        whole.reasoning_tokens,
    )
    check_order(events)
    assert not any(each in stretch for each in stop for stretch in stretches(events))
    if answer.completion_tokens == len(text) and end == "length" and not one_call:
        assert isinstance(last := events[-1], Finish)
        assert last.reason == "length" or last.stop_string in stop


def stretches(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TextDelta)]


def check_order(events: list[Event]) -> None:
    """What `answer_events` promises to those who render."""
    open_call: int | None = None
    calls = 0
    for event in events[:-1]:
        match event:
            case ToolCallBegin():
                assert open_call is None and event.index == calls
                open_call, calls = calls, calls + 1
            case ToolArgumentsDelta():
                assert event.index == open_call and event.text
            case ToolCallEnd():
                assert event.index == open_call
                open_call = None
            case TextDelta() | ReasoningDelta():
                assert open_call is None and event.text
            case _:
                raise AssertionError(event)
    assert open_call is None
    assert isinstance(events[-1], Finish)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON, max_size=4)),
    min_size=1,
    max_size=3,
)


def written(form: str, calls: list[tuple[str, Any]], ascii: bool, indent: int | None) -> str:
    """Calls as a model of the family writes them."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii, indent=indent)

    plain = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{dump(call)}\n</tool_call>" for call in plain)
    if form == "smollm2":
        return f"<tool_call>{dump(plain)}</tool_call>"
    if form == "mistral":
        return f"[TOOL_CALLS] {dump(plain)}"
    if form == "mistral 11":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}" for name, arguments in calls)
    together = "; ".join(dump({"name": name, "parameters": arguments}) for name, arguments in calls)
    return together if form == "llama3" else f"<|python_tag|>{together}"


@unhurried
@given(
    st.sampled_from(["hermes", "smollm2", "mistral", "mistral 11", "llama3", "llama3 tag"]),
    CALLS,
    CUTS,
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sampled_from(["", "Let me see.\n\n"]),
    st.sampled_from(["stop", "length"]),
)
def test_well_formed_calls_arrive_whatever_is_in_them(
    form: str,
    calls: list[tuple[str, Any]],
    cuts: list[int],
    ascii: bool,
    indent: int | None,
    before: str,
    end: str,
) -> None:
    """Name and arguments as the model wrote them, markers within strings included; text around stays text."""
    if form == "llama3":
        before = ""  # without a marker only the start of an answer can be a call
    tools = FORMATS[form.partition(" ")[0]]
    found = flat(answer_of(before + written(form, calls, ascii, indent), cuts, end=end, tools=tools)[0])
    if before:
        assert found.pop(0) == before.rstrip("\n")
    assert found.pop() == ("tool_calls" if end == "stop" else "length")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@unhurried
@given(st.sampled_from(["hermes", "smollm2", "mistral", "mistral 11", "llama3 tag"]), CALLS, st.data())
def test_a_call_cut_short_is_never_called_complete(form: str, calls: Any, data: st.DataObject) -> None:
    """However it is cut, finish is length; every call but the last is whole."""
    text = written(form, calls, False, None)
    cut = data.draw(st.integers(0, len(text)))
    events, _ = answer_of(text[:cut], [3], end="length", tools=FORMATS[form.partition(" ")[0]])
    assert events[-1] == Finish("length")
    whole = [call for call in flat(events) if isinstance(call, tuple)]
    for given_call, call in zip(calls, whole[:-1], strict=False):
        assert json.loads(call[1]) == given_call[1]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # None of these is a call, and nothing of it is lost.
        ("hermes", "x<tool_call>junk</tool_call>y", ["x<tool_call>junk</tool_call>y"]),
        ("hermes", "<tool_call>", ["<tool_call>"]),
        ("hermes", "see <tool_cal", ["see <tool_cal"]),
        ("hermes", '<tool_call>{"name": "who"}</tool_call>', ['<tool_call>{"name": "who"}</tool_call>']),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}', ['<tool_call>{"name": 5, "arguments": {}}']),
        ("hermes", '<tool_call>{"name":"f","arguments":[]}', ['<tool_call>{"name":"f","arguments":[]}']),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", ["<tool_call>{'name': 'f'}</tool_call>"]),
        ("smollm2", "<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ("llama3", '{"city": "Paris"}', ['{"city": "Paris"}']),
        ("llama3", '<|python_tag|>f.call(q="x")', ['<|python_tag|>f.call(q="x")']),
        ("llama3", 'I say {"name": "f"}', ['I say {"name": "f"}']),
        ("mistral", "[TOOL_CALLS]who[ARGS]{}", ["[TOOL_CALLS]who[ARGS]{}"]),
        # What a model may leave out or write in another way.
        ("hermes", '<tool_call>{"name":"f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', [("f", '{"a":1}')]),
        ("hermes", '<tool_call>{"id":"1","name":"f","arguments":{}}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}</tool_call>z', [("f", '{"a":1}'), "z"]),
        ("hermes", '<tool_call><tool_call>{"name":"f"}</tool_call>', ["<tool_call>", ("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f"}<tool_call>{"name":"f"}', [("f", "{}"), ("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"1\n2"}}</tool_call>', [("f", '{"a":"1\\n2"}')]),
        # Begun as a call, and then no JSON: still the client's to see where arguments are.
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":x}}</tool_call>z', [("f", '{"a":x}}'), "z"]),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{},"x":y}</tool_call>',
            [("f", "{}"), ',"x":y}</tool_call>'],
        ),
    ],
)
def test_what_models_write_beside_the_form(form: str, text: str, expected: list[Any]) -> None:
    """Text that is no call is passed on as text; what is one in all but form is a call."""
    found = flat(answer_of(text, [1], tools=FORMATS[form])[0])
    called = any(isinstance(each, tuple) for each in expected)
    assert found == [*expected, "tool_calls" if called else "stop"]


@unhurried
@given(st.lists(st.sampled_from(["<tool_call>", '{"x": "', "<|python_tag|>", "[TOOL_CALLS]"]), max_size=400))
def test_nested_beginnings_cost_no_more_than_they_are_long(parts: list[str]) -> None:
    """Text that begins calls over and over is text, and no character of it goes through a reader twice."""
    text = "".join(parts)
    for form in FORMATS.values():
        with pytest.MonkeyPatch.context() as patch:
            read = 0
            feed = CallReader.feed

            def counting(self: CallReader, text: str, at: int, feed: Any = feed) -> int:
                nonlocal read
                to = feed(self, text, at)
                read += to - at
                return int(to)

            patch.setattr(CallReader, "feed", counting)
            events, _ = answer_of(text, [1000], tools=form)
        assert "".join(stretches(events)) == text
        assert read <= len(text)


def test_a_partial_marker_is_held_and_nothing_else() -> None:
    """What can no longer become a marker or a stop string is sent at once."""
    stream = AnswerStream(Letters(), ("END",), Sections(tools=FORMATS["hermes"], tool_names=NAMES))
    assert [stream.push([ord(char)]) for char in "a<to b EN\n"] == [
        "a",
        "",
        "",
        "",
        "<to ",
        "b",
        " ",
        "",
        "",
        "EN",
    ]
    assert stream.finish() == "\n"


def test_arguments_are_streamed_as_they_come() -> None:
    """A long argument is not held back until its end."""
    stream = AnswerStream(Letters(), (), Sections(tools=FORMATS["hermes"], tool_names=NAMES))
    stream.push(map(ord, '<tool_call>{"name": "f", "arguments": {"text": "once upon'))
    begin, arguments = stream.take()
    assert isinstance(begin, ToolCallBegin) and begin.id.startswith("call_")
    assert arguments == ToolArgumentsDelta(0, '{"text": "once upon')
    stream.push(map(ord, " a"))
    assert stream.take() == [ToolArgumentsDelta(0, " a")]


def test_the_first_call_ends_an_answer_without_parallel_calls() -> None:
    """Nothing behind it is shown or counted."""
    text = '<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"f"}</tool_call>'
    events, answer = answer_of(text, [200], tools=FORMATS["hermes"], one_call=True)
    assert flat(events) == [("f", "{}"), "tool_calls"]
    assert answer.completion_tokens == text.index("}") + 1


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nyes\n", False, [("think", "hm\n\nso"), "yes\n", "stop"]),
        ("hm</think>yes", True, [("think", "hm"), "yes", "stop"]),
        ("\n <think>hm", False, [("think", "hm"), "stop"]),
        ("<think></think>yes", False, ["yes", "stop"]),
        ("no <think>hm</think>", False, ["no <think>hm</think>", "stop"]),
        ("<thin", False, ["<thin", "stop"]),
        ("hm</thin", True, [("think", "hm</thin"), "stop"]),
        (
            '<think>f?</think>\n<tool_call>{"name":"f"}</tool_call>',
            False,
            [("think", "f?"), ("f", "{}"), "tool_calls"],
        ),
        ("<think>a STOP b</think>c STOP d", False, [("think", "a STOP b"), "c ", "stop"]),
    ],
)
def test_reasoning_stands_apart(text: str, opened: bool, expected: list[Any]) -> None:
    """Without its markers and the line ends at its edges; a stop string ends the answer, not the thought."""
    events, _ = answer_of(text, [1], ("STOP",), reasoning=THINK, opened=opened, tools=FORMATS["hermes"])
    assert flat(events) == expected


def test_reasoning_tokens_are_those_of_the_section() -> None:
    """From the token that completes the start marker to the one that completes the end marker."""
    _, answer = answer_of("<think>abc</think>def", [4], reasoning=THINK)
    assert answer.reasoning_tokens == len(">abc</think>")
    _, answer = answer_of("abc</think>def", [4], reasoning=THINK, opened=True)
    assert answer.reasoning_tokens == len("abc</think>")


def test_a_sum_of_deltas_is_what_they_say() -> None:
    """For an answer that is not streamed."""
    whole = sum_of(
        [
            Delta([ReasoningDelta("a"), TextDelta("b"), ToolCallBegin(0, "x", "f")]),
            Delta([ToolArgumentsDelta(0, "{"), ToolArgumentsDelta(0, "}"), ToolCallEnd(0)]),
            Delta([TextDelta("c"), Finish("tool_calls")], [1], []),
        ]
    )
    assert (whole.reasoning, whole.text, whole.tokens) == ("a", "bc", [1])
    assert [(call.id, call.name, call.arguments) for call in whole.calls] == [("x", "f", "{}")]
    assert whole.finish == Finish("tool_calls")
