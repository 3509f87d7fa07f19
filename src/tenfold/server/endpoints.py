"""The APIs that answer: for each a parser of bodies and a shape of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tenfold.server.chat import ChatShape
from tenfold.server.requests import ApiRequest, parse_chat, parse_completion
from tenfold.server.shapes import CompletionShape, Shape
from tenfold.server.text import Text

Parse = Callable[[bytes, tuple[str, ...], int], ApiRequest]
"""Body, names of models, size of the vocabulary; raises `ApiError`."""


@dataclass(frozen=True)
class Opening:
    """What a shape is made from."""

    id: str
    """Of the request; an answer's own id has a prefix before it."""
    created: int
    model: str
    text: Text
    parsed: ApiRequest
    echoes: list[str]
    """The prompt's text for each choice, where it is to come before the answer; else empty ones."""


@dataclass(frozen=True)
class Endpoint:
    """One API."""

    name: str
    """For the log."""
    parse: Parse
    shape: Callable[[Opening], Shape]


def _chat_shape(of: Opening) -> Shape:
    parsed = of.parsed
    return ChatShape(
        f"chatcmpl-{of.id}",
        of.created,
        of.model,
        of.text.tokenizer,
        parsed.params.logprobs is not None,
        parsed.include_usage,
    )


def _completion_shape(of: Opening) -> Shape:
    parsed = of.parsed
    return CompletionShape(
        f"cmpl-{of.id}",
        of.created,
        of.model,
        of.text.tokenizer,
        parsed.params.logprobs is not None,
        parsed.include_usage,
        of.echoes,
    )


ENDPOINTS = {
    "/v1/chat/completions": Endpoint("chat", parse_chat, _chat_shape),
    "/v1/completions": Endpoint("completion", parse_completion, _completion_shape),
}
