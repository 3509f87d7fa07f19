"""Which tokens the rows of a step may draw, for the sequences with a constraint."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sized

import numpy as np

from tenfold.backends.base import UInt32s
from tenfold.constraints.base import ConstraintError
from tenfold.engine.scheduler import Work
from tenfold.engine.sequence import Sequence


class Masks:
    """Masks for steps with logits of at most ``rows`` rows, over a vocabulary of ``vocab_size``.

    The memory is made with the first constraint and used again in each step.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._shape = (rows, (vocab_size + 31) // 32)
        self._masks: UInt32s = np.zeros((0, self._shape[1]), np.uint32)
        self._used = 0
        self._first: dict[Sequence, int] = {}
        self.filled = 0
        """Masks computed so far, ..."""
        self.fill_ms = 0.0
        """... and how long that took."""
        self.failures = 0
        """Requests that ended because their matcher could go no further."""

    @property
    def masks(self) -> UInt32s:
        """[masks of the step, words]; a view, valid until the next step."""
        return self._masks[: self._used]

    def first(self, sequence: Sequence) -> int | None:
        """Which of the masks is that of the sequence's first row that draws; those of its draft follow it.
        None: it may draw any token."""
        return self._first.get(sequence)

    def fill(self, work: Sized[Work]) -> list[tuple[Sequence, str]]:
        """Computes the masks of a step that does ``work``: for each sequence that draws, one after its
        tokens and one after each token of its draft, all of which must fit. Matchers are left as they were.
        Returns the sequences that have none, with the reason; they must not be in the step."""
        self._first.clear()
        self._used = 0
        failed: list[tuple[Sequence, str]] = []
        constrained = [one for one in work if one.sequence.matcher is not None]
        if not constrained:
            return failed
        if not len(self._masks):
            self._masks = np.zeros(self._shape, np.uint32)
        began = time.perf_counter()
        for sequence, rows, draft in constrained:
            if rows == sequence.pending:
                try:
                    self._fill(sequence, draft)
                except ConstraintError as error:
                    self.failures += 1
                    failed.append((sequence, str(error)))
        self.filled += self._used
        self.fill_ms += (time.perf_counter() - began) * 1000
        return failed

    def _fill(self, sequence: Sequence, draft: Sized[int]) -> None:
        matcher, first = sequence.matcher, self._used
        assert matcher is not None
        matcher.fill(self._masks[first])
        self._first[sequence] = first
        self._used = first + 1 + len(draft)
        accepted, row = 0, first + 1
        try:
            for token in draft:
                matcher.accept(token)
                accepted += 1
                matcher.fill(self._masks[row])
                row += 1
        except ConstraintError:
            # What comes after a guess exceeds a limit: there nothing is drawn. If the guess is wrong nobody
            # looks.
            self._masks[row : self._used] = 0
        matcher.rollback(accepted)
