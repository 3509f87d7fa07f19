"""The messages of a chat request."""

from __future__ import annotations

import json
from typing import Any

from tenfold.server.errors import invalid
from tenfold.server.fields import show

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
_EMPTY = ("refusal", "function_call", "audio", "annotations")
"""A client that sends an answer back sends all of its fields, most of them null."""


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises ApiError.

    ``content`` is always a string. An assistant's ``tool_calls`` have their arguments as objects; a tool's
    message has the ``name`` of the tool whose call it answers, if it says which that is.
    """
    if value is None:
        raise invalid("messages", "messages is missing", code="missing_parameter")
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"messages is {show(value)}; it must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise invalid("messages", f"messages has {len(value)} messages; it must be at most {MAX_MESSAGES}")
    messages = [_message(f"messages[{index}]", message) for index, message in enumerate(value)]
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            called[call["id"]] = call["function"]["name"]
        if (id := message.get("tool_call_id")) is None:
            continue
        if id not in called:
            where = f"messages[{index}].tool_call_id"
            raise invalid(where, f"{where} is {show(id)}; no call in tool_calls before it has that id")
        message.setdefault("name", called[id])
    return messages


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {show(role)}; it must be one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role}
    calls = value.get("tool_calls")
    if calls is not None and calls != []:
        if role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant's message has them")
        if not isinstance(calls, list):
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls is {show(calls)}; it must be a list")
        message["tool_calls"] = [
            _call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    content = value.get("content")
    message["content"] = (
        "" if content is None and "tool_calls" in message else _content(f"{where}.content", content)
    )
    strings = {"assistant": ("name", "reasoning_content"), "tool": ("name", "tool_call_id")}.get(
        role, ("name",)
    )
    for name, item in value.items():
        if name in ("role", "content", "tool_calls"):
            continue
        if name in strings:
            if item is not None:
                if not isinstance(item, str):
                    raise invalid(f"{where}.{name}", f"{where}.{name} is {show(item)}; it must be a string")
                message[name] = item
        elif name not in (*_EMPTY, "reasoning_content", "tool_call_id"):
            raise invalid(f"{where}.{name}", f"unknown field {where}.{name}", code="unknown_parameter")
        elif item not in (None, []):
            raise invalid(
                f"{where}.{name}",
                f"{where}.{name} is {show(item)}; a message of the {role}'s cannot have it here",
                code="unsupported_value",
            )
    return message


def _call(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    for name in value:
        if name not in ("id", "type", "function", "index"):
            raise invalid(f"{where}.{name}", f"unknown field {where}.{name}", code="unknown_parameter")
    id, function = value.get("id"), value.get("function")
    if not isinstance(id, str):
        raise invalid(f"{where}.id", f"{where}.id is {show(id)}; it must be a string")
    if value.get("type", "function") != "function":
        raise invalid(f"{where}.type", f'{where}.type is {show(value["type"])}; it must be "function"')
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", f"{where}.function is {show(function)}; it must be an object")
    for name in ("name", "arguments"):
        if not isinstance(function.get(name), str):
            raise invalid(
                f"{where}.function.{name}",
                f"{where}.function.{name} is {show(function.get(name))}; it must be a string",
            )
    for name in function:
        if name not in ("name", "arguments"):
            raise invalid(
                f"{where}.function.{name}", f"unknown field {where}.function.{name}", code="unknown_parameter"
            )
    called = {"name": function["name"], "arguments": arguments_object(function["arguments"])}
    return {"id": id, "type": "function", "function": called}


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(where, f"{where} is {show(value)}; it must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"{where}[{index}]",
                f'{where}[{index}] is {show(part)}; only {{"type": "text", "text": "..."}} is supported',
                code="unsupported_value",
            )
        for name in part:
            if name not in ("type", "text"):
                raise invalid(
                    f"{where}[{index}].{name}",
                    f"unknown field {where}[{index}].{name}",
                    code="unknown_parameter",
                )
        texts.append(part["text"])
    return "\n".join(texts)


def arguments_object(text: str) -> Any:
    """As templates want them: an object where the text is one. Else the text itself: a model that wrote
    something else may see what it wrote."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
