"""A speculator that decides nothing: always the same drafter, always as many tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tenfold.speculate.base import (
    Drafter,
    DrafterReport,
    DraftSequence,
    Outcome,
    SpeculationReport,
)


class FixedSpeculator:
    """Up to ``k`` tokens of one drafter for every sequence, and as many for each where rows are short. For
    tests, and to compare with. A `tenfold.speculate.base.Speculator`.

    ``wants_features``: whether the drafter reads the features of sequences.
    """

    def __init__(self, drafter: Drafter, k: int, wants_features: bool = False) -> None:
        if k < 0:
            raise ValueError(f"k is {k}; a draft cannot have fewer than 0 tokens")
        self.wants_features = wants_features
        self._drafter = drafter
        self._k = k
        self._steps = self._committed = self._drafts = self._drafted = self._accepted = 0
        self._idle: Counter[str] = Counter()

    def begin(self, sequence: DraftSequence) -> None:
        """Passed on to the drafter."""
        self._drafter.begin(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """Passed on to the drafter."""
        self._drafter.end(sequence, learn)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """See `Speculator.propose`. The drafter is asked for those sequences alone that can have a token."""
        most = min(self._k, rows // len(sequences))
        lengths = [min(most, limit) for limit in limits]
        chosen = [i for i, length in enumerate(lengths) if length > 0]
        drafts: list[Sequence[int]] = [()] * len(sequences)
        if most < 1:
            self._idle["load" if self._k else "k is 0"] += len(sequences)
            return drafts
        self._idle["last token"] += len(sequences) - len(chosen)
        if chosen:
            asked = [sequences[i] for i in chosen]
            for i, draft in zip(
                chosen, self._drafter.propose(asked, [lengths[i] for i in chosen]), strict=True
            ):
                drafts[i] = draft.tokens
                self._idle["no draft"] += len(draft.tokens) == 0
        return drafts

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Counts."""
        for outcome in outcomes:
            self._steps += 1
            self._committed += len(outcome.drawn)
            self._drafts += outcome.drafted > 0
            self._drafted += outcome.drafted
            self._accepted += outcome.accepted

    def report(self) -> SpeculationReport:
        """Counts so far."""
        drafter = DrafterReport(self._drafter.name, self._drafts, self._drafted, self._accepted)
        return SpeculationReport(self._steps, self._committed, (drafter,), dict(+self._idle))

    def close(self) -> None:
        """Closes the drafter."""
        self._drafter.close()
