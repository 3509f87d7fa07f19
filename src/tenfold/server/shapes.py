"""Answers in OpenAI's shapes. What does not change within a request is serialised once, not once a token."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tenfold.protocol import TokenLogprob
from tenfold.server.output import Piece
from tenfold.server.text import Tokens

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """A server-sent event. JSON has no bare line ends, so one line is enough."""
    return b"data: " + data + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Shape(Protocol):
    """One request's answer, streamed (methods that return events) or whole."""

    def opening(self) -> bytes:
        """What comes before the first text."""
        ...

    def delta(self, piece: Piece) -> bytes:
        """Text, and logprobs if wanted; nothing for nothing."""
        ...

    def closing(self, finish: str) -> bytes:
        """The finish reason, in an event of its own: clients lose text that comes with it."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """An event without choices."""
        ...

    def whole(self, piece: Piece, finish: str, usage: dict[str, Any]) -> bytes:
        """The answer as one JSON object."""
        ...


class _Events:
    """The constant parts of a stream's events."""

    def __init__(self, id: str, kind: str, created: int, model: str, include_usage: bool) -> None:
        head = _encode({"id": id, "object": kind, "created": created, "model": model})
        self._prefix = b"data: " + head[:-1] + b',"choices":['
        # With include_usage every other event says that it has none.
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def choice(self, body: bytes) -> bytes:
        return self._prefix + body + self._suffix

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._prefix + b'],"usage":' + _encode(usage) + b"}\n\n"


class ChatShape:
    """``chat.completion`` and its chunks."""

    def __init__(
        self, id: str, created: int, model: str, tokens: Tokens, logprobs: bool, usage: bool
    ) -> None:
        self._head = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._events = _Events(id, "chat.completion.chunk", created, model, usage)
        self._tokens = tokens
        self._logprobs = logprobs

    def opening(self) -> bytes:
        return self._events.choice(
            b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        )

    def delta(self, piece: Piece) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        logprobs = _encode(self._entries(piece)) if self._logprobs else b"null"
        return self._events.choice(
            b'{"index":0,"delta":{"content":'
            + _encode(piece.text)
            + b'},"logprobs":'
            + logprobs
            + b',"finish_reason":null}'
        )

    def closing(self, finish: str) -> bytes:
        return self._events.choice(
            b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"' + finish.encode() + b'"}'
        )

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._events.usage(usage)

    def whole(self, piece: Piece, finish: str, usage: dict[str, Any]) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._entries(piece) if self._logprobs else None,
            "finish_reason": finish,
        }
        return _encode({**self._head, "choices": [choice], "usage": usage})

    def _entries(self, piece: Piece) -> dict[str, Any]:
        entries = []
        for id, found in zip(piece.tokens, piece.logprobs, strict=True):
            top = [self._entry(other, logprob) for other, logprob in found.top]
            entries.append({**self._entry(id, found.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens.token_bytes(id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}


class CompletionShape:
    """``text_completion``, streamed or whole."""

    def __init__(
        self, id: str, created: int, model: str, tokens: Tokens, logprobs: bool, usage: bool
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._events = _Events(id, "text_completion", created, model, usage)
        self._tokens = tokens
        self._logprobs = logprobs
        self._offset = 0
        """Characters of the tokens so far, for ``text_offset``."""

    def opening(self) -> bytes:
        return b""

    def delta(self, piece: Piece) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        return self._choice(_encode(piece.text), self._encoded(piece), b"null")

    def closing(self, finish: str) -> bytes:
        return self._choice(b'""', b"null", b'"' + finish.encode() + b'"')

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._events.usage(usage)

    def whole(self, piece: Piece, finish: str, usage: dict[str, Any]) -> bytes:
        choice = {
            "index": 0,
            "text": piece.text,
            "logprobs": msgspec.Raw(self._encoded(piece)),
            "finish_reason": finish,
        }
        return _encode({**self._head, "choices": [choice], "usage": usage})

    def _choice(self, text: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return self._events.choice(
            b'{"index":0,"text":' + text + b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}"
        )

    def _encoded(self, piece: Piece) -> bytes:
        return _encode(self._columns(piece.tokens, piece.logprobs)) if self._logprobs else b"null"

    def _columns(self, ids: list[int], found: list[TokenLogprob]) -> dict[str, Any]:
        texts = [self._text(id) for id in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in found],
            "top_logprobs": [{self._text(id): logprob for id, logprob in entry.top} for entry in found],
            "text_offset": offsets,
        }

    def _text(self, id: int) -> str:
        return self._tokens.token_bytes(id).decode(errors="replace")
