"""Mistral's formats: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` to version 7 of its
tokenizers, and ``[TOOL_CALLS]name[ARGS]{...}`` for each call from version 11 on."""

from __future__ import annotations

from tenfold.server.tool_formats.base import ToolFormat

MISTRAL = ToolFormat(
    name="mistral",
    markers=("[TOOL_CALLS]",),
    header=True,
    tokens=("[ARGS]", "[CALL_ID]"),
    short_ids=True,
)
