"""Which format of tool calls a model writes, and how tools are put to it."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.server.text import Text
from tenfold.server.tool_formats.base import ToolFormat
from tenfold.server.tool_formats.hermes import HERMES
from tenfold.server.tool_formats.llama3 import LLAMA3
from tenfold.server.tool_formats.mistral import MISTRAL
from tenfold.server.tool_formats.smollm2 import SMOLLM2

FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, SMOLLM2)}


class ToolSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How a model calls tools."""

    form: ToolFormat | None
    """None: not at all."""
    native: bool = True
    """The chat template takes tools itself; else they are written into the messages, see `write_out`."""
    why: str
    """How that was found out, or why the model cannot."""


def choose_tools(text: Text, asked: str) -> ToolSetup:
    """The format ``asked`` for, one of `FORMATS` or ``none``, or by ``auto`` the one that the model's chat
    template shows."""
    if text.template is None:
        return ToolSetup(form=None, why="the model has no chat template")
    if asked == "none":
        return ToolSetup(form=None, why="tools are switched off (--tool-format none)")
    source = text.template.source
    native = "tools" in text.template.variables
    if asked == "auto":
        form, why = _detect(source, text)
        why += "" if native else "; tools go into the system message, for the template takes none"
    else:
        form, why = FORMATS[asked], "as asked for"
    if not native and form.prompt is None:
        return ToolSetup(
            form=None,
            why=f"its chat template takes no tools, and the format {form.name} has no prompt of its own; "
            "start the server with --tool-format hermes or smollm2 if the model was trained for one of them",
        )
    return ToolSetup(form=form, native=native, why=why)


def _detect(source: str, text: Text) -> tuple[ToolFormat, str]:
    for marks, form in (
        (("<tool_call>",), HERMES),
        (("[TOOL_CALLS]",), MISTRAL),
        (("<|python_tag|>", "<|start_header_id|>"), LLAMA3),
    ):
        for mark in marks:
            if mark in source:
                return form, f"the chat template has {mark}"
    if "SmolLM" in source:
        return SMOLLM2, "the chat template names SmolLM"
    if "[TOOL_CALLS]" in text.special_tokens and "tools" in (
        text.template.variables if text.template else ()
    ):
        return MISTRAL, "the model has the token [TOOL_CALLS]"
    return HERMES, "nothing in the chat template shows a format"


def write_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: they stand in the system message, calls in the
    assistant's text, and what tools answered in a message of the user's."""
    prompt = form.prompt
    assert prompt is not None
    written: list[dict[str, Any]] = []
    results: list[str] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        if results:
            written.append({"role": "user", "content": prompt.results(results)})
            results = []
        if message.get("tool_calls"):
            calls = prompt.calls([call["function"] for call in message["tool_calls"]])
            content = "\n".join(part for part in (message["content"], calls) if part)
            message = {"role": message["role"], "content": content}
        written.append(message)
    written.pop()
    if tools:
        system = prompt.system(tools)
        if written and written[0]["role"] in ("system", "developer"):
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{system}"}
        else:
            written.insert(0, {"role": "system", "content": system})
    return written
