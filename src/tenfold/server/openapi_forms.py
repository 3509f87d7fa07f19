"""Fields of bodies whose values have a form of their own, as JSON Schema."""

from __future__ import annotations

from typing import Any

from tenfold.limits import RANGES
from tenfold.server.embeddings import ENCODINGS, MAX_INPUTS, POOLINGS
from tenfold.server.messages import MAX_MESSAGES, ROLES
from tenfold.server.prompts import MAX_CHOICES
from tenfold.server.requests import MAX_STOPS, MAX_TOKEN_DIGITS
from tenfold.server.tools import MAX_TOOLS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
NULL: Schema = {"type": "null"}
NOTHING: Schema = {"enum": [None, []]}
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
BEST_OF: Schema = {
    "type": ["integer", "null"],
    "minimum": 1,
    "maximum": MAX_CHOICES,
    "description": "The same as n: no choice is computed to be thrown away.",
}
_OBJECT_SCHEMA: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
"""The JSON schema of an object."""


def or_null(schema: Schema) -> Schema:
    """null is the same as an absent field, everywhere."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {**schema, "anyOf": [*schema["anyOf"], NULL]}


def closed(properties: Schema, *required: str) -> Schema:
    """An object with no other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    return schema if most is None else {**schema, "maxItems": most}


def any_of(*schemas: Schema) -> Schema:
    """One or another."""
    return {"anyOf": list(schemas)}


def chat_forms(vocab_size: int) -> dict[str, Schema]:
    """Those of OpenAI's older APIs, and of what clients of vLLM and SGLang send."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    stop: Schema = {"type": "string", "minLength": 1}
    tokens = array(token)
    bias = RANGES["logit_bias"]
    function = closed(
        {
            "name": _NAME,
            "description": TEXT_OR_NULL,
            "parameters": or_null(_OBJECT_SCHEMA),
            "strict": FLAG,
        },
        "name",
    )
    named = closed({"type": {"const": "function"}, "function": closed({"name": TEXT}, "name")})
    named["required"] = ["type", "function"]
    json = any_of({"type": "object"}, TEXT, NULL)
    choices = or_null(array(TEXT))
    return {
        "messages": array(_chat_message(), 1, MAX_MESSAGES),
        "prompt": {
            **any_of(
                TEXT,
                array(token, 1),
                array(TEXT, 1, MAX_CHOICES),
                array(array(token, 1), 1, MAX_CHOICES),
            ),
            "description": "A text, or token ids; or a list of texts, or of lists of token ids.",
        },
        "tokens": tokens,
        "stop": {
            **any_of(stop, array(stop, 0, MAX_STOPS), NULL),
            "description": "Text that ends the answer; it is not sent.",
        },
        "stop_token_ids": {
            **or_null(tokens),
            "description": "Tokens that end the answer, beside the model's.",
        },
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": f"^[0-9]{{1,{MAX_TOKEN_DIGITS}}}$"},
            "additionalProperties": {"type": "number", "minimum": bias.low, "maximum": bias.high},
            "description": f"By token id, 0 to {vocab_size - 1}: what is added to its logit.",
        },
        "stream_options": {
            **or_null(closed({"include_usage": FLAG})),
            "description": "Only with stream: true.",
        },
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "tools": or_null(
            array(
                closed({"type": {"const": "function"}, "function": function}, "type", "function"),
                0,
                MAX_TOOLS,
            )
        ),
        "tool_choice": any_of({"enum": ["none", "auto", "required", None]}, named),
        "parallel_tool_calls": FLAG,
        "chat_template_kwargs": {
            "type": ["object", "null"],
            "propertyNames": {"not": {"enum": ["messages", "tools", "add_generation_prompt"]}},
            "description": "Further variables of the chat template.",
        },
        "response_format": any_of(
            NULL,
            closed({"type": {"const": "text"}}, "type"),
            closed({"type": {"const": "json_object"}, "schema": json}, "type"),
            closed({"type": {"const": "json_schema"}, "json_schema": _named_schema()}, "type", "json_schema"),
        ),
        "structured_outputs": {
            **or_null(
                closed(
                    {
                        "json": json,
                        "regex": TEXT_OR_NULL,
                        "choice": choices,
                        "grammar": TEXT_OR_NULL,
                        "json_object": FLAG,
                        "disable_any_whitespace": {"enum": [False, None]},
                        "disable_additional_properties": {"enum": [False, None]},
                        "whitespace_pattern": {"enum": [False, None]},
                        "structural_tag": {"enum": [False, None]},
                    }
                )
            ),
            "description": "At most one of them constrains the answer.",
        },
        "guided_json": json,
        "guided_choice": choices,
        **dict.fromkeys(("guided_regex", "guided_grammar", "regex", "ebnf"), TEXT_OR_NULL),
    }


def _named_schema() -> Schema:
    return closed(
        {"name": or_null(_NAME), "description": TEXT_OR_NULL, "schema": {"type": "object"}, "strict": FLAG},
        "schema",
    )


def _chat_message() -> Schema:
    part = closed({"type": {"const": "text"}, "text": TEXT}, "type", "text")
    content = any_of(TEXT, array(part, 1))
    call = closed(
        {
            "id": TEXT,
            "type": {"const": "function"},
            "function": closed({"name": TEXT, "arguments": TEXT}, "name", "arguments"),
            "index": {},
        },
        "id",
        "function",
    )
    empty = dict.fromkeys(("refusal", "function_call", "audio", "annotations"), NOTHING)
    common: Schema = {"content": content, "name": TEXT_OR_NULL, **empty}
    plain = {
        **common,
        "role": {"enum": [role for role in ROLES if role not in ("assistant", "tool")]},
        **dict.fromkeys(("tool_calls", "reasoning_content", "tool_call_id"), NOTHING),
    }
    tool = {**plain, "role": {"const": "tool"}, "tool_call_id": TEXT_OR_NULL}
    assistant = {
        **plain,
        "role": {"const": "assistant"},
        "reasoning_content": TEXT_OR_NULL,
        "tool_calls": or_null(array(call)),
    }
    calling = {**assistant, "content": any_of(NULL, *content["anyOf"]), "tool_calls": array(call, 1)}
    return any_of(
        closed(plain, "role", "content"),
        closed(assistant, "role", "content"),
        closed(calling, "role", "tool_calls"),
        closed(tool, "role", "content"),
    )


def embedding_forms(vocab_size: int) -> dict[str, Schema]:
    """Those of ``/v1/embeddings``."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    text: Schema = {"type": "string", "minLength": 1}
    return {
        "input": {
            **any_of(
                text,
                array(token, 1),
                array(text, 1, MAX_INPUTS),
                array(array(token, 1), 1, MAX_INPUTS),
            ),
            "description": "A text, or token ids; or a list of texts, or of lists of token ids.",
        },
        "encoding_format": {
            "enum": [*ENCODINGS, None],
            "description": "A list of numbers, or the bytes of little-endian float32 in base64.",
        },
        "pooling": {
            "enum": [*POOLINGS, None],
            "description": "Of which tokens' states a vector is made; if absent, as the model says.",
        },
    }


