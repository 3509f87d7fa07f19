"""Tools whose name, description and schema lie side by side, as Anthropic and the Responses API have them."""

from __future__ import annotations

from typing import Any

from tenfold.server.errors import invalid
from tenfold.server.fields import NAME, check_flag, check_list, check_string, show
from tenfold.server.tools import MAX_TOOLS


def check_tool_list(value: Any) -> list[Any]:
    """``tools`` as a list that is not too long; empty for null. Raises ApiError."""
    tools = [] if value is None else check_list("tools", value)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} tools; a request can have up to {MAX_TOOLS}")
    return tools


def flat_tool(where: str, value: dict[str, Any], schema: str) -> tuple[dict[str, Any], bool]:
    """A tool in OpenAI's form, and whether it is strict; ``schema`` names the field with its JSON schema.

    Raises ApiError.
    """
    name = value.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{where}.name",
            f"{where}.name is {show(name)}; it must be 1 to 64 of the characters A-Z a-z 0-9 _ -",
        )
    description = value.get("description")
    if description is not None:
        check_string(f"{where}.description", description)
    parameters = value.get(schema)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(
            f"{where}.{schema}",
            f"{where}.{schema} is {show(parameters)}; it must be the JSON schema of an object",
        )
    strict = check_flag(f"{where}.strict", value.get("strict"))
    shown = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": shown}, strict


def check_names(names: list[str]) -> None:
    """Raises ApiError where two tools have one name."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(
                f"tools[{index}].name",
                f"tools[{index}].name is {show(name)}, and so is another's; names must differ",
            )


def check_named(field: str, name: Any, names: list[str]) -> str:
    """The name of the one tool to be called. Raises ApiError if there is none of that name."""
    if not isinstance(name, str) or name not in names:
        there = ", ".join(names) or "none"
        raise invalid(field, f"{field} is {show(name)}, which is not among the tools: {there}")
    return name
