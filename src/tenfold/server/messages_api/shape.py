"""``message`` and its stream: the events of an answer in the shape of Anthropic's Messages API.

Reasoning is in ``thinking`` blocks, whose ``signature`` is empty: nothing here needs to be proven.
"""

from __future__ import annotations

from typing import Any

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
    Whole,
)
from tenfold.server.errors import ApiError
from tenfold.server.messages_api.errors import error_object
from tenfold.server.partial_json import object_of
from tenfold.server.shapes import encode


class MessageShape:
    """See `shapes.Shape`. There is one choice."""

    def __init__(self, id: str, model: str) -> None:
        self._id = f"msg_{id}"
        self._model = model
        self._block = -1
        """Index of the newest block."""
        self._open = ""
        """The type of the block that is open; empty: none is."""
        self._finish: Finish | None = None

    def opening(self, index: int, usage: Usage) -> bytes:
        message = self._message([], None, usage)
        return _event("message_start", {"message": message}) + _event("ping", {})

    def delta(self, index: int, delta: Delta) -> bytes:
        return b"".join(self._rendered(event) for event in delta.events)

    def closing(self, index: int, finish: Finish) -> bytes:
        self._finish = finish
        return self._close()

    def ending(self, usage: Usage) -> bytes:
        delta = _end(self._finish)
        return _event("message_delta", {"delta": delta, "usage": _usage(usage)}) + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + encode(error_object(error)) + b"\n\n"

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        (choice,) = choices
        return encode(self._message(_blocks(choice), choice.finish, usage))

    def _rendered(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._text("text", event.text, b"text_delta")
            case ReasoningDelta():
                return self._text("thinking", event.text, b"thinking_delta")
            case ToolCallBegin():
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return self._close() + self._start(block)
            case ToolArgumentsDelta():
                return self._delta(b"input_json_delta", b"partial_json", event.text)
            case ToolCallEnd():
                return self._close()
            case Finish():
                return b""

    def _text(self, kind: str, text: str, delta: bytes) -> bytes:
        data = b""
        if self._open != kind:
            block = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            data = self._close() + self._start(block)
        return data + self._delta(delta, kind.encode(), text)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open = block["type"]
        return _event("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, kind: bytes, name: bytes, text: str) -> bytes:
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
        ) % (self._block, kind, name, encode(text))

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._block})

    def _message(self, content: list[dict[str, Any]], finish: Finish | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **_end(finish),
            "usage": _usage(usage),
        }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **data}))


def _end(finish: Finish | None) -> dict[str, str | None]:
    """Why it ended; a stop string that came after calls is behind them."""
    reason = stop = None
    if finish is not None:
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish.reason]
        if finish.reason == "stop" and finish.stop_string is not None:
            reason, stop = "stop_sequence", finish.stop_string
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """The three kinds of input tokens add up to the prompt; what was computed anew was not written for its
    own sake, so nothing counts as the cache's creation."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _blocks(choice: Whole) -> list[dict[str, Any]]:
    """The blocks that a stream of the same events has."""
    blocks: list[dict[str, Any]] = []
    arguments = [object_of(call.arguments) for call in choice.calls]
    for event in choice.events:
        last = blocks[-1] if blocks else {"type": ""}
        match event:
            case TextDelta() if last["type"] == "text":
                last["text"] += event.text
            case TextDelta():
                blocks.append({"type": "text", "text": event.text})
            case ReasoningDelta() if last["type"] == "thinking":
                last["thinking"] += event.text
            case ReasoningDelta():
                blocks.append({"type": "thinking", "thinking": event.text, "signature": ""})
            case ToolCallBegin():
                call = {"id": event.id, "name": event.name, "input": arguments[event.index]}
                blocks.append({"type": "tool_use", **call})
    return blocks
