"""Watching a speculator at work."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tenfold.speculate.base import DraftSequence, Outcome, SpeculationReport, Speculator


def judged_of(outcome: Outcome) -> int:
    """How many tokens of a draft the target judged: the first that did not stand is the last of them, and
    where the request ended on an accepted token, the rest of the draft was not judged."""
    ended = len(outcome.drawn) == outcome.accepted
    return outcome.accepted if ended else min(outcome.accepted + 1, outcome.drafted)


class Tally(msgspec.Struct):
    """What became of the drafts of one request."""

    steps: int = 0
    """Steps in which it decoded."""
    committed: int = 0
    """Tokens that those steps gave."""
    judged: list[int] = []
    """By position in a draft: how often the target judged the token there, those before it having stood."""
    stood: list[int] = []
    """And how often it stood."""

    def add(self, outcome: Outcome) -> None:
        """One step more."""
        self.steps += 1
        self.committed += len(outcome.drawn)
        judged = judged_of(outcome)
        while len(self.judged) < judged:
            self.judged.append(0)
            self.stood.append(0)
        for position in range(judged):
            self.judged[position] += 1
            self.stood[position] += position < outcome.accepted

    def merge(self, other: Tally) -> None:
        """Adds another request's."""
        self.steps += other.steps
        self.committed += other.committed
        longer = max(len(self.judged), len(other.judged))
        self.judged = [_at(self.judged, i) + _at(other.judged, i) for i in range(longer)]
        self.stood = [_at(self.stood, i) + _at(other.stood, i) for i in range(longer)]


class Recorder:
    """A `speculate.base.Speculator` that does what another one does, and keeps a tally of each request."""

    def __init__(self, speculator: Speculator) -> None:
        self.wants_features = speculator.wants_features
        self._speculator = speculator
        self._tallies: dict[str, Tally] = {}

    def take(self, id: str) -> Tally:
        """The tally of a request that has ended; forgets it."""
        return self._tallies.pop(id, Tally())

    def begin(self, sequence: DraftSequence) -> None:
        """As the other."""
        self._speculator.begin(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """As the other."""
        self._speculator.end(sequence, learn)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """As the other."""
        return self._speculator.propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Counts, then as the other."""
        for outcome in outcomes:
            self._tallies.setdefault(outcome.sequence.id, Tally()).add(outcome)
        self._speculator.observe(outcomes, rows, step_ms)

    def report(self) -> SpeculationReport:
        """As the other."""
        return self._speculator.report()

    def close(self) -> None:
        """Closes the other."""
        self._speculator.close()


def _at(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
