"""Bodies of ``/v1/responses``: what is accepted, in which range, and what is refused with which reason."""

from __future__ import annotations

from typing import Any, Literal

from tenfold.limits import RANGES
from tenfold.protocol import Constraint, SamplingParams
from tenfold.server.api_tools import check_named, check_names, check_tool_list, flat_tool
from tenfold.server.constraints import json_schema
from tenfold.server.errors import invalid
from tenfold.server.fields import Fields, check_object, check_string, is_among, show
from tenfold.server.requests import TEMPERATURE, ApiRequest, read_fields, seed_or_new, take_labels
from tenfold.server.responses_api.items import Item, conversation_of, parse_input
from tenfold.server.responses_api.store import Shelf
from tenfold.server.tools import ToolUse

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    ".function.": ".",
}


class ResponsesRequest(ApiRequest, frozen=True, kw_only=True):
    """A checked body."""

    input: list[Item]
    """This request's own."""
    conversation: list[Item]
    """The items before it, and its own."""
    kept_bytes: int
    """Of the response before it, and of this body."""
    store: bool
    shown: dict[str, Any]
    """What of the request a response shows again."""


def parse_response(
    body: bytes | Fields, models: tuple[str, ...], vocab_size: int, store: Shelf
) -> ResponsesRequest:
    """A body; what came before it is in the store. Raises `ApiError`."""
    fields = read_fields(body, models)
    take_labels(fields)
    own = parse_input(fields.take("input"))
    previous = fields.string("previous_response_id")
    before = None if previous is None else store.get(previous, "previous_response_id")
    items = [*(before.conversation if before else ()), *own]
    messages = conversation_of(items, len(items) - len(own))
    instructions = fields.string("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    tools, shown_tools = _tools(fields)
    variables, reasoning = _reasoning(fields.take("reasoning"))
    constraint, text = _text(fields.take("text"))
    _unsupported(fields)
    params = SamplingParams(
        temperature=fields.number("temperature", 1.0, TEMPERATURE),
        top_p=fields.number("top_p", 1.0, RANGES["top_p"]),
        seed=seed_or_new(fields.integer("seed", RANGES["seed"])),
        max_tokens=fields.integer("max_output_tokens", RANGES["max_tokens"]),
        constraint=constraint,
    )
    stream = fields.boolean("stream")
    options = fields.take("stream_options")
    if options is not None:
        check_object("stream_options", options, ("include_obfuscation",))
        if not is_among(options.get("include_obfuscation"), (None, False)):
            raise invalid(
                "stream_options.include_obfuscation",
                "stream_options.include_obfuscation: events are not padded",
                code="unsupported_value",
            )
    stored = fields.take("store")
    if stored is not None and not isinstance(stored, bool):
        raise invalid("store", f"store is {show(stored)}; it must be true or false")
    shown = {
        "background": False,
        "instructions": instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": fields.take("metadata") or {},
        "parallel_tool_calls": fields.take("parallel_tool_calls") is not False,
        "previous_response_id": previous,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": stored is not False,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": fields.take("tool_choice") or "auto",
        "tools": shown_tools,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": fields.take("user"),
    }
    fields.finish()
    return ResponsesRequest(
        params=params,
        stream=stream,
        include_usage=True,
        messages=messages,
        tools=tools,
        template_variables=variables,
        names=_NAMES,
        input=own,
        conversation=items,
        kept_bytes=fields.size + (before.bytes if before else 0),
        store=stored is not False,
        shown=shown,
    )


def _unsupported(fields: Fields) -> None:
    fields.only("background", (False,), "a response is computed while its client waits")
    fields.only("truncation", ("disabled",), "nothing is left out of a conversation; shorten it")
    fields.only("conversation", (), "conversations are not kept; use previous_response_id")
    fields.only("prompt", (), "no prompts are kept; send instructions and input")
    fields.only("context_management", ([],), "the conversation is taken as it is")
    fields.only("max_tool_calls", (), "the server itself calls no tools")
    fields.only("top_logprobs", (0,), "log-probabilities are in the chat API: logprobs there")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    fields.only("moderation", (), "nothing is moderated")
    # Reasoning comes in the clear, and can be sent back as it is.
    include = fields.take("include")
    if include is not None and (
        not isinstance(include, list) or any(item != "reasoning.encrypted_content" for item in include)
    ):
        raise invalid(
            "include",
            f"include is {show(include)}; there is nothing more that an answer could have",
            code="unsupported_value",
        )


def _tools(fields: Fields) -> tuple[ToolUse | None, list[dict[str, Any]]]:
    """The tools, and as a response shows them."""
    tools, shown, strict = [], [], set()
    for index, value in enumerate(check_tool_list(fields.take("tools"))):
        where = f"tools[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(value, dict) and kind != "function":
            raise invalid(
                f"{where}.type",
                f"{where}.type is {show(kind)}; the server has no tools of its own, only functions are "
                "supported",
                code="unsupported_value",
            )
        check_object(where, value, ("type", "name", "description", "parameters", "strict"))
        tool, is_strict = flat_tool(where, value, "parameters")
        tools.append(tool)
        shown.append({"description": None, **value, "parameters": tool["function"]["parameters"]})
        shown[-1]["strict"] = is_strict
        if is_strict:
            strict.add(tool["function"]["name"])
    names = [tool["function"]["name"] for tool in tools]
    check_names(names)
    parallel = fields.take("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise invalid(
            "parallel_tool_calls", f"parallel_tool_calls is {show(parallel)}; it must be true or false"
        )
    choice, named = _choice(fields.take("tool_choice"), names)
    if not tools:
        return None, []
    use = ToolUse(
        tools=tools,
        choice=choice,
        named=named,
        parallel=parallel is not False and named is None,
        strict=frozenset(strict),
    )
    return use, shown


def _choice(value: Any, names: list[str]) -> tuple[Literal["none", "auto", "required"], str | None]:
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    if value == "required":
        if not names:
            raise invalid("tool_choice", 'tool_choice is "required", and there are no tools')
        return "required", None
    if not isinstance(value, dict) or value.get("type") != "function":
        raise invalid(
            "tool_choice",
            f'tool_choice is {show(value)}; it must be "none", "auto", "required" or '
            '{"type": "function", "name": "..."}',
            code="unsupported_value",
        )
    check_object("tool_choice", value, ("type", "name"))
    return "required", check_named("tool_choice.name", value.get("name"), names)


def _reasoning(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables for the template, and what a response shows."""
    shown: dict[str, Any] = {"effort": None, "summary": None}
    if value is None:
        return {}, shown
    check_object("reasoning", value, ("effort", "summary", "generate_summary"))
    for name in ("summary", "generate_summary"):
        if value.get(name) not in (None, "auto"):
            raise invalid(
                f"reasoning.{name}",
                f"reasoning.{name} is {show(value[name])}; reasoning is not summarized but shown in whole",
                code="unsupported_value",
            )
    effort = value.get("effort")
    if effort is None:
        return {}, shown
    shown["effort"] = check_string("reasoning.effort", effort)
    return {"reasoning_effort": effort}, shown


def _text(value: Any) -> tuple[Constraint | None, dict[str, Any]]:
    """The constraint that ``text.format`` is, and what a response shows."""
    if value is None:
        return None, {"format": {"type": "text"}}
    check_object("text", value, ("format", "verbosity"))
    verbosity = value.get("verbosity")
    if verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity",
            f"text.verbosity is {show(verbosity)}; models here know no such setting; say it in a message",
            code="unsupported_value",
        )
    form = {"type": "text"} if value.get("format") is None else value["format"]
    return _format(form), {"format": form, **({} if verbosity is None else {"verbosity": verbosity})}


def _format(form: Any) -> Constraint | None:
    where = "text.format"
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        return json_schema(where, {name: value for name, value in form.items() if name != "type"})
    if kind not in ("text", "json_object"):
        raise invalid(
            where, f'{where} is {show(form)}; its type must be "text", "json_object" or "json_schema"'
        )
    check_object(where, form, ("type",))
    return Constraint(kind="json_object", text="", field=where) if kind == "json_object" else None