def anthropic_forms(vocab_size: int) -> dict[str, Schema]:
    """Those of ``/v1/messages`` and ``/v1/messages/count_tokens``."""
    cache: Schema = any_of(
        NULL, closed({"type": {"const": "ephemeral"}, "ttl": {"enum": [None, "5m", "1h"]}}, "type")
    )
    text = closed(
        {"type": {"const": "text"}, "text": TEXT, "cache_control": cache, "citations": NOTHING},
        "type",
        "text",
    )
    result = closed(
        {
            "type": {"const": "tool_result"},
            "tool_use_id": TEXT,
            "content": any_of(NULL, TEXT, array(text)),
            "is_error": FLAG,
            "cache_control": cache,
        },
        "type",
        "tool_use_id",
    )
    thinking = closed({"type": {"const": "thinking"}, "thinking": TEXT, "signature": {}}, "type", "thinking")
    direct: Schema = {"enum": [None, {"type": "direct"}]}
    use = closed(
        {
            "type": {"const": "tool_use"},
            "id": TEXT,
            "name": TEXT,
            "input": {"type": "object"},
            "cache_control": cache,
            "caller": direct,
        },
        "type",
        "id",
        "name",
        "input",
    )
    user = closed(
        {"role": {"const": "user"}, "content": any_of(TEXT, array(any_of(text, result), 1))},
        "role",
        "content",
    )
    assistant = closed(
        {"role": {"const": "assistant"}, "content": any_of(TEXT, array(any_of(text, thinking, use)))},
        "role",
        "content",
    )
    tool = closed(
        {
            "type": {"enum": [None, "custom"]},
            "name": _NAME,
            "description": TEXT_OR_NULL,
            "input_schema": _OBJECT_SCHEMA,
            "strict": FLAG,
            "cache_control": cache,
            "defer_loading": {"enum": [None, False]},
            "allowed_callers": {"enum": [None, ["direct"]]},
            "eager_input_streaming": FLAG,
            "input_examples": NOTHING,
        },
        "name",
        "input_schema",
    )
    parallel: Schema = {"disable_parallel_tool_use": FLAG}
    return {
        "messages": {
            **array(any_of(user, assistant), 1, MAX_MESSAGES),
            "description": "The last one must be the user's.",
        },
        "system": any_of(NULL, TEXT, array(text, 1)),
        "cache_control": cache,
        "thinking": or_null(
            closed(
                {
                    "type": {"enum": ["enabled", "adaptive", "disabled"]},
                    "budget_tokens": NULL,
                    "display": {"enum": [None, "summarized"]},
                },
                "type",
            )
        ),
        "output_config": or_null(
            closed(
                {
                    "effort": TEXT_OR_NULL,
                    "format": or_null(
                        closed(
                            {"type": {"const": "json_schema"}, "schema": {"type": "object"}}, "type", "schema"
                        )
                    ),
                }
            )
        ),
        "tools": or_null(array(tool, 0, MAX_TOOLS)),
        "tool_choice": any_of(
            NULL,
            closed({"type": {"enum": ["auto", "any", "none"]}, "name": NULL, **parallel}, "type"),
            closed({"type": {"const": "tool"}, "name": TEXT, **parallel}, "type", "name"),
        ),
        "stop_sequences": or_null(array({"type": "string", "minLength": 1}, 0, MAX_STOPS)),
        "metadata": or_null(closed({"user_id": {"type": ["string", "null"], "maxLength": 512}})),
    }


