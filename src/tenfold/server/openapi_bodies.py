"""What the bodies of requests may hold, as JSON Schema.

It is not written down twice: each parser is run once over a body that notes what is asked of it, `Recorder`,
and the ranges it checks by become the schema. Only fields whose values have a form of their own (messages,
prompts, tools) are described, in `openapi_forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenfold.limits import Range
from tenfold.server.embeddings import parse_embeddings
from tenfold.server.fields import Fields
from tenfold.server.messages_api.body import parse_count, parse_message
from tenfold.server.openapi_forms import (
    BEST_OF,
    NULL,
    Schema,
    anthropic_forms,
    chat_forms,
    embedding_forms,
    or_null,
    responses_forms,
)
from tenfold.server.requests import parse_chat, parse_completion
from tenfold.server.responses_api.body import parse_response
from tenfold.server.responses_api.store import ResponseStore
from tenfold.server.tokenize import parse_detokenize, parse_tokenize


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
        self.rules[name] = or_null({**_ranged("number", range), "default": default})
        return value

    def integer(self, name: str, range: Range) -> int | None:
        value = super().integer(name, range)
        self.rules[name] = or_null(_ranged("integer", range))
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = super().boolean(name, default)
        self.rules[name] = or_null({"type": "boolean", "default": default})
        return value

    def string(self, name: str) -> str | None:
        value = super().string(name)
        self.rules[name] = or_null({"type": "string"})
        return value

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        super().only(name, allowed, why)
        self.rules[name] = {"enum": [*allowed, None], "description": f"No other value: {why}."}


@dataclass(frozen=True)
class Body:
    """One kind of body."""

    parse: Callable[[bytes | Fields, tuple[str, ...], int], object]
    example: dict[str, Any]
    """The fields that it must have."""
    forms: Callable[[int], dict[str, Schema]]
    """Of the fields that are taken raw, by the size of the vocabulary."""
    instead: dict[str, Schema] = field(default_factory=dict)
    """Forms of fields whose rule, as it was noted, is the example's alone: it depends on another field."""

    def taken(self, vocab_size: int) -> dict[str, Schema | None]:
        """The fields that the parser takes; None for those that it takes raw."""
        recorder = Recorder(self.example)
        self.parse(recorder, (), vocab_size)
        return recorder.rules

    def schema(self, vocab_size: int) -> Schema:
        """What the parser takes, field by field.

        Rules between fields (``top_logprobs`` needs ``logprobs``) and what depends on the model (does the
        prompt fit?) are beyond it: what breaks them is a 400 too.
        """
        forms = self.forms(vocab_size)
        properties = {
            name: forms.get(name, {}) if rule is None else rule
            for name, rule in self.taken(vocab_size).items()
        }
        properties |= {name: form for name, form in self.instead.items() if name in properties}
        for name in self.example:
            properties[name] = _not_null(properties[name])
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.example),
            "additionalProperties": False,
            "examples": [self.example],
        }


def _tokenize(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> object:
    return parse_tokenize(body, models)


def _responses(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> object:
    return parse_response(body, models, vocab_size, ResponseStore().shelf(""))


_HI = [{"role": "user", "content": "Hi"}]

BODIES = {
    "ChatRequest": Body(parse_chat, {"messages": _HI}, chat_forms),
    "CompletionRequest": Body(parse_completion, {"prompt": "Hi"}, chat_forms, {"best_of": BEST_OF}),
    "EmbeddingsRequest": Body(parse_embeddings, {"input": "Hi"}, embedding_forms),
    "MessagesRequest": Body(parse_message, {"messages": _HI, "max_tokens": 16}, anthropic_forms),
    "CountTokensRequest": Body(parse_count, {"messages": _HI}, anthropic_forms),
    "ResponsesRequest": Body(_responses, {"input": "Hi"}, responses_forms),
    "TokenizeText": Body(_tokenize, {"prompt": "Hi"}, lambda size: {**chat_forms(size), "messages": NULL}),
    "TokenizeChat": Body(_tokenize, {"messages": _HI}, chat_forms, {"prompt": NULL}),
    "DetokenizeRequest": Body(parse_detokenize, {"tokens": [1]}, chat_forms),
}
"""By the name of their schema."""


def _ranged(kind: str, range: Range) -> Schema:
    schema: Schema = {"type": kind, "minimum": range.low, "maximum": range.high}
    if range.note:
        schema["description"] = f"{range.note[0].upper()}{range.note[1:]}."
    if range.also is not None and abs(range.also) != float("inf"):  # infinities are no JSON
        note = schema.pop("description", None)
        return {"anyOf": [schema, {"const": range.also}], **({"description": note} if note else {})}
    return schema


def _not_null(schema: Schema) -> Schema:
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        return schema
    left = [kind for kind in kinds if kind != "null"]
    return {**schema, "type": left[0] if len(left) == 1 else left}
