"""``chat.completion`` and its chunks: the events of an answer in the shape of OpenAI's chat API.

Reasoning is in ``reasoning_content``, as DeepSeek's API and the other servers have it; OpenAI's own shows
none.
"""

from __future__ import annotations

from typing import Any

from tenfold.protocol import TokenLogprob
from tenfold.server.answer_events import (
    Delta,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallBegin,
    Usage,
    Whole,
)
from tenfold.server.errors import ApiError
from tenfold.server.shapes import ChunkEvents, encode, event, usage_object
from tenfold.server.text import Tokens


class ChatShape:
    """See `shapes.Shape`."""

    def __init__(
        self, id: str, created: int, model: str, tokens: Tokens, logprobs: bool, usage: bool
    ) -> None:
        self._head = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._events = ChunkEvents(id, "chat.completion.chunk", created, model, usage)
        self._tokens = tokens
        self._logprobs = logprobs

    def opening(self, index: int, usage: Usage) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def delta(self, index: int, delta: Delta) -> bytes:
        bodies = [body for event in delta.events if (body := _body(event))]
        logprobs = b"null"
        if self._logprobs and delta.logprobs:
            # They go with the first event, and with an empty one where nothing can be shown yet.
            bodies = bodies or [b'{"content":""}']
            logprobs = encode(self._entries(delta.tokens, delta.logprobs))
        data = b""
        for body in bodies:
            data += self._choice(index, body, logprobs, b"null")
            logprobs = b"null"
        return data

    def closing(self, index: int, finish: Finish) -> bytes:
        return self._choice(index, b"{}", b"null", b'"' + finish.reason.encode() + b'"')

    def ending(self, usage: Usage) -> bytes:
        return self._events.ending(usage)

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        rendered = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._entries(choice.tokens, choice.logprobs) if self._logprobs else None,
                "finish_reason": choice.finish.reason if choice.finish else None,
            }
            for index, choice in enumerate(choices)
        ]
        return encode({**self._head, "choices": rendered, "usage": usage_object(usage)})

    def _choice(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return self._events.choice(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish)
        )

    def _entries(self, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
        entries = []
        for id, found in zip(tokens, logprobs, strict=True):
            top = [self._entry(other, logprob) for other, logprob in found.top]
            entries.append({**self._entry(id, found.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens.token_bytes(id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}


def _body(event: Event) -> bytes:
    """The delta of an event; nothing for ends, which this API does not show."""
    match event:
        case TextDelta():
            return b'{"content":' + encode(event.text) + b"}"
        case ReasoningDelta():
            return b'{"reasoning_content":' + encode(event.text) + b"}"
        case ToolArgumentsDelta():
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                event.index,
                encode(event.text),
            )
        case ToolCallBegin():
            call = {"index": event.index, **_call(ToolCall(event.id, event.name))}
            return b'{"tool_calls":[' + encode(call) + b"]}"
        case _:
            return b""


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(choice: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message
