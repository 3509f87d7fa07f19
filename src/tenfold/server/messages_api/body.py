"""Bodies of ``/v1/messages``: what is accepted, in which range, and what is refused with which reason."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from tenfold.limits import RANGES, Range
from tenfold.protocol import Constraint, SamplingParams
from tenfold.server.api_tools import check_named, check_names, check_tool_list, flat_tool
from tenfold.server.constraints import json_schema
from tenfold.server.errors import invalid
from tenfold.server.fields import Fields, check_flag, check_list, check_object, check_string, is_among, show
from tenfold.server.messages_api.conversation import check_cache_control, parse_conversation, parse_system
from tenfold.server.requests import MAX_STOPS, ApiRequest, read_fields, seed_or_new
from tenfold.server.tools import ToolUse

TEMPERATURE = Range(1e-6, 1.0, "or 0 for the most likely token", also=0.0)
_NAMES = {"reasoning_effort": "output_config.effort", ".function.parameters": ".input_schema"}
_TOOL = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "defer_loading",
    "allowed_callers", "eager_input_streaming", "input_examples",
)  # fmt: skip
_MAX_TOKENS = replace(RANGES["max_tokens"], note="")
"""Here there is no leaving it out."""


def parse_message(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """A body that asks for an answer. Raises `ApiError`."""
    fields = read_fields(body, models)
    prompt = _prompt(fields)
    max_tokens = fields.integer("max_tokens", _MAX_TOKENS)
    if max_tokens is None:
        raise invalid("max_tokens", "max_tokens is missing", code="missing_parameter")
    _metadata(fields)
    fields.only("service_tier", ("auto", "standard_only"), "there is one tier")
    params = SamplingParams(
        temperature=fields.number("temperature", 1.0, TEMPERATURE),
        top_p=fields.number("top_p", 1.0, RANGES["top_p"]),
        top_k=fields.integer("top_k", Range(0, vocab_size, "0 is off")) or 0,
        seed=seed_or_new(fields.integer("seed", RANGES["seed"])),
        stop=_stops(fields.take("stop_sequences")),
        max_tokens=max_tokens,
        constraint=prompt.constraint,
    )
    stream = fields.boolean("stream")
    fields.finish()
    return ApiRequest(
        params=params,
        stream=stream,
        include_usage=True,
        messages=prompt.messages,
        tools=prompt.tools,
        thinking=prompt.thinking,
        template_variables=prompt.variables,
        names=_NAMES,
    )


def parse_count(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """A body of ``/v1/messages/count_tokens``: what of a request goes into its prompt. Raises `ApiError`."""
    fields = read_fields(body, models)
    prompt = _prompt(fields)
    fields.finish()
    return ApiRequest(
        params=SamplingParams(seed=0),
        stream=False,
        include_usage=False,
        messages=prompt.messages,
        tools=prompt.tools,
        thinking=prompt.thinking,
        template_variables=prompt.variables,
        names=_NAMES,
    )


class _Prompt(NamedTuple):
    """What of a body an answer and a count of tokens have in common."""

    messages: list[dict[str, Any]]
    tools: ToolUse | None
    thinking: bool | None
    variables: dict[str, Any]
    constraint: Constraint | None


def _prompt(fields: Fields) -> _Prompt:
    messages = parse_conversation(fields.take("messages"))
    system = parse_system(fields.take("system"))
    if system:
        messages.insert(0, {"role": "system", "content": system})
    check_cache_control("body", {"cache_control": fields.take("cache_control")})
    fields.only("container", (), "the server runs no code")
    fields.only("mcp_servers", ([],), "the server calls no other servers; give their tools as tools")
    fields.only("context_management", (), "the conversation is taken as it is")
    thinking = _thinking(fields.take("thinking"))
    return _Prompt(messages, _tools(fields), thinking, *_output(fields.take("output_config")))


def _output(value: Any) -> tuple[dict[str, Any], Constraint | None]:
    """The template's variables and the constraint that ``output_config`` asks for."""
    if value is None:
        return {}, None
    check_object("output_config", value, ("effort", "format"))
    effort, form = value.get("effort"), value.get("format")
    variables = {} if effort is None else {"reasoning_effort": check_string("output_config.effort", effort)}
    if form is None:
        return variables, None
    where = "output_config.format"
    check_object(where, form, ("type", "schema"))
    if form.get("type") != "json_schema":
        raise invalid(f"{where}.type", f"{where}.type is {show(form.get('type'))}; it must be json_schema")
    return variables, json_schema(where, {"schema": form.get("schema")})


