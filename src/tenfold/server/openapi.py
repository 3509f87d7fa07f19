"""`GET /openapi.json`: the API for machines that read OpenAPI 3.1.

What a body may hold is not written down twice: the parsers of `requests` are run once over a body that notes
what is asked of it, `Recorder`, and the ranges they check by become the schema. Only fields whose values have
a form of their own (messages, prompts, lists of tokens) are described here, in `_forms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tenfold.limits import RANGES, Range
from tenfold.server.fields import Fields
from tenfold.server.messages import MAX_MESSAGES, ROLES
from tenfold.server.requests import MAX_STOPS, parse_chat, parse_completion
from tenfold.server.stats import Stats

Schema = dict[str, Any]


class Recorder(Fields):
    """A body that notes which fields a parser takes, and by which rule."""

    def __init__(self, example: dict[str, Any]) -> None:
        super().__init__(example)
        self.rules: dict[str, Schema | None] = {}
        """By field; None for one that was taken raw: its form is the parser's own affair."""

    def take(self, name: str) -> Any:
        self.rules.setdefault(name, None)
        return super().take(name)

    def number(self, name: str, default: float, range: Range) -> float:
        value = super().number(name, default, range)
        self.rules[name] = _or_null({**_ranged("number", range), "default": default})
        return value

    def integer(self, name: str, range: Range) -> int | None:
        value = super().integer(name, range)
        self.rules[name] = _or_null(_ranged("integer", range))
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = super().boolean(name, default)
        self.rules[name] = _or_null({"type": "boolean", "default": default})
        return value

    def string(self, name: str) -> str | None:
        value = super().string(name)
        self.rules[name] = _or_null({"type": "string"})
        return value

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        super().only(name, allowed, why)
        self.rules[name] = {"enum": [*allowed, None], "description": f"No other value: {why}."}


def body_schema(chat: bool, vocab_size: int) -> Schema:
    """What the parser of ``/v1/chat/completions`` (or ``/v1/completions``) takes, as JSON Schema.

    It says what each field may be. Rules between fields (``top_logprobs`` needs ``logprobs``) and what
    depends on the model (does the prompt fit?) are beyond it: what breaks them is a 400 too.
    """
    required = "messages" if chat else "prompt"
    example: Any = [{"role": "user", "content": "Hi"}] if chat else "Hi"
    recorder = Recorder({required: example})
    (parse_chat if chat else parse_completion)(recorder, (), vocab_size)
    forms = _forms(vocab_size)
    properties = {
        name: forms.get(name, {}) if rule is None else rule for name, rule in recorder.rules.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [required],
        "additionalProperties": False,
        "examples": [{required: example, "max_tokens": 16}],
    }


def _ranged(kind: str, range: Range) -> Schema:
    schema: Schema = {"type": kind, "minimum": range.low, "maximum": range.high}
    if range.note:
        schema["description"] = f"{range.note[0].upper()}{range.note[1:]}."
    if range.also is not None and abs(range.also) != float("inf"):  # infinities are no JSON
        note = schema.pop("description", None)
        return {"anyOf": [schema, {"const": range.also}], **({"description": note} if note else {})}
    return schema


def _or_null(schema: Schema) -> Schema:
    """null is the same as an absent field, everywhere."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _forms(vocab_size: int) -> dict[str, Schema]:
    """Fields whose values have a form of their own."""
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    stop = {"type": "string", "minLength": 1}
    tokens = {"type": "array", "items": token}
    text_part = _object(
        {"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text", additionalProperties=False
    )
    nothing: Schema = {"enum": [None, []]}
    message = _object(
        {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": text_part, "minItems": 1}]},
            "name": {"type": ["string", "null"]},
            **dict.fromkeys(("refusal", "tool_calls", "function_call", "audio", "annotations"), nothing),
        },
        "role",
        "content",
        additionalProperties=False,
    )
    prompt = [{"type": "string"}, {**tokens, "minItems": 1}]
    bias = RANGES["logit_bias"]
    return {
        "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES},
        "prompt": {
            "anyOf": [
                *prompt,
                *({"type": "array", "prefixItems": [one], "items": False, "minItems": 1} for one in prompt),
            ],
            "description": "A text, or token ids; a list of one prompt is taken too.",
        },
        "stop": {
            "anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}],
            "description": "Text that ends the answer; it is not sent.",
        },
        "stop_token_ids": {
            **_or_null(tokens),
            "description": "Tokens that end the answer, beside the model's.",
        },
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": bias.low, "maximum": bias.high},
            "description": f"By token id, 0 to {vocab_size - 1}: what is added to its logit.",
        },
        "stream_options": {
            **_object({"include_usage": {"type": ["boolean", "null"]}}, additionalProperties=False),
            "type": ["object", "null"],
            "description": "Only with stream: true.",
        },
    }


_LOGPROBS = {"type": ["object", "null"]}
_FINISH = {"enum": ["stop", "length"]}
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


def _failures(errors: dict[int, str]) -> Schema:
    return {str(status): _json(_ref("Error"), said) for status, said in errors.items()}


def document(vocab_size: int, keys: bool) -> bytes:
    """The whole document; ``keys``: whether the server asks for one."""
    needs_key = {401: "No API key, or not one of this server's."} if keys else {}
    anybody: Schema = {"security": []}
    status = _object({"status": {"type": "string"}}, "status")
    not_ready = _object({"status": {"type": "string"}, "reason": {"type": "string"}}, "status", "reason")
    (stats,), parts = msgspec.json.schema_components([Stats], ref_template="#/components/schemas/{name}")
    assert stats == _ref("Stats")

    def post(summary: str, body: str, answer: str) -> Schema:
        whole = _json(_ref(answer), "The answer; with `stream: true` as server-sent events.")
        whole["content"]["text/event-stream"] = {"schema": _EVENT}
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
                "responses": {"200": whole, **_failures({**_ERRORS, **needs_key})},
            }
        }

    paths = {
        "/v1/chat/completions": post("The assistant's next message", "ChatRequest", "ChatCompletion"),
        "/v1/completions": post("A text, continued", "CompletionRequest", "Completion"),
        "/v1/models": _get(
            "The models served",
            _json(
                _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
                "All.",
            ),
            needs_key,
        ),
        "/v1/models/{model}": _get(
            "One model",
            _json(_ref("Model"), "It is served."),
            {404: "There is no such model.", **needs_key},
            parameters=[
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                }
            ],
        ),
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
        "info": {"title": "Tenfold", "version": "1", "description": "OpenAI's API, served by Tenfold."},
        **keyed,
        "paths": paths,
        "components": {
            "schemas": {
                "ChatRequest": body_schema(True, vocab_size),
                "CompletionRequest": body_schema(False, vocab_size),
                "ChatCompletion": _answer_schema("chat.completion", _choice("message", _MESSAGE)),
                "Completion": _answer_schema("text_completion", _choice("text", {"type": "string"})),
                "Usage": _USAGE,
                "Model": _MODEL,
                "Error": _ERROR,
                **parts,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(document)
