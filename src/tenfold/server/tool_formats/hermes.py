"""Hermes' format, which Qwen 2.5 and 3, SmolLM3 and many others write too: ``<tool_call>{...}</tool_call>``.

It is also how tools are put to a model whose template knows nothing of them: the system prompt is in the
manner that Hermes 2 Pro and Qwen 2.5 were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tenfold.server.tool_formats.base import ToolFormat


class _Prompt:
    def system(self, tools: Sequence[dict[str, Any]]) -> str:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\n"
            "You may call one or more functions to help with what the user asks. Their signatures:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each call write a JSON object with the function's name and arguments, like this:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def calls(self, calls: Sequence[dict[str, Any]]) -> str:
        return "\n".join(
            f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls
        )

    def results(self, results: Sequence[str]) -> str:
        return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


HERMES = ToolFormat(name="hermes", markers=("<tool_call>",), end="</tool_call>", prompt=_Prompt())
