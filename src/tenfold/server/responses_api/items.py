"""Items of the Responses API: what a conversation consists of there, and as chat templates take it."""

from __future__ import annotations

import secrets
from typing import Any

from tenfold.server.errors import invalid
from tenfold.server.fields import check_list, check_object, check_string, show
from tenfold.server.messages import arguments_object

Item = dict[str, Any]

_ROLES = ("user", "system", "developer", "assistant")
_STATUS = ("in_progress", "completed", "incomplete")
_PARTS = {
    "user": ("input_text",),
    "system": ("input_text",),
    "developer": ("input_text",),
    "assistant": ("output_text", "input_text"),
}
_MESSAGE = ("type", "role", "content", "id", "status", "phase")
_CALL = ("type", "call_id", "name", "arguments", "id", "status", "namespace", "caller", "async", "async_")
_OUTPUT = ("type", "call_id", "output", "id", "status", "name", "caller")
_REASONING = ("type", "id", "summary", "content", "encrypted_content", "status")
_ABSENT = ("phase", "namespace", "caller", "async", "async_", "encrypted_content")
"""Taken where they are null, so that an answer can be sent back as it came."""


def new_id(kind: str) -> str:
    """A new id of an item; whoever knows a response's may read it, so ids cannot be guessed."""
    return f"{kind}_{secrets.token_hex(16)}"


def parse_input(value: Any) -> list[Item]:
    """``input``, as items with ids. Raises ApiError."""
    if value is None:
        raise invalid("input", "input is missing", code="missing_parameter")
    if isinstance(value, str):
        return [_message_item("user", [{"type": "input_text", "text": value}], None)]
    if not isinstance(value, list) or not value:
        raise invalid("input", f"input is {show(value)}; it must be a string or a list of items")
    return [_item(f"input[{index}]", item) for index, item in enumerate(value)]


def conversation_of(items: list[Item], new_from: int) -> list[dict[str, Any]]:
    """Items as `tenfold.server.messages.parse_messages` has messages.

    What the assistant thought, said and called in one go is one message. Items from ``new_from`` on are those
    of this request's ``input``. Raises ApiError for an output whose call is not there.
    """
    messages: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for index, item in enumerate(items):
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        elif kind == "function_call_output":
            id = item["call_id"]
            if id not in called:
                where = f"input[{index - new_from}].call_id"
                raise invalid(where, f"{where} is {show(id)}; no function_call before it has that call_id")
            output = item["output"]
            text = output if isinstance(output, str) else _joined(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": id, "name": called[id]})
        else:
            message = _assistants(messages)
            if kind == "message":
                parts = (message["content"], _joined(item["content"]))
                message["content"] = "\n".join(part for part in parts if part)
            elif kind == "reasoning":
                text = _joined(item["content"] or item["summary"])
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            else:
                called[item["call_id"]] = item["name"]
                function = {"name": item["name"], "arguments": arguments_object(item["arguments"])}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return messages


def _assistants(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _item(where: str, value: Any) -> Item:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    kind = value.get("type")
    if kind is None and "role" in value:
        kind = "message"
    match kind:
        case "message":
            item = _message(where, value)
        case "function_call":
            item = _call(where, value)
        case "function_call_output":
            item = _output(where, value)
        case "reasoning":
            item = _reasoning(where, value)
        case "item_reference":
            raise invalid(
                f"{where}.type",
                f"{where}.type is item_reference: items are not kept one by one; use previous_response_id, "
                "or send the item itself",
                code="unsupported_value",
            )
        case _:
            raise invalid(
                f"{where}.type",
                f"{where}.type is {show(kind)}; supported are message, function_call, function_call_output "
                "and reasoning",
                code="unsupported_value",
            )
    for name in _ABSENT:
        if value.get(name) is not None and not (name == "caller" and value[name] == {"type": "direct"}):
            raise invalid(
                f"{where}.{name}",
                f"{where}.{name} is {show(value[name])}; it is not supported here",
                code="unsupported_value",
            )
    if value.get("status") is not None and value["status"] not in _STATUS:
        names = ", ".join(_STATUS)
        raise invalid(f"{where}.status", f"{where}.status is {show(value['status'])}; it must be of {names}")
    return item


def _id(where: str, value: dict[str, Any], kind: str) -> str:
    id = value.get("id")
    return new_id(kind) if id is None else check_string(f"{where}.id", id)


def _message_item(role: str, content: list[dict[str, Any]], id: str | None) -> Item:
    return {
        "id": id or new_id("msg"),
        "type": "message",
        "role": role,
        "content": content,
        "status": "completed",
    }


def _message(where: str, value: dict[str, Any]) -> Item:
    check_object(where, value, _MESSAGE)
    role = value.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {show(role)}; it must be one of {', '.join(_ROLES)}")
    content = value.get("content")
    kinds = _PARTS[role]
    if isinstance(content, str):
        parts: list[dict[str, Any]] = [{"type": kinds[0], "text": content}]
    else:
        parts = _parts(f"{where}.content", content, kinds)
    if role == "assistant":
        for part in parts:
            part.update(type="output_text", annotations=[])
    return _message_item(role, parts, _id(where, value, "msg"))


def _parts(where: str, value: Any, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    parts = []
    for index, part in enumerate(check_list(where, value)):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise invalid(at, f"{at} is {show(part)}; it must be an object")
        kind = part.get("type")
        if kind not in kinds:
            raise invalid(
                f"{at}.type",
                f"{at}.type is {show(kind)}; only text is supported here: {' or '.join(kinds)}",
                code="unsupported_value",
            )
        check_object(at, part, ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"))
        for name in ("annotations", "logprobs", "prompt_cache_breakpoint"):
            if part.get(name) not in (None, []):
                raise invalid(
                    f"{at}.{name}",
                    f"{at}.{name} is {show(part[name])}; only text is supported",
                    code="unsupported_value",
                )
        parts.append({"type": kind, "text": check_string(f"{at}.text", part.get("text"))})
    return parts


def _call(where: str, value: dict[str, Any]) -> Item:
    check_object(where, value, _CALL)
    return {
        "id": _id(where, value, "fc"),
        "type": "function_call",
        "call_id": check_string(f"{where}.call_id", value.get("call_id")),
        "name": check_string(f"{where}.name", value.get("name")),
        "arguments": check_string(f"{where}.arguments", value.get("arguments")),
        "status": value.get("status") or "completed",
    }


def _output(where: str, value: dict[str, Any]) -> Item:
    check_object(where, value, _OUTPUT)
    output = value.get("output")
    if not isinstance(output, str):
        output = _parts(f"{where}.output", output, ("input_text",))
    return {
        "id": _id(where, value, "fco"),
        "type": "function_call_output",
        "call_id": check_string(f"{where}.call_id", value.get("call_id")),
        "output": output,
        "status": "completed",
    }


def _list(value: Any) -> Any:
    return [] if value is None else value


def _reasoning(where: str, value: dict[str, Any]) -> Item:
    check_object(where, value, _REASONING)
    return {
        "id": _id(where, value, "rs"),
        "type": "reasoning",
        "summary": _parts(f"{where}.summary", _list(value.get("summary")), ("summary_text",)),
        "content": _parts(f"{where}.content", _list(value.get("content")), ("reasoning_text",)),
        "status": "completed",
    }
