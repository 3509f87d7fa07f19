"""SmolLM2's format: one list for all calls, ``<tool_call>[{...}, {...}]</tool_call>``.

Its chat template knows nothing of tools; how they are put to the model follows its model card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tenfold.server.tool_formats.base import ToolFormat


class _Prompt:
    def system(self, tools: Sequence[dict[str, Any]]) -> str:
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return (
            "You compose functions. You are given a question and a set of functions that may be used. "
            "Depending on the question you make one or more function calls to answer it. If none of the "
            "functions fits, or the question lacks what a function needs, say so.\n\n"
            f"You have access to these tools:\n<tools>{functions}</tools>\n\n"
            "Calls must be written in this form, with arguments of the right types, and nothing else:\n"
            '<tool_call>[\n{"name": "func_name1", "arguments": {"argument1": "value1"}},'
            "\n... (more calls as needed)\n]</tool_call>"
        )

    def calls(self, calls: Sequence[dict[str, Any]]) -> str:
        return f"<tool_call>{json.dumps(list(calls), ensure_ascii=False)}</tool_call>"

    def results(self, results: Sequence[str]) -> str:
        return "\n".join(f"<tool_response>{result}</tool_response>" for result in results)


SMOLLM2 = ToolFormat(name="smollm2", markers=("<tool_call>",), end="</tool_call>", prompt=_Prompt())
