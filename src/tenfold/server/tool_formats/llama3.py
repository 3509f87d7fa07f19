"""Llama 3's format: ``{"name": ..., "parameters": {...}}``, bare at the start of the answer or behind
``<|python_tag|>``, several calls parted by ``;``.

Calls of Llama's built-in tools in Python's notation (``<|python_tag|>brave_search.call(...)``) are text: no
request defines those tools.
"""

from __future__ import annotations

from tenfold.server.tool_formats.base import ToolFormat

LLAMA3 = ToolFormat(name="llama3", markers=("<|python_tag|>",), separator=";", bare=True)
