"""``response`` and its stream: the events of an answer in the shape of OpenAI's Responses API.

Reasoning is in items of its own, with its text in the clear, as open models have it there.
"""

from __future__ import annotations

import time
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
from tenfold.server.responses_api.body import ResponsesRequest
from tenfold.server.responses_api.items import Item, new_id
from tenfold.server.responses_api.store import Kept, Shelf
from tenfold.server.shapes import encode

_PART = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseShape:
    """See `shapes.Shape`. There is one choice.

    The stream's last event holds the whole response, so a stream and a whole answer are built alike: a whole
    one is the sum of a stream that nobody sees. Responses that were not broken off go into the store, if the
    request wants it.
    """

    def __init__(self, created: int, model: str, parsed: ResponsesRequest, store: Shelf) -> None:
        self._id = new_id("resp")
        self._created = created
        self._model = model
        self._parsed = parsed
        self._store = store
        self._number = 0
        """Of the next event."""
        self._output: list[Item] = []
        self._open = False
        """The last item of the output is not done."""
        self._parts: list[str] = []
        """Its text so far."""
        self._finish: Finish | None = None

    def opening(self, index: int, usage: Usage) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._all(delta.events)

    def closing(self, index: int, finish: Finish) -> bytes:
        self._finish = finish
        return self._close("incomplete" if finish.reason == "length" else "completed")

    def ending(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: ApiError) -> bytes:
        data = self._close("incomplete")
        response = self._response("failed", None)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": error.message}
        return data + self._event("response.failed", {"response": response})

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        (choice,) = choices
        self._all(choice.events)
        assert choice.finish is not None
        self.closing(0, choice.finish)
        return encode(self._ended(usage))

    def _ended(self, usage: Usage) -> dict[str, Any]:
        cut = self._finish is not None and self._finish.reason == "length"
        response = self._response("incomplete" if cut else "completed", usage)
        parsed = self._parsed
        if parsed.store:
            own = sum(len(encode(item)) for item in self._output)
            kept = Kept(
                response=response,
                input=parsed.input,
                conversation=[*parsed.conversation, *self._output],
                bytes=parsed.kept_bytes + 2 * own + len(encode(parsed.shown)),
            )
            self._store.keep(self._id, kept)
        return response

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": self._output if over else [],
            "usage": None if usage is None else _usage(usage),
            **self._parsed.shown,
        }

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        body = encode({"type": name, "sequence_number": self._number, **data})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)

    def _all(self, events: list[Event]) -> bytes:
        if len(events) > 1 and isinstance(events[-2], ToolCallEnd) and events[-1] == Finish("length"):
            events = events[:-2]  # it was cut: `closing` ends it
        return b"".join(self._rendered(event) for event in events)

    def _rendered(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._text("message", event.text)
            case ReasoningDelta():
                return self._text("reasoning", event.text)
            case ToolCallBegin():
                call = {"call_id": event.id, "name": event.name, "arguments": ""}
                return self._close() + self._begin({"id": new_id("fc"), "type": "function_call", **call})
            case ToolArgumentsDelta():
                self._parts.append(event.text)
                return self._told("response.function_call_arguments.delta", {"delta": event.text})
            case ToolCallEnd():
                return self._close()
            case Finish():
                return b""

    def _text(self, kind: str, text: str) -> bytes:
        data = b""
        if not self._open or self._output[-1]["type"] != kind:
            data = self._close()
            if kind == "message":
                data += self._begin({"id": new_id("msg"), "type": kind, "role": "assistant", "content": []})
            else:
                data += self._begin({"id": new_id("rs"), "type": kind, "summary": [], "content": []})
            data += self._told("response.content_part.added", {"content_index": 0, "part": _part(kind, "")})
        self._parts.append(text)
        more: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            more["logprobs"] = []
        return data + self._told(f"response.{_PART[kind]}.delta", more)

    def _begin(self, item: Item) -> bytes:
        item["status"] = "in_progress"
        self._output.append(item)
        self._open = True
        self._parts = []
        return self._event(
            "response.output_item.added", {"output_index": len(self._output) - 1, "item": item}
        )

    def _told(self, name: str, data: dict[str, Any]) -> bytes:
        """An event about the last item."""
        at = len(self._output) - 1
        return self._event(name, {"item_id": self._output[at]["id"], "output_index": at, **data})

    def _close(self, status: str = "completed") -> bytes:
        """The end of the item that is open."""
        if not self._open:
            return b""
        self._open = False
        item = self._output[-1]
        kind = item["type"]
        text = "".join(self._parts)
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            data = self._told("response.function_call_arguments.done", done)
        else:
            part = _part(kind, text)
            item["content"] = [part]
            more: dict[str, Any] = {"content_index": 0, "text": text}
            if kind == "message":
                more["logprobs"] = []
            data = self._told(f"response.{_PART[kind]}.done", more)
            data += self._told("response.content_part.done", {"content_index": 0, "part": part})
        item["status"] = status
        end = {"output_index": len(self._output) - 1, "item": item}
        return data + self._event("response.output_item.done", end)


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART[kind], "text": text}
    if kind == "message":
        part.update(annotations=[], logprobs=[])
    return part


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
