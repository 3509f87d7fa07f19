"""How a model calls tools and marks its reasoning: decided once a server."""

from __future__ import annotations

from dataclasses import dataclass

from tenfold.config import PlanLine
from tenfold.server.answer import Answer
from tenfold.server.answer_stream import AnswerStream, Sections
from tenfold.server.reasoning import FORMATS as REASONING
from tenfold.server.reasoning import ReasoningFormat, detect_reasoning
from tenfold.server.text import Text
from tenfold.server.tool_formats.choose import ToolSetup, choose_tools


@dataclass(frozen=True)
class ChatSetup:
    """The choices for one model."""

    tools: ToolSetup
    reasoning: ReasoningFormat | None
    reasoning_why: str

    def lines(self) -> tuple[PlanLine, PlanLine]:
        """For the plan."""
        form = self.tools.form
        return (
            PlanLine("tool calls", "off" if form is None else form.name, self.tools.why),
            PlanLine("reasoning", self.reasoning.name if self.reasoning else "off", self.reasoning_why),
        )


def choose_chat(text: Text, tool_format: str = "auto", reasoning_format: str = "auto") -> ChatSetup:
    """The setup for a model's text side, as asked for or by what its chat template shows."""
    tools = choose_tools(text, tool_format)
    if reasoning_format == "auto":
        reasoning = None if text.template is None else detect_reasoning(text.template.source)
        why = (
            "the chat template has no reasoning" if reasoning is None else f"the template has {reasoning.end}"
        )
    else:
        reasoning, why = REASONING.get(reasoning_format), "as asked for"
    return ChatSetup(tools, reasoning, why)


def new_answer(text: Text, stop: tuple[str, ...], sections: Sections) -> Answer:
    """The answer of one choice; the control tokens that its formats are made of are shown to it."""
    names: list[str] = []
    if sections.tools is not None:
        names += (*sections.tools.markers, *sections.tools.tokens)
        names += [sections.tools.end] if sections.tools.end is not None else []
    if sections.reasoning is not None:
        names += (sections.reasoning.start, sections.reasoning.end)
    shown = frozenset(text.special_tokens[name] for name in names if name in text.special_tokens)
    return Answer(AnswerStream(text.stream((), shown), stop, sections))
