"""A head that can be exchanged while it serves, and that notes how its drafts fare."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tenfold.backends.base import RecurrentProgram
from tenfold.live.decide import LOOKS, Scores
from tenfold.speculate.base import Draft, DraftSequence
from tenfold.speculate.head import HeadDrafter


class _Running:
    """A sequence under way: the draft whose first token is not known yet, and the count so far."""

    __slots__ = ("place", "scored", "stood", "token")

    def __init__(self) -> None:
        self.place = -1
        self.token = self.scored = self.stood = 0

    def score(self, tokens: list[int]) -> None:
        if 0 <= self.place < len(tokens):
            self.scored += 1
            self.stood += tokens[self.place] == self.token
            self.place = -1


class LiveHead:
    """A `speculate.base.Drafter`: a `HeadDrafter` with whichever program is live. It owns that one.

    Every draft that was asked for is scored by its first token, verified or not.
    """

    name = HeadDrafter.name
    qualities = HeadDrafter.qualities

    def __init__(self, program: RecurrentProgram) -> None:
        self._program = program
        self._drafter = HeadDrafter(program)
        self._running: dict[str, _Running] = {}
        self.requests: deque[Scores] = deque(maxlen=LOOKS[-1])
        """Ended requests that the live program drafted for, the latest of them."""

    def exchange(self, program: RecurrentProgram) -> RecurrentProgram:
        """From the next draft on this program drafts. Hands back the one before. Counts start anew, also
        those of requests under way."""
        before, self._program = self._program, program
        self._drafter = HeadDrafter(program)
        for running in self._running.values():
            running.place, running.scored, running.stood = -1, 0, 0
        self.requests.clear()
        return before

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence starts."""
        self._running[sequence.id] = _Running()

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves; its drafts count however it ended."""
        running = self._running.pop(sequence.id)
        running.score(sequence.tokens)
        if running.scored:
            self.requests.append(Scores(running.scored, running.stood))

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """See `HeadDrafter.propose`."""
        drafts = self._drafter.propose(sequences, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            running = self._running[sequence.id]
            running.score(sequence.tokens)
            if draft.tokens:
                running.place, running.token = len(sequence.tokens), draft.tokens[0]
        return drafts

    def close(self) -> None:
        """Frees the live program."""
        self._drafter.close()
