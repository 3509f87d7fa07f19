"""Answers in an API's shape. What does not change within a request is serialised once, not once a token."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tenfold.protocol import TokenLogprob
from tenfold.server.answer_events import Delta, Finish, TextDelta, Usage, Whole
from tenfold.server.errors import ApiError
from tenfold.server.text import Tokens

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """A server-sent event. JSON has no bare line ends, so one line is enough."""
    return b"data: " + data + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class Shape(Protocol):
    """One request's answer as an API shows it: a pure rendering of the events of its choices, streamed or
    whole. Each method but `whole` returns events of the stream, or nothing."""

    def opening(self, index: int, usage: Usage) -> bytes:
        """Before a choice's first delta; ``usage`` has the prompt's part."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """News of a choice. `Finish` in it is rendered by `closing`."""
        ...

    def closing(self, index: int, finish: Finish) -> bytes:
        """The end of a choice, apart from its last delta: clients lose text that comes with it."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The end of the stream, when all choices have ended."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that failed. Nobody must take it for a complete answer."""
        ...

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        """The answer as one JSON object; every choice has ended."""
        ...


class ChunkEvents:
    """The constant parts of the events of OpenAI's two completion APIs."""

    def __init__(self, id: str, kind: str, created: int, model: str, include_usage: bool) -> None:
        head = encode({"id": id, "object": kind, "created": created, "model": model})
        self._prefix = b"data: " + head[:-1] + b',"choices":['
        # With include_usage every other event says that it has none.
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def choice(self, body: bytes) -> bytes:
        """An event with one choice."""
        return self._prefix + body + self._suffix

    def ending(self, usage: Usage) -> bytes:
        """The usage if it was asked for, in an event without choices, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return self._prefix + b'],"usage":' + encode(usage_object(usage)) + b"}\n\n" + DONE


class CompletionShape:
    """``text_completion``, streamed or whole."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokens: Tokens,
        logprobs: bool,
        usage: bool,
        echoes: list[str],
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._events = ChunkEvents(id, "text_completion", created, model, usage)
        self._tokens = tokens
        self._logprobs = logprobs
        self._echoes = echoes
        """What comes before the text of each choice; empty for none."""
        self._offsets = [0] * len(echoes)
        """Characters of the tokens so far, by choice, for ``text_offset``."""

    def opening(self, index: int, usage: Usage) -> bytes:
        echo = self._echoes[index]
        return self._choice(index, encode(echo), b"null", b"null") if echo else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        text = "".join(event.text for event in delta.events if isinstance(event, TextDelta))
        if not text and not delta.logprobs:
            return b""
        return self._choice(index, encode(text), self._encoded(index, delta), b"null")

    def closing(self, index: int, finish: Finish) -> bytes:
        return self._choice(index, b'""', b"null", b'"' + finish.reason.encode() + b'"')

    def ending(self, usage: Usage) -> bytes:
        return self._events.ending(usage)

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        rendered = [
            {
                "index": index,
                "text": self._echoes[index] + choice.text,
                "logprobs": msgspec.Raw(self._encoded(index, choice)),
                "finish_reason": choice.finish.reason if choice.finish else None,
            }
            for index, choice in enumerate(choices)
        ]
        return encode({**self._head, "choices": rendered, "usage": usage_object(usage)})

    def _choice(self, index: int, text: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return self._events.choice(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, finish)
        )

    def _encoded(self, index: int, piece: Delta | Whole) -> bytes:
        return encode(self._columns(index, piece.tokens, piece.logprobs)) if self._logprobs else b"null"

    def _columns(self, index: int, ids: list[int], found: list[TokenLogprob]) -> dict[str, Any]:
        texts = [self._text(id) for id in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in found],
            "top_logprobs": [{self._text(id): logprob for id, logprob in entry.top} for entry in found],
            "text_offset": offsets,
        }

    def _text(self, id: int) -> str:
        return self._tokens.token_bytes(id).decode(errors="replace")
