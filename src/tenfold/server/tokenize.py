"""``/tokenize`` and ``/detokenize``, in vLLM's shapes: what the server makes of a text, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.limits import PromptTooLong
from tenfold.server.errors import invalid
from tenfold.server.fields import Fields, token_ids
from tenfold.server.messages import parse_messages
from tenfold.server.prepare import Preparer
from tenfold.server.requests import open_body, template_variables
from tenfold.server.tools import ToolUse, parse_tools


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/tokenize``. Either ``prompt`` or ``messages`` are given."""

    prompt: str | None = None
    special: bool = True
    """Whether a prompt gets what the tokenizer puts around one."""
    messages: list[dict[str, Any]] = []
    tools: ToolUse | None = None
    variables: dict[str, Any] = {}
    answer: bool = True
    """Whether the beginning of an answer stands behind the messages."""
    strings: bool
    """Whether each token's text is wanted too."""


def parse_tokenize(body: bytes | Fields, models: tuple[str, ...]) -> TokenizeRequest:
    """The body of ``/tokenize``. Raises ApiError."""
    fields = open_body(body, models)
    prompt = fields.string("prompt")
    given = fields.take("messages")
    if (prompt is None) == (given is None):
        raise invalid("prompt", "give either prompt or messages", code="missing_parameter")
    strings = fields.boolean("return_token_strs")
    if prompt is not None:
        special = fields.boolean("add_special_tokens", True)
        fields.finish()
        return TokenizeRequest(prompt=prompt, special=special, strings=strings)
    fields.only("add_special_tokens", (False,), "the chat template writes them itself")
    fields.only("continue_final_message", (False,), "an answer is always a message of its own")
    answer = fields.boolean("add_generation_prompt", True)
    messages, tools = parse_messages(given), parse_tools(fields)
    variables = template_variables(fields)
    fields.finish()
    return TokenizeRequest(
        messages=messages, tools=tools, variables=variables, answer=answer, strings=strings
    )


def parse_detokenize(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens in a body of ``/detokenize``. Raises ApiError."""
    fields = open_body(body, models)
    given = fields.take("tokens")
    if given is None:
        raise invalid("tokens", "tokens is missing", code="missing_parameter")
    ids = token_ids("tokens", given, vocab_size)
    fields.finish()
    return ids


class TokenEndpoints:
    """Both, for one model. Safe to use from several threads."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def tokenize(self, body: bytes | Fields) -> bytes:
        """The tokens of a ``prompt``, or of ``messages`` as a chat would have them. Raises ApiError."""
        preparer = self._preparer
        asked = parse_tokenize(body, (preparer.model,))
        tokenizer = preparer.text.tokenizer
        if asked.prompt is not None:
            try:
                preparer.text.check_size(asked.prompt, preparer.plan.max_context)
                ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.special, parse_special=True)
            except PromptTooLong as error:
                raise invalid("prompt", str(error), code="context_length_exceeded") from None
            except ValueError as error:
                raise invalid("prompt", str(error)) from None
        else:
            ids = preparer.conversation(asked.messages, asked.tools, asked.variables, asked.answer).ids
        return msgspec.json.encode(
            {
                "count": len(ids),
                "max_model_len": preparer.plan.max_context,
                "tokens": ids,
                "token_strs": [_name(tokenizer.token_bytes(id)) for id in ids] if asked.strings else None,
            }
        )

    def detokenize(self, body: bytes | Fields) -> bytes:
        """The text of ``tokens``, special ones by name. Raises ApiError."""
        preparer = self._preparer
        ids = parse_detokenize(body, (preparer.model,), preparer.plan.vocab_size)
        return msgspec.json.encode({"prompt": _name(b"".join(map(preparer.text.tokenizer.token_bytes, ids)))})


def _name(data: bytes) -> str:
    return data.decode(errors="replace")
