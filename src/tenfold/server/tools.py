"""The fields of a chat request that are about tools."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tenfold.server.errors import invalid
from tenfold.server.fields import NAME, Fields, show

MAX_TOOLS = 128


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and how they are to be used."""

    tools: list[dict[str, Any]]
    """In OpenAI's form, as templates take them; never empty."""
    choice: Literal["none", "auto", "required"] = "auto"
    named: str | None = None
    """The one tool that must be called; then ``choice`` is ``required``."""
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    """Tools whose arguments must follow their schemas."""

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def parse_tools(fields: Fields) -> ToolUse | None:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where there are no tools.

    Raises ApiError that names the very thing that is wrong.
    """
    given = fields.take("tools")
    choice = fields.take("tool_choice")
    parallel = fields.take("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise invalid(
            "parallel_tool_calls", f"parallel_tool_calls is {show(parallel)}; it must be true or false"
        )
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        fields.only(name, ([], "none", "auto"), f"it has long been replaced; use {instead}")
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise invalid("tools", f"tools is {show(given)}; it must be a list of up to {MAX_TOOLS} tools")
    tools = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool, _ in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(
                f"tools[{index}].function.name",
                f"tools[{index}].function.name is {show(name)}, and so is another's; names must differ",
            )
    kind, named = _choice(choice, names)
    if not tools:
        return None
    return ToolUse(
        tools=[tool for tool, _ in tools],
        choice=kind,
        named=named,
        parallel=parallel is not False and named is None,
        strict=frozenset(tool["function"]["name"] for tool, strict in tools if strict),
    )


def _choice(value: Any, names: list[str]) -> tuple[Literal["none", "auto", "required"], str | None]:
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    if value == "required":
        if not names:
            raise invalid("tool_choice", 'tool_choice is "required", and there are no tools')
        return "required", None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or set(value) != {"type", "function"} or set(function or ()) != {"name"}:
        raise invalid(
            "tool_choice",
            f'tool_choice is {show(value)}; it must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": "..."}}',
        )
    if value["type"] != "function":
        raise invalid("tool_choice.type", f'tool_choice.type is {show(value["type"])}; it must be "function"')
    if name not in names:
        raise invalid(
            "tool_choice.function.name",
            f"tool_choice.function.name is {show(name)}, which is not among the tools: {', '.join(names)}",
        )
    return "required", name


def _tool(where: str, value: Any) -> tuple[dict[str, Any], bool]:
    """A tool as templates take it, and whether it is strict."""
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    if value.get("type") != "function":
        raise invalid(
            f"{where}.type",
            f'{where}.type is {show(value.get("type"))}; only "function" is supported',
            code="unsupported_value",
        )
    _known(where, value, ("type", "function"))
    function = value.get("function")
    where += ".function"
    if not isinstance(function, dict):
        raise invalid(where, f"{where} is {show(function)}; it must be an object")
    _known(where, function, ("name", "description", "parameters", "strict"))
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{where}.name",
            f"{where}.name is {show(name)}; it must be 1 to 64 of the characters A-Z a-z 0-9 _ -",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(
            f"{where}.description", f"{where}.description is {show(description)}; it must be a string"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(
            f"{where}.parameters",
            f"{where}.parameters is {show(parameters)}; it must be the JSON schema of an object",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{where}.strict", f"{where}.strict is {show(strict)}; it must be true or false")
    # Templates expect a description: where one is missing some write "None" into the prompt, others fail.
    shown = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": shown}, bool(strict)


def _known(where: str, value: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in value:
        if name not in names:
            raise invalid(f"{where}.{name}", f"unknown field {where}.{name}", code="unknown_parameter")