def _thinking(value: Any) -> bool | None:
    if value is None:
        return None
    check_object("thinking", value, ("type", "budget_tokens", "display"))
    kind = value.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid(
            "thinking.type", f"thinking.type is {show(kind)}; it must be enabled, adaptive or disabled"
        )
    if value.get("budget_tokens") is not None:
        raise invalid(
            "thinking.budget_tokens",
            'thinking.budget_tokens: a budget cannot be kept; say {"type": "adaptive"}, and bound the whole '
            "answer by max_tokens",
            code="unsupported_value",
        )
    if value.get("display") not in (None, "summarized"):
        raise invalid(
            "thinking.display",
            f"thinking.display is {show(value['display'])}; thoughts are always shown, in whole",
            code="unsupported_value",
        )
    return bool(kind != "disabled")


def _tools(fields: Fields) -> ToolUse | None:
    tools, strict = [], set()
    for index, value in enumerate(check_tool_list(fields.take("tools"))):
        where = f"tools[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise invalid(
                f"{where}.type",
                f"{where}.type is {show(kind)}; the server has no tools of its own, only custom ones are "
                "supported",
                code="unsupported_value",
            )
        check_object(where, value, _TOOL)
        check_cache_control(where, value)
        for name, allowed, why in (
            ("defer_loading", (False,), "all tools are in the prompt"),
            ("allowed_callers", (["direct"],), "only the model itself calls tools here"),
            ("eager_input_streaming", (True, False), "it must be true or false"),
            ("input_examples", ([],), "put examples into the description"),
        ):
            if value.get(name) is not None and not is_among(value[name], allowed):
                raise invalid(
                    f"{where}.{name}",
                    f"{where}.{name} is {show(value[name])}; {why}",
                    code="unsupported_value",
                )
        if value.get("input_schema") is None:
            raise invalid(
                f"{where}.input_schema", f"{where}.input_schema is missing", code="missing_parameter"
            )
        tool, is_strict = flat_tool(where, value, "input_schema")
        tools.append(tool)
        if is_strict:
            strict.add(tool["function"]["name"])
    names = [tool["function"]["name"] for tool in tools]
    check_names(names)
    choice, named, parallel = _choice(fields.take("tool_choice"), names)
    if not tools:
        return None
    return ToolUse(tools=tools, choice=choice, named=named, parallel=parallel, strict=frozenset(strict))


def _choice(value: Any, names: list[str]) -> tuple[Literal["none", "auto", "required"], str | None, bool]:
    if value is None:
        return "auto", None, True
    check_object("tool_choice", value, ("type", "name", "disable_parallel_tool_use"))
    kind = value.get("type")
    field = "tool_choice.disable_parallel_tool_use"
    parallel = not check_flag(field, value.get("disable_parallel_tool_use"))
    if kind == "tool":
        return "required", check_named("tool_choice.name", value.get("name"), names), False
    if value.get("name") is not None:
        raise invalid("tool_choice.name", 'tool_choice.name needs the type "tool"')
    if kind == "auto":
        return "auto", None, parallel
    if kind == "none":
        return "none", None, parallel
    if kind == "any":
        if not names:
            raise invalid("tool_choice", 'tool_choice is of the type "any", and there are no tools')
        return "required", None, parallel
    raise invalid("tool_choice.type", f"tool_choice.type is {show(kind)}; it must be auto, any, tool or none")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else check_list("stop_sequences", value)
    if len(stops) > MAX_STOPS:
        raise invalid("stop_sequences", f"stop_sequences has {len(stops)}; there may be up to {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            where = f"stop_sequences[{index}]"
            raise invalid(where, f"{where} is {show(stop)}; it must be a string that is not empty")
    return tuple(stops)


def _metadata(fields: Fields) -> None:
    value = fields.take("metadata")
    if value is None:
        return
    check_object("metadata", value, ("user_id",))
    user = value.get("user_id")
    if user is not None and (not isinstance(user, str) or len(user) > 512):
        raise invalid("metadata.user_id", f"metadata.user_id is {show(user)}; up to 512 characters")
