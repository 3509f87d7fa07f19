"""How models mark what they think before they answer."""

from __future__ import annotations

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Two markers; reasoning stands between them, at the start of an answer."""

    name: str
    start: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within reasoning: some templates write the start marker
        themselves."""
        return prompt.rstrip().endswith(self.start)


THINK = ReasoningFormat("think", "<think>", "</think>")
"""DeepSeek R1, Qwen 3, SmolLM3 and most others."""
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
"""Magistral."""
FORMATS = {each.name: each for each in (THINK, MISTRAL)}


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format whose end marker the template knows."""
    return next((each for each in FORMATS.values() if each.end in template), None)