def responses_forms(vocab_size: int) -> dict[str, Schema]:
    """Those of ``/v1/responses``."""
    base: Schema = {
        "id": TEXT_OR_NULL,
        "status": {"enum": [None, "in_progress", "completed", "incomplete"]},
    }
    caller: Schema = {"enum": [None, {"type": "direct"}]}

    def parts(*kinds: str) -> Schema:
        more = dict.fromkeys(("annotations", "logprobs", "prompt_cache_breakpoint"), NOTHING)
        return array(closed({"type": {"enum": list(kinds)}, "text": TEXT, **more}, "type", "text"))

    def message(roles: list[str], *kinds: str) -> Schema:
        fields: Schema = {
            "type": {"enum": [None, "message"]},
            "role": {"enum": roles},
            "content": any_of(TEXT, parts(*kinds)),
            "phase": NULL,
        }
        return closed({**base, **fields}, "role", "content")

    def item(kind: str, fields: Schema, *required: str) -> Schema:
        return closed({**base, "type": {"const": kind}, **fields}, "type", *required)

    call: Schema = {"call_id": TEXT, "name": TEXT, "arguments": TEXT, "caller": caller}
    call |= dict.fromkeys(("namespace", "async", "async_"), NULL)
    output: Schema = {
        "call_id": TEXT,
        "output": any_of(TEXT, parts("input_text")),
        "name": {},
        "caller": caller,
    }
    thoughts: Schema = {
        "summary": or_null(parts("summary_text")),
        "content": or_null(parts("reasoning_text")),
        "encrypted_content": NULL,
    }
    items = any_of(
        message(["user", "system", "developer"], "input_text"),
        message(["assistant"], "output_text", "input_text"),
        item("function_call", call, "call_id", "name", "arguments"),
        item("function_call_output", output, "call_id", "output"),
        item("reasoning", thoughts),
    )
    tool = closed(
        {
            "type": {"const": "function"},
            "name": _NAME,
            "description": TEXT_OR_NULL,
            "parameters": or_null(_OBJECT_SCHEMA),
            "strict": FLAG,
        },
        "type",
        "name",
    )
    schema = _named_schema()
    schema["properties"] = {"type": {"const": "json_schema"}, **schema["properties"]}
    schema["required"] = ["type", "schema"]
    auto: Schema = {"enum": [None, "auto"]}
    return {
        "input": any_of(TEXT, array(items, 1)),
        "tools": or_null(array(tool, 0, MAX_TOOLS)),
        "tool_choice": any_of(
            {"enum": ["none", "auto", "required", None]},
            closed({"type": {"const": "function"}, "name": TEXT}, "type", "name"),
        ),
        "parallel_tool_calls": FLAG,
        "reasoning": or_null(closed({"effort": TEXT_OR_NULL, "summary": auto, "generate_summary": auto})),
        "text": or_null(
            closed(
                {
                    "format": any_of(
                        NULL, closed({"type": {"enum": ["text", "json_object"]}}, "type"), schema
                    ),
                    "verbosity": {"enum": [None, "medium"]},
                }
            )
        ),
        "include": or_null(array({"const": "reasoning.encrypted_content"})),
        "stream_options": or_null(closed({"include_obfuscation": {"enum": [None, False]}})),
        "store": FLAG,
        "metadata": chat_forms(vocab_size)["metadata"],
    }
