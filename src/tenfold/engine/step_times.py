"""How long steps take, kept for whoever plans with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sized

from tenfold.engine.scheduler import Work
from tenfold.engine.verify import Gain
from tenfold.protocol import StepTime

KEPT = 16
"""Times of at most so many steps are handed out at once, the latest."""

Shape = tuple[int, int, int]
"""Rows of prompts, sequences that decode, and the cache rows of those."""


class StepTimes:
    """The times of the latest steps."""

    def __init__(self) -> None:
        self._times: deque[StepTime] = deque(maxlen=KEPT)

    def shape(self, work: Sized[Work]) -> Shape:
        """Of a step that has not been committed yet: then a prompt's last rows look like a decode."""
        prompt = decodes = context = 0
        for sequence, rows, _ in work:
            if rows == 1 and len(sequence.tokens) > sequence.prompt_length:
                decodes += 1
                context += sequence.computed
            else:
                prompt += rows
        return prompt, decodes, context

    def add(self, shape: Shape, gains: Sized[Gain], seconds: float) -> None:
        """A step that was made. Sequences that decode come first in it, and so do their gains."""
        prompt, decodes, context = shape
        tokens = sum(len(gain.tokens) for gain in gains[:decodes])
        self._times.append(StepTime(prompt, decodes, context, tokens, seconds))

    def take(self) -> tuple[StepTime, ...]:
        """Those kept since the last call."""
        times = tuple(self._times)
        self._times.clear()
        return times
