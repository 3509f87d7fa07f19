"""What constrains the answer of a chat: its format, the tools that must be called, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tenfold.constraints.schema import check_schema
from tenfold.limits import RequestError, Unsupported
from tenfold.protocol import Constraint
from tenfold.server.answer_stream import Sections
from tenfold.server.errors import ApiError, invalid
from tenfold.server.tool_formats.grammar import Wanted, answer_grammar
from tenfold.server.tools import ToolUse

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def chat_constraint(
    given: Constraint | None, tools: ToolUse | None, sections: Sections, special: Mapping[str, int]
) -> Constraint | None:
    """The constraint on a chat's answer; ``given`` is that on its text, ``special`` the model's control
    tokens by name. Raises ApiError for what cannot be enforced.

    Calls are constrained where they are forced, where a tool is strict (the arguments of the others are any
    object then), and where the text is (for it may be a call instead).
    """
    form = sections.tools
    if tools is None or form is None:
        if given is None or not sections.opened:
            return given
        schema = _text_schema(given, "behind reasoning")
        wanted = Wanted(text_schema=schema, reasoning=sections.reasoning, opened=True)
        return Constraint(kind="grammar", text=answer_grammar(None, wanted, special), field=given.field)
    forced = tools.choice == "required"
    if not forced and not tools.strict and given is None:
        return None
    field = "tool_choice" if forced else "tools"
    text_schema = None
    if given is not None and not forced:
        field, text_schema = given.field, _text_schema(given, "where tools may be called")
        if form.bare:
            raise invalid(
                given.field,
                f"{given.field}: in the format {form.name} calls are JSON like the answer itself; use "
                'tool_choice "none" or "required"',
                code="unsupported_value",
            )
    schemas = {}
    for index, tool in enumerate(tools.tools):
        function = tool["function"]
        name = function["name"]
        if tools.named is not None and name != tools.named:
            continue
        given_there = function["parameters"] if forced or name in tools.strict else _ANY_OBJECT
        schemas[name] = _checked(f"tools[{index}].function.parameters", given_there)
    wanted = Wanted(
        schemas=schemas,
        forced=forced,
        one_call=sections.one_call,
        text_schema=text_schema,
        reasoning=sections.reasoning,
        opened=sections.opened,
    )
    return Constraint(kind="grammar", text=answer_grammar(form, wanted, special), field=field)


def _text_schema(given: Constraint, where: str) -> str:
    if given.kind == "json_object":
        return msgspec.json.encode(_ANY_OBJECT).decode()
    if given.kind != "json_schema":
        raise invalid(
            given.field,
            f"{given.field}: {where} only a JSON schema can constrain the text",
            code="unsupported_value",
        )
    try:
        return check_schema(given.field, given.text)
    except RequestError as error:
        raise refusal(error) from None


def _checked(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    try:
        checked: dict[str, Any] = msgspec.json.decode(
            check_schema(field, msgspec.json.encode(schema).decode())
        )
        return checked
    except RequestError as error:
        raise refusal(error) from None


def refusal(error: RequestError) -> ApiError:
    """A request that the engine would refuse, as an answer."""
    code = "unsupported_value" if isinstance(error, Unsupported) else "invalid_value"
    return invalid(error.field, str(error), code=code)
