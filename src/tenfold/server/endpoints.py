"""The APIs that answer: for each a parser of bodies and a shape of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tenfold.server.chat import ChatShape
from tenfold.server.embeddings import EmbeddingShape, parse_embeddings
from tenfold.server.errors import ApiError
from tenfold.server.fields import Fields
from tenfold.server.messages_api.body import parse_count, parse_message
from tenfold.server.messages_api.errors import error_body
from tenfold.server.messages_api.shape import MessageShape
from tenfold.server.requests import ApiRequest, parse_chat, parse_completion
from tenfold.server.responses_api.body import ResponsesRequest, parse_response
from tenfold.server.responses_api.shape import ResponseShape
from tenfold.server.responses_api.store import Shelf
from tenfold.server.shapes import CompletionShape, Shape
from tenfold.server.text import Text

Parse = Callable[[bytes | Fields, tuple[str, ...], int], ApiRequest]
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
    error: Callable[[ApiError, str], bytes] = lambda error, id: error.body()
    """The body of an error; the string is the request's id."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    """Headers of a response that have the request's id."""


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


def _message_shape(of: Opening) -> Shape:
    return MessageShape(of.id, of.model)


_ID_HEADERS = ("request-id", "x-request-id")
RESPONSES_PATH = "/v1/responses"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
COUNT_TOKENS = Endpoint("count_tokens", parse_count, _message_shape, error_body, _ID_HEADERS)
"""Of its prompts only the tokens are counted."""


def responses_endpoint(store: Shelf) -> Endpoint:
    """The Responses API for one holder of a key; what it keeps, it keeps on that one's shelf."""

    def parse(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
        return parse_response(body, models, vocab_size, store)

    def shape(of: Opening) -> Shape:
        assert isinstance(of.parsed, ResponsesRequest)
        return ResponseShape(of.created, of.model, of.parsed, store)

    return Endpoint("responses", parse, shape)


ENDPOINTS = {
    "/v1/chat/completions": Endpoint("chat", parse_chat, _chat_shape),
    "/v1/completions": Endpoint("completion", parse_completion, _completion_shape),
    "/v1/embeddings": Endpoint("embeddings", parse_embeddings, lambda of: EmbeddingShape(of.model)),
    "/v1/messages": Endpoint("messages", parse_message, _message_shape, error_body, _ID_HEADERS),
}


def endpoint_at(path: str) -> Endpoint | None:
    """Whose errors are answered at a path, also by the layers around the application; None: OpenAI's."""
    return COUNT_TOKENS if path == COUNT_TOKENS_PATH else ENDPOINTS.get(path)
