"""Conversations in Anthropic's form, as chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.server.errors import invalid
from tenfold.server.fields import check_flag, check_object, check_string, show
from tenfold.server.messages import MAX_MESSAGES

_NOT_TEXT = ("image", "document", "search_result", "container_upload", "redacted_thinking")


def parse_system(value: Any) -> str | None:
    """The system prompt: a string or text blocks. Raises ApiError."""
    return None if value is None else _texts("system", value)


def parse_conversation(value: Any) -> list[dict[str, Any]]:
    """``messages``; what `tenfold.server.messages.parse_messages` gives for OpenAI's. Raises ApiError.

    Results of tools become messages of their own; turns of one role that follow each other become one.
    """
    if value is None:
        raise invalid("messages", "messages is missing", code="missing_parameter")
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"messages is {show(value)}; it must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise invalid("messages", f"messages has {len(value)} messages; it must be at most {MAX_MESSAGES}")
    messages: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for index, item in enumerate(value):
        where = f"messages[{index}]"
        check_object(where, item, ("role", "content"))
        role = item.get("role")
        if role == "user":
            _user(where + ".content", item.get("content"), messages, called)
        elif role == "assistant":
            message = _assistant(where + ".content", item.get("content"))
            for call in message.get("tool_calls", ()):
                called[call["id"]] = call["function"]["name"]
            _add(messages, message)
        else:
            raise invalid(f"{where}.role", f"{where}.role is {show(role)}; it must be user or assistant")
    if value[-1]["role"] == "assistant":
        raise invalid(
            f"messages[{len(value) - 1}]",
            f"messages[{len(value) - 1}] is the assistant's: to go on from the beginning of an answer is not "
            "supported; the last message must be the user's",
            code="unsupported_value",
        )
    return messages


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] = "\n".join(part for part in (last["content"], message["content"]) if part)
    for name in ("tool_calls", "reasoning_content"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _user(where: str, value: Any, messages: list[dict[str, Any]], called: dict[str, str]) -> None:
    if isinstance(value, str):
        _add(messages, {"role": "user", "content": value})
        return
    if not isinstance(value, list) or not value:
        raise invalid(where, f"{where} is {show(value)}; it must be a string or a list of content blocks")
    for index, block in enumerate(value):
        at = f"{where}[{index}]"
        if _type(at, block) == "text":
            _add(messages, {"role": "user", "content": _text(at, block)})
        elif block["type"] == "tool_result":
            messages.append(_result(at, block, called))
        else:
            raise _unsupported(at, block["type"], "user", "text and tool_result")


def _result(where: str, block: dict[str, Any], called: dict[str, str]) -> dict[str, Any]:
    check_object(where, block, ("type", "tool_use_id", "content", "is_error", "cache_control"))
    check_cache_control(where, block)
    id = check_string(f"{where}.tool_use_id", block.get("tool_use_id"))
    if id not in called:
        raise invalid(
            f"{where}.tool_use_id",
            f"{where}.tool_use_id is {show(id)}; no tool_use block before it has that id",
        )
    content = block.get("content")
    text = "" if content is None or content == [] else _texts(f"{where}.content", content)
    if check_flag(f"{where}.is_error", block.get("is_error")):
        text = f"Error: {text}"  # templates know no other way to tell the model
    return {"role": "tool", "content": text, "tool_call_id": id, "name": called[id]}


def _assistant(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if not isinstance(value, list):
        raise invalid(where, f"{where} is {show(value)}; it must be a string or a list of content blocks")
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(value):
        at = f"{where}[{index}]"
        kind = _type(at, block)
        if kind == "text":
            texts.append(_text(at, block))
        elif kind == "thinking":
            check_object(at, block, ("type", "thinking", "signature"))
            thoughts.append(check_string(f"{at}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_call(at, block))
        else:
            raise _unsupported(at, kind, "assistant", "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    check_object(where, block, ("type", "id", "name", "input", "cache_control", "caller"))
    check_cache_control(where, block)
    id = check_string(f"{where}.id", block.get("id"))
    name = check_string(f"{where}.name", block.get("name"))
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input", f"{where}.input is {show(arguments)}; it must be an object")
    if block.get("caller") not in (None, {"type": "direct"}):
        raise invalid(
            f"{where}.caller",
            f"{where}.caller is {show(block['caller'])}; only the model itself calls tools here",
            code="unsupported_value",
        )
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(where, f"{where} is {show(value)}; it must be a string or a list of text blocks")
    texts = []
    for index, block in enumerate(value):
        at = f"{where}[{index}]"
        if _type(at, block) != "text":
            raise _unsupported(at, block["type"], where, "text")
        texts.append(_text(at, block))
    return "\n".join(texts)


def _text(where: str, block: dict[str, Any]) -> str:
    check_object(where, block, ("type", "text", "cache_control", "citations"))
    check_cache_control(where, block)
    if block.get("citations") not in (None, []):
        raise invalid(
            f"{where}.citations", f"{where}.citations: nothing is cited here", code="unsupported_value"
        )
    return check_string(f"{where}.text", block.get("text"))


def _type(where: str, block: Any) -> str:
    if not isinstance(block, dict):
        raise invalid(where, f"{where} is {show(block)}; it must be an object with a type")
    return check_string(f"{where}.type", block.get("type"))


def _unsupported(where: str, kind: str, who: str, known: str) -> Exception:
    why = "only text is supported" if kind in _NOT_TEXT else f"in {who} there may be {known}"
    return invalid(f"{where}.type", f"{where}.type is {show(kind)}; {why}", code="unsupported_value")


def check_cache_control(where: str, value: dict[str, Any]) -> None:
    """A breakpoint of the cache: it must be a proper one, and changes nothing, for prompts are cached from
    their beginning by themselves."""
    control = value.get("cache_control")
    if control is None:
        return
    where += ".cache_control"
    check_object(where, control, ("type", "ttl"))
    if control.get("type") != "ephemeral" or control.get("ttl") not in (None, "5m", "1h"):
        text = msgspec.json.encode({"type": "ephemeral"}).decode()
        raise invalid(where, f'{where} is {show(control)}; it must be {text}, with a ttl of "5m" or "1h"')
