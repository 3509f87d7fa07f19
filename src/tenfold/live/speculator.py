"""A speculator that learns beside drafting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tenfold.live.capture import LiveCapture
from tenfold.live.learner import Learner
from tenfold.speculate.base import DraftSequence, Outcome, SpeculationReport, Speculator

log = logging.getLogger(__name__)


class LearningSpeculator:
    """A `speculate.base.Speculator`: another one, whose traffic is learnt from.

    A fault of the learning ends the learning, and nothing else.
    """

    wants_features = True

    def __init__(self, inner: Speculator, capture: LiveCapture, learner: Learner) -> None:
        self._inner = inner
        self._capture = capture
        self._learner = learner
        self._learns = True

    def begin(self, sequence: DraftSequence) -> None:
        """See `Speculator.begin`."""
        self._try(lambda: self._capture.begin(sequence))
        self._inner.begin(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """See `Speculator.end`."""
        self._inner.end(sequence, learn)

        def keep() -> None:
            features = self._capture.end(sequence)
            if learn:
                self._learner.keep(sequence, features)

        self._try(keep)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """See `Speculator.propose`. A head that is due goes live before."""
        self._try(self._learner.poll)
        self._try(lambda: self._capture.ask(sequences))
        return self._inner.propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """See `Speculator.observe`."""
        self._try(lambda: self._capture.observe(outcomes))
        self._inner.observe(outcomes, rows, step_ms)

    def report(self) -> SpeculationReport:
        """See `Speculator.report`."""
        return self._inner.report()._replace(head_swaps=dict(self._learner.swaps))

    def close(self) -> None:
        """See `Speculator.close`; ends the learning too."""
        if self._learns:
            self._learns = False
            self._learner.close()
        self._inner.close()

    def _try(self, part: Callable[[], None]) -> None:
        if not self._learns:
            return
        try:
            part()
        except Exception:
            self._learns = False
            log.exception(
                "learning from recent answers has failed and is off until the next start: serving goes on"
            )
            try:
                self._learner.close()
            except Exception:
                log.exception("and it could not be ended properly")
