"""Features of the answers under way, token by token, until they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenfold.backends.base import Floats
from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize
from tenfold.speculate.base import DraftSequence, Outcome
from tenfold.traffic.store import Features

MOST_TOKENS = 256
"""Of an answer, its first: as `train-drafter` has them."""
MOST_BYTES = 128 << 20
"""Of all answers under way: one more is not kept while these are held."""


class LiveCapture:
    """Answers of the default namespace; what was resumed from another worker has no features at first, and is
    passed over."""

    def __init__(self, width: int, most_bytes: int = MOST_BYTES) -> None:
        self._width = width
        self._most_rows = most_bytes // (4 * width)
        self._held = 0
        self._rows: dict[str, list[Floats]] = {}
        """By sequence, arrays [n, width]: those of its first tokens without a gap."""
        self._count: dict[str, int] = {}

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence has its first token or none, or it is passed over."""
        if sequence.namespace == "" and len(sequence.tokens) - sequence.prompt_length <= 1:
            self._rows[sequence.id] = []
            self._count[sequence.id] = 0

    def ask(self, sequences: Sequence[DraftSequence]) -> None:
        """Before a step: takes the last token's features where no step told of them (its prompt's did, or the
        sequence was put back meanwhile)."""
        for sequence in sequences:
            count = self._count.get(sequence.id)
            if count is None or sequence.features is None:
                continue
            if len(sequence.tokens) - sequence.prompt_length - 1 == count:
                self._add(sequence.id, sequence.features[None])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """After a step: takes the features of all tokens that it brought."""
        for outcome in outcomes:
            sequence = outcome.sequence
            count = self._count.get(sequence.id)
            if count is None or outcome.features is None:
                continue
            # Behind a gap nothing is of use.
            if len(sequence.tokens) - sequence.prompt_length - len(outcome.drawn) == count:
                self._add(sequence.id, outcome.features)

    def end(self, sequence: DraftSequence) -> Features:
        """[rows, width] of the first tokens; forgets the sequence."""
        parts = self._rows.pop(sequence.id, [])
        self._held -= self._count.pop(sequence.id, 0)
        answered = len(sequence.tokens) - sequence.prompt_length
        if not parts:
            return np.zeros((0, self._width), np.uint16)
        return quantize(np.concatenate(parts)[:answered], Layout(Format.BF16)).codes

    def _add(self, id: str, rows: Floats) -> None:
        count = self._count[id]
        rows = rows[: MOST_TOKENS - count]
        if len(rows) and self._held + len(rows) <= self._most_rows:
            self._rows[id].append(rows.copy())
            self._count[id] = count + len(rows)
            self._held += len(rows)
