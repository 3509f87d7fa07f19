"""What an answer is made of: the seam between a model's tokens and the shapes of the APIs.

    chunks of tokens -> `answer.Answer` -> events -> a `shapes.Shape` -> bytes for the client

`Answer`, with an `answer_stream.AnswerStream` in it, knows tokens, UTF-8, stop strings, reasoning sections
and tool formats, and nothing of HTTP. A shape knows one API's JSON, and nothing of tokens or markers: it is a
pure rendering of the events of a request's choices. A further API is an `endpoints.Endpoint`: a parser that
makes an `ApiRequest` of its body (messages in the form of `messages.parse_messages`, tools as a `ToolUse`),
and one more shape. `exchange` does the rest: prompts, constraints, choices, streaming, errors, cancelling,
metrics.

The order of one choice's events, by which a shape may go:

- `TextDelta`, `ReasoningDelta`: never empty; reasoning comes before text where there is any.
- `ToolCallBegin(index)`, then any number of `ToolArgumentsDelta(index)`, then `ToolCallEnd(index)`. Calls do
  not overlap, indices count from 0, and no text comes within a call; text may come before, between and after.
- Last and once: `Finish`. Nothing follows it.

The law: what the deltas of one kind add up to, and the order of the sections, depend on the tokens alone, not
on how they were cut into chunks. Where the deltas are cut does depend on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tenfold.protocol import TokenLogprob

AnswerEnd = Literal["stop", "length", "tool_calls"]


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer itself."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool of the request. ``id`` is new, and as the model's template wants ids."""

    index: int
    id: str
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call has all its arguments; or the answer ended within it, then `Finish` follows."""

    index: int


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Why the answer ended. ``length`` always says that it was cut, also within a call."""

    reason: AnswerEnd
    stop_string: str | None = None
    """The stop string that ended it, if one did."""


Event = TextDelta | ReasoningDelta | ToolCallBegin | ToolArgumentsDelta | ToolCallEnd | Finish


@dataclass
class Delta:
    """News of one choice: events, and the tokens behind them with their log-probabilities if asked for.

    Events lag behind tokens where something is held back, so the two are in step at the end alone. The tokens
    are all that count as shown: those of reasoning, calls and markers too; not one that merely ended the
    answer.
    """

    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    """Of an input that becomes a vector: this, as JSON, with `Finish`."""


@dataclass
class ToolCall:
    """A whole call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Whole:
    """The sum of one choice's deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """All of them, for shapes that show in which order text and calls came."""
    finish: Finish | None = None
    """None until the end."""
    embedding: bytes = b""


def sum_of(deltas: Iterable[Delta]) -> Whole:
    """All of one choice's deltas together."""
    whole = Whole()
    text: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        whole.tokens += delta.tokens
        whole.logprobs += delta.logprobs
        whole.events += delta.events
        whole.embedding += delta.embedding
        for event in delta.events:
            match event:
                case TextDelta():
                    text.append(event.text)
                case ReasoningDelta():
                    reasoning.append(event.text)
                case ToolCallBegin():
                    whole.calls.append(ToolCall(event.id, event.name))
                    arguments.append([])
                case ToolArgumentsDelta():
                    arguments[event.index].append(event.text)
                case Finish():
                    whole.finish = event
    whole.text, whole.reasoning = "".join(text), "".join(reasoning)
    for call, parts in zip(whole.calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return whole


class Usage(msgspec.Struct, kw_only=True):
    """What a request used, in tokens; prompts count once, however many choices there are."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the cache."""
    completion_tokens: int = 0
    """Generated, over all choices; one that ended an answer counts."""
    reasoning_tokens: int = 0
    """Of the completion, spent on reasoning, its markers included."""
