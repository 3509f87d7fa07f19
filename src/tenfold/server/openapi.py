"""`GET /openapi.json`: the API for machines that read OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.server.openapi_bodies import BODIES
from tenfold.server.openapi_forms import Schema
from tenfold.server.stats import Stats


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_LOGPROBS = {"type": ["object", "null"]}
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_COUNT = {"type": "integer", "minimum": 0}
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}, "cached_tokens"),
    },
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
)
_ERROR = _object(
    {
        "error": _object(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
_ANTHROPIC_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": {"type": "string"}, "message": {"type": "string"}}, "type", "message"),
        "request_id": {"type": "string"},
    },
    "type",
    "error",
)
_MANY = {"type": "array", "items": {"type": "object"}}
_MESSAGE_ANSWER = _object(
    {
        "id": {"type": "string"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": {"type": "string"},
        "content": _MANY,
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}, "input_tokens", "output_tokens"),
    },
    "id",
    "type",
    "role",
    "model",
    "content",
    "stop_reason",
    "usage",
)
_RESPONSE = _object(
    {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "status": {"type": "string"},
        "model": {"type": "string"},
        "output": _MANY,
    },
    "id",
    "object",
    "status",
    "model",
    "output",
)
_TOKENS = _object(
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": {"type": "array", "items": _COUNT},
        "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
    },
    "count",
    "max_model_len",
    "tokens",
)
_MODEL = _object(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer"},
    },
    "id",
    "object",
    "created",
    "owned_by",
)


_VECTOR = _object(
    {
        "object": {"const": "embedding"},
        "index": _COUNT,
        "embedding": {
            "anyOf": [
                {"type": "array", "items": {"type": "number"}, "minItems": 1},
                {"type": "string", "contentEncoding": "base64"},
            ]
        },
    },
    "object",
    "index",
    "embedding",
)
_EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "minItems": 1, "items": _VECTOR},
        "model": {"type": "string"},
        "usage": _object(
            {
                "prompt_tokens": _COUNT,
                "total_tokens": _COUNT,
                "prompt_tokens_details": _object({"cached_tokens": _COUNT}, "cached_tokens"),
            },
            "prompt_tokens",
            "total_tokens",
            "prompt_tokens_details",
        ),
    },
    "object",
    "data",
    "model",
    "usage",
)


def _answer_schema(kind: str, choice: Schema) -> Schema:
    """A whole answer."""
    fields = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "minItems": 1, "items": choice},
        "usage": {"$ref": "#/components/schemas/Usage"},
    }
    return _object(fields, *fields)


def _choice(what: str, schema: Schema) -> Schema:
    fields = {"index": {"type": "integer"}, what: schema, "logprobs": _LOGPROBS, "finish_reason": _FINISH}
    return _object(fields, *fields)


_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}}, "role", "content"
)
_EVENT = _object(
    {"data": {"type": "string", "description": "A part of the answer, in JSON; an error; or [DONE]."}}, "data"
)
"""One server-sent event."""
_ERRORS = {
    400: "The body is wrong; `param` names the field.",
    403: "It comes from a web page whose origin is not allowed.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is encoded.",
    429: "Too many requests run or wait; `retry-after` says when to come again.",
    500: "The request could not be finished.",
    503: "The server cannot serve now.",
}


def _json(schema: Schema, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _get(summary: str, answer: Schema, errors: dict[int, str], **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": {"200": answer, **_failures(errors)}, **more}}


def _failures(errors: dict[int, str], shape: str = "Error") -> Schema:
    return {str(status): _json(_ref(shape), said) for status, said in errors.items()}


def _post(
    summary: str,
    body: Schema,
    answer: Schema,
    errors: dict[int, str],
    *,
    stream: bool = True,
    error: str = "Error",
) -> Schema:
    said = "The answer; with `stream: true` as server-sent events." if stream else "The answer."
    whole = _json(answer, said)
    if stream:
        whole["content"]["text/event-stream"] = {"schema": _EVENT}
    failures = _failures(errors, error)
    # What did not arrive in time is answered before anybody knows what it was.
    failures["408"] = _json(_ref("Error"), _ERRORS[408])
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": whole, **failures},
        }
    }


def _path_parameter(name: str, pattern: str | None = None) -> list[Schema]:
    schema: Schema = {"type": "string", "minLength": 1}
    if pattern is not None:
        schema["pattern"] = pattern
    return [{"name": name, "in": "path", "required": True, "schema": schema}]


def _openai_paths(errors: dict[int, str], needs_key: dict[int, str]) -> Schema:
    found = _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}})
    no_model = {404: "There is no such model.", **needs_key}
    return {
        "/v1/chat/completions": _post(
            "The assistant's next message", _ref("ChatRequest"), _ref("ChatCompletion"), errors
        ),
        "/v1/completions": _post("A text, continued", _ref("CompletionRequest"), _ref("Completion"), errors),
        "/v1/responses": _post(
            "A response, which can be kept", _ref("ResponsesRequest"), _ref("Response"), errors
        ),
        **_kept_paths(needs_key),
        "/v1/embeddings": _post(
            "Vectors of texts", _ref("EmbeddingsRequest"), _ref("Embeddings"), errors, stream=False
        ),
        "/v1/models": _get("The models served", _json(found, "All."), needs_key),
        "/v1/models/{model}": _get(
            "One model", _json(_ref("Model"), "It is served."), no_model, parameters=_path_parameter("model")
        ),
    }


def _kept_paths(needs_key: dict[int, str]) -> Schema:
    lost = {
        400: "A query parameter is wrong.",
        404: "There is no such response, or it is another key's.",
        **needs_key,
    }
    id = _path_parameter("id", "^[A-Za-z0-9_]+$")
    kept = _get("A response that is kept", _json(_ref("Response"), "It."), lost, parameters=id)
    deleted = _object({"id": {"type": "string"}, "deleted": {"const": True}}, "id", "deleted")
    kept["delete"] = {
        "summary": "Forget a response",
        "responses": {"200": _json(deleted, "It is forgotten."), **_failures(lost)},
        "parameters": id,
    }
    items = _object({"object": {"const": "list"}, "data": _MANY}, "object", "data")
    query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in (
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            ("order", {"enum": ["asc", "desc"]}),
            ("after", {"type": "string"}),
        )
    ]
    return {
        "/v1/responses/{id}": kept,
        "/v1/responses/{id}/input_items": _get(
            "Its input", _json(items, "Items."), lost, parameters=[*id, *query]
        ),
    }


def _other_paths(errors: dict[int, str]) -> Schema:
    """Anthropic's API, and the tokenizer's."""
    counted = _object({"input_tokens": _COUNT}, "input_tokens")
    whole = {status: said for status, said in errors.items() if status not in (429, 503)}
    text = _object({"prompt": {"type": "string"}}, "prompt")
    either = {"anyOf": [_ref("TokenizeText"), _ref("TokenizeChat")]}
    return {
        "/v1/messages": _post(
            "The assistant's next message, in Anthropic's form",
            _ref("MessagesRequest"),
            _ref("Message"),
            errors,
            error="AnthropicError",
        ),
        "/v1/messages/count_tokens": _post(
            "How many tokens a message's prompt has",
            _ref("CountTokensRequest"),
            counted,
            whole,
            stream=False,
            error="AnthropicError",
        ),
        "/tokenize": _post("The tokens of a text or a chat", either, _ref("Tokens"), whole, stream=False),
        "/detokenize": _post("The text of tokens", _ref("DetokenizeRequest"), text, whole, stream=False),
    }


def document(vocab_size: int, keys: bool) -> bytes:
    """The whole document; ``keys``: whether the server asks for one."""
    needs_key = {401: "No API key, or not one of this server's."} if keys else {}
    anybody: Schema = {"security": []}
    status = _object({"status": {"type": "string"}}, "status")
    not_ready = _object({"status": {"type": "string"}, "reason": {"type": "string"}}, "status", "reason")
    (stats,), parts = msgspec.json.schema_components([Stats], ref_template="#/components/schemas/{name}")
    assert stats == _ref("Stats")
    errors = {**_ERRORS, **needs_key}
    paths = {
        **_openai_paths(errors, needs_key),
        **_other_paths(errors),
        "/health": _get("Does the server answer?", _json(status, "It does."), {}, **anybody),
        "/ready": _get("Do requests make progress?", _json(status, "They do, or would."), {}, **anybody),
        "/stats": _get("What the server does now", _json(_ref("Stats"), "Figures and counters."), needs_key),
        "/metrics": _get(
            "Prometheus' metrics",
            {"description": "All of them.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            needs_key,
        ),
        "/openapi.json": _get("This document", _json({"type": "object"}, "It."), {}, **anybody),
    }
    paths["/ready"]["get"]["responses"]["503"] = _json(not_ready, "They do not, for this reason.")
    keyed: Schema = {}
    if keys:
        keyed["security"] = [{"bearer": []}, {"header": []}]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tenfold",
            "version": "1",
            "description": "OpenAI's and Anthropic's APIs, served by Tenfold.",
        },
        **keyed,
        "paths": paths,
        "components": {
            "schemas": {
                **{name: body.schema(vocab_size) for name, body in BODIES.items()},
                "ChatCompletion": _answer_schema("chat.completion", _choice("message", _MESSAGE)),
                "Completion": _answer_schema("text_completion", _choice("text", {"type": "string"})),
                "Embeddings": _EMBEDDINGS,
                "Message": _MESSAGE_ANSWER,
                "Response": _RESPONSE,
                "Tokens": _TOKENS,
                "Usage": _USAGE,
                "Model": _MODEL,
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                **parts,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(document)
